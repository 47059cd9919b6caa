"""The real gateway in front of a scripted model: `python -m tests.peers.scripted_server`.

The decoder is a gRPC server with the real protocol. It has no weights, but it obeys what a request
says of sampling as far as a script can: grammars, stop ids, limits, forced and forbidden tokens.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import InvalidGrammar
from services.common.pb import decoder_pb2 as pb
from services.decoder.masks.compiler import Vocabulary, compile_grammar
from services.decoder.masks.grammar import GrammarSource
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.fakes import FakeDecoder
from tests.gateway_stack import MODEL, GatewayStack, LoopThread
from tests.peers.scripted_model import FILLERS, answers
from tests.tiny_tokenizer import added_ids

VOCAB_SIZE = 1 << 16  # ids of other models' tests are below; most are no token here
_NUM_TOKENS = 1 << 9  # that are one
_BLOCK = 16
# Where the script says nothing that the grammar allows: what ends a JSON value, then the rest.
_ENDINGS = '"}],:'
_PROMPT = "{{- '<|im_start|>assistant\\n' }}"


class ScriptedDecoder(FakeDecoder):
    """Answers as `scripted_model` says."""

    directory = Path()
    tokenizer: ModelTokenizer
    prompts: list[np.ndarray]

    def _events_of(self, submit: pb.Submit) -> Iterator[tuple[int, bool]]:
        """Tokens, and whether each ends the answer."""
        sampling = submit.sampling
        stops = set(sampling.stop_token_ids)
        writer = _Writer(self, submit)
        for number in range(sampling.max_tokens):
            token = writer.next(number, stops)
            yield token, token in stops and number >= sampling.min_tokens
            if token in stops and number >= sampling.min_tokens:
                return

    async def _run(self, submit, events) -> None:
        sequence_id, sampling = submit.sequence_id, submit.sampling
        await self._until_asked(submit)
        await self._score_prompt(submit, events)
        ids = np.frombuffer(submit.prompt_token_ids, "<i4")
        cached = self._cached(ids)
        count = 0
        try:
            for token, is_end in self._events_of(submit):
                event = pb.SequenceEvent(sequence_id=sequence_id, token_ids=[token])
                if sampling.HasField("top_logprobs"):
                    event.logprobs.append(_logprobs(token, sampling))
                if not count:
                    event.started.CopyFrom(
                        pb.Started(num_cached_tokens=cached, queue_s=0.001, prefill_s=0.001)
                    )
                count += 1
                if is_end or count == sampling.max_tokens:
                    reason = "REASON_STOP" if is_end else "REASON_LENGTH"
                    event.finished.CopyFrom(pb.Finished(reason=reason))
                await events.put(event)
                await asyncio.sleep(0)
        except _Refused as refused:
            await self._fail(events, sequence_id, "invalid_grammar", str(refused))

    def _cached(self, ids: np.ndarray) -> int:
        """Tokens of whole blocks that an earlier prompt began with, but for the last."""
        longest = 0
        for other in self.prompts:
            size = min(len(ids) - 1, len(other))
            same = np.flatnonzero(ids[:size] != other[:size])
            longest = max(longest, int(same[0]) if len(same) else size)
        self.prompts = [*self.prompts[-32:], ids]
        return longest // _BLOCK * _BLOCK


class _Refused(Exception):
    """A grammar that cannot be compiled."""


@cache
def _vocabulary(directory: Path, end_ids: tuple[int, ...]) -> Vocabulary:
    return Vocabulary.read(directory, _NUM_TOKENS, end_ids)


class _Writer:
    """One answer, token by token."""

    def __init__(self, decoder: ScriptedDecoder, submit: pb.Submit) -> None:
        self._sampling = submit.sampling
        self._tokenizer = decoder.tokenizer
        self._end = added_ids()["<|im_end|>"]
        ids = np.frombuffer(submit.prompt_token_ids, "<i4").tolist()
        prompt = b"".join(map(decoder.tokenizer.token_bytes, ids)).decode(errors="replace")
        greedy = self._sampling.temperature == 0
        self._random = None if greedy else random.Random(self._sampling.seed)
        mood = 0 if self._random is None else self._random.randrange(1 << 16)
        texts = _choices_of(submit, prompt) or answers(prompt, mood, _schema_of(submit))
        candidates = [[*self._encode(text), self._end] for text in texts]
        self._matcher = self._begins_after = None
        if submit.HasField("grammar"):
            self._matcher = self._compile(decoder.directory, submit.grammar)
            self._begins_after = list(submit.grammar.begins_after)
            candidates.sort(key=self._rejected)
        self._script = candidates[0] if candidates else []
        self._filler = self._fillers()
        self._bias = dict(self._sampling.logit_bias)
        self._allowed = set(self._sampling.allowed_token_ids)
        self._bad = {tuple(word.ids) for word in self._sampling.bad_words}
        self._written: list[int] = []

    def next(self, number: int, stops: set[int]) -> int:
        wanted = self._script[0] if self._script else self._filling()
        early = wanted in stops and number < self._sampling.min_tokens
        if early or (wanted == self._end and wanted not in stops):
            self._script, wanted = [], self._filling()
        token = self._choose(wanted)
        if self._script:
            self._script = self._script[1:] if token == wanted else []
        self._written.append(token)
        if self._matcher is not None and token != self._end:
            if self._begins_after:
                if self._written[-len(self._begins_after) :] == self._begins_after:
                    self._begins_after = []
            else:
                self._matcher.consume_token(token)
        return token

    def _filling(self) -> int:
        """What follows a script that is over: what a grammar's text ends with, or any words."""
        is_held = self._matcher is not None and not self._begins_after
        return -1 if is_held else next(self._filler)

    def _choose(self, wanted: int) -> int:
        if self._bias and max(self._bias.values()) > 50:
            return max(self._bias, key=lambda token: self._bias[token])
        if self._is_allowed(wanted):
            return wanted
        if self._allowed:
            return min(self._allowed)
        if self._matcher is not None and not self._begins_after:
            mask = self._matcher.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            found = np.flatnonzero(bits)
            return min(map(int, found), key=self._rank)
        return next(self._filler)

    def _is_allowed(self, token: int) -> bool:
        if token < 0:
            return False
        if self._allowed and token not in self._allowed:
            return False
        if self._bias.get(token, 0) < -50:
            return False
        if any(tuple([*self._written, token][-len(word) :]) == word for word in self._bad):
            return False
        if self._matcher is None or self._begins_after:
            return self._matcher is None or token != self._end
        mask = self._matcher.compute_bitmask()
        return bool(mask[token // 8] >> token % 8 & 1)

    def _fillers(self) -> Iterator[int]:
        while True:
            chosen = 0 if self._random is None else self._random.randrange(len(FILLERS))
            yield from self._encode(FILLERS[chosen])

    def _rank(self, token: int) -> tuple[int, float]:
        """What ends a text comes first, but for digits, of which one that is not greedy likes some
        more than others.
        """
        if token == self._end:
            return (0, 0)
        text = self._tokenizer.token_bytes(token).decode(errors="replace")
        if len(text) == 1 and text in _ENDINGS:
            return (1, _ENDINGS.index(text))
        place = token if self._random is None else self._random.random()
        return (2 if text.isalnum() else 3, place)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_prompt(text, False)

    def _compile(self, directory: Path, grammar: pb.Grammar):
        kind = pb.Grammar.Kind.Name(grammar.kind).removeprefix("KIND_").lower()
        text = grammar.text
        if kind == "choice":
            kind = "regex"
            text = "|".join(re.escape(choice) for choice in json.loads(text))
        try:
            vocabulary = _vocabulary(directory, tuple(grammar.end_token_ids))
            source = GrammarSource(kind, text, grammar.plain_strings)
            return compile_grammar(vocabulary, source).state
        except InvalidGrammar as error:
            raise _Refused(error.message) from None

    def _rejected(self, ids: list[int]) -> int:
        """Of a candidate that the grammar takes 0; else fewer for one that goes further."""
        accepted = self._accepted(ids)
        return 0 if accepted == len(ids) else (1 << 20) - accepted

    def _accepted(self, ids: list[int]) -> int:
        """How many of the tokens the grammar takes in a row."""
        assert self._matcher is not None
        state, begins_after = self._matcher.deep_copy(), self._begins_after
        for number, token in enumerate(ids):
            if begins_after:
                if ids[max(0, number + 1 - len(begins_after)) : number + 1] == begins_after:
                    begins_after = None
                continue
            if not state.compute_bitmask()[token // 8] >> token % 8 & 1:
                return number
            if token != self._end:
                state.consume_token(token)
        return len(ids)


def _choices_of(submit: pb.Submit, prompt: str) -> list[str]:
    """What the answer may be, another one first each turn; nothing where the model thinks."""
    if submit.grammar.kind != pb.Grammar.KIND_CHOICE or prompt.endswith("<think>"):
        return []
    choices = json.loads(submit.grammar.text)
    turn = (prompt.count("<|im_start|>assistant") - 1) % len(choices)
    return [*choices[turn:], *choices[:turn]]


def _schema_of(submit: pb.Submit) -> dict[str, Any] | None:
    """Of the JSON that the answer has to be."""
    if submit.grammar.kind == pb.Grammar.KIND_JSON_SCHEMA:
        return json.loads(submit.grammar.text)
    _, found, text = submit.grammar.text.partition("answer: %json ")
    return json.JSONDecoder().raw_decode(text)[0] if found else None


def _logprobs(token: int, sampling: pb.SamplingParams) -> pb.TokenLogprobs:
    count = sampling.top_logprobs
    top = [token, *(other for other in range(count + 1) if other != token)][:count]
    others = [i for i in sampling.logprob_token_ids if i not in top]
    return pb.TokenLogprobs(
        logprob=-0.01,
        top_token_ids=[*top, *others],
        top_logprobs=[*(-0.01 - 3 * i for i in range(count)), *(-20.0 for _ in others)],
    )


class ScriptedStack(GatewayStack):
    """The gateway, a fake encoder and the scripted decoder."""

    def __init__(self, directory: Path, *, thinks: bool, max_model_len: int, **settings) -> None:
        self._thinks = thinks
        self._max_model_len = max_model_len
        super().__init__(LoopThread(), directory, log_level="ERROR", **settings)

    async def _start(self) -> None:
        default = "true" if self._thinks else "false"
        path = self.model_directory / "chat_template.jinja"
        template = path.read_text()
        assert template.count(_PROMPT) == 1
        switch = (
            f"{_PROMPT}{{%- if enable_thinking | default({default}) %}}{{{{- '<think>' }}}}"
            "{%- elif enable_thinking is defined %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        )
        path.write_text(template.replace(_PROMPT, switch))
        config = json.loads((self.model_directory / "config.json").read_text())
        config["text_config"] |= {
            "vocab_size": VOCAB_SIZE, "max_position_embeddings": self._max_model_len
        }  # fmt: skip
        (self.model_directory / "config.json").write_text(json.dumps(config))
        decoder = ScriptedDecoder(vocab_size=VOCAB_SIZE, max_model_len=self._max_model_len)
        decoder.directory, decoder.tokenizer = self.model_directory, self.tokenizer
        decoder.encoders, decoder.prompts = self.encoders, []
        self.decoders = [decoder]
        await super()._start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--served-model-name", default=MODEL)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--thinks", action="store_true", help="unless a request says otherwise")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        stack = ScriptedStack(
            Path(directory), thinks=options.thinks, max_model_len=options.max_model_len,
            port=options.port, served_model_name=options.served_model_name,
            allowed_media="private", api_keys=options.api_key,
        )  # fmt: skip
        print(f"ready: {stack.url} {stack.model_directory}", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        stack.close()


if __name__ == "__main__":
    main()
