"""Answers that are known beforehand, and drafts of them, for benchmarks with random weights.

A runner replaces the tokens that the model samples by those of the known answers, on their way to
the engine. The device goes by its own tokens, and its work does not depend on that. Drafts have a
stated quality, or come from the engine's own lookup in texts that repeat themselves.
"""

import random
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from services.decoder.engine.messages import AddSequence
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.runner import PendingStep
from services.decoder.engine.step import Step, StepOutput

_GOLDEN_RATIO = 0.6180339887498949
_PASSAGE, _BETWEEN = (20, 60), (4, 12)  # least and most tokens of a quotation, and between two
_KEY, _VALUE, _NUM_KEYS = 7, (1, 6), 6  # tokens of a key with punctuation, and of a value


class StatedDrafts:
    """A `lookup.DraftSource` whose drafts are those of a known answer with a stated probability.

    A draft is right with the probability if those before it are right, and wrong otherwise. The
    numbers that decide this are multiples of the golden ratio in place of random ones, so that
    drafts of a short answer are accepted as often as the probability says: of 49 verifications of
    random drafts with 0.866, the accepted length is 3.27 with a standard deviation of 0.15.

    Args:
        known: ids of the prompt and of the answer.
        rate: the probability.
        seed: number that differs among sequences.
    """

    is_prediction = False

    def __init__(self, known: Seq[int], rate: float, seed: int) -> None:
        self._known, self._rate = known, rate
        self._draw = random.Random(seed).random()
        self._num_tokens = 0

    def read(self, token_ids: "array[int]") -> None:
        self._num_tokens = len(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        pass

    def num_equal(self) -> int:
        return 0

    def prospect(self) -> float:
        return 0.0

    def propose(self, most: int) -> list[int]:
        drafts = self._known[self._num_tokens : self._num_tokens + most]
        self._draw = (self._draw + _GOLDEN_RATIO) % 1.0
        chances = [self._rate ** (1 + place) for place in range(len(drafts))]
        return [
            token if self._draw < chance else 0
            for token, chance in zip(drafts, chances, strict=True)
        ]


class ImposedDrafts(StatedDrafts):
    """Stated drafts in place of those that the model's own layer has made, and as many."""

    _num_offered = 0

    def read(self, token_ids: "array[int]") -> None:
        self._num_offered = max(0, self._num_offered - len(token_ids) + self._num_tokens)
        super().read(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        self._num_offered = sum(1 for draft in drafts if draft >= 0)

    def propose(self, most: int) -> list[int]:
        return super().propose(min(most, self._num_offered))


class StatedSources(NamedTuple):
    """Makes sources of drafts of a stated quality.

    Attributes:
        known: prompt and answer of each sequence.
        rate: probability that a draft is right.
        kind: kind of the sources.
    """

    known: dict[int, list[int]]
    rate: float
    kind: type[StatedDrafts] = StatedDrafts

    def of(self, message: AddSequence) -> StatedDrafts:
        """Returns the source of a sequence."""
        return self.kind(self.known[message.sequence_id], self.rate, message.sequence_id)


class Scripted:
    """A `PendingStep` whose sampled tokens are replaced by known ones when they are read.

    Args:
        pending: the launched step.
        tokens: `[B]`, the known token of each sample.
    """

    def __init__(self, pending: PendingStep, tokens: list[int]) -> None:
        self._pending, self._tokens = pending, np.array(tokens, np.int32)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the step's
        return getattr(self._pending, name)

    def result(self) -> StepOutput:
        """Waits for the step, and returns its output with the known tokens."""
        found = self._pending.result()
        return found._replace(token_ids=self._tokens[: len(found.token_ids), None])


class ScriptedRunner:
    """A `Runner` whose sequences get known answers, whatever the model samples.

    If the model's own layer drafts, the device reads drafts where the layer has left them, as it
    does without this runner, which costs time, and the ids of known drafts are not used.

    Args:
        runner: the model's runner.
        known: prompt and answer of each sequence. Other sequences keep their tokens.
    """

    def __init__(self, runner: ModelRunner, known: dict[int, list[int]]) -> None:
        self._runner, self._known = runner, known
        self._sequences: dict[int, int] = {}  # by row

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the runner's
        return getattr(self._runner, name)

    def execute(self, step: Step) -> Scripted:
        """Launches a step; see `Runner`."""
        compute = step.compute
        if compute.has_drafts and self._runner.info.has_draft_head:
            drafts = np.flatnonzero(compute.rows[1:] == compute.rows[:-1]) + 1
            compute.draft_sources = np.zeros((len(drafts), 3), np.int64)
            compute.draft_sources[:, 0] = drafts
        pending = self._runner.execute(step)  # first, because the device may wait for it
        self._sequences.update({start.row: start.sequence_id for start in compute.row_starts})
        ends = (compute.starts + compute.lengths)[compute.samples].tolist()
        rows = compute.rows[compute.samples].tolist()
        # A step that was planned ahead, or drafts, may go beyond the end of an answer.
        known = (self._known[self._sequences[row]] for row in rows)
        tokens = [each[min(end, len(each) - 1)] for each, end in zip(known, ends, strict=True)]
        return Scripted(pending, tokens)


class Text(NamedTuple):
    """A prompt, its answer, and the client's prediction of the answer.

    Attributes:
        prompt, answer: ids.
        prediction: ids. Empty if there is no prediction.
    """

    prompt: list[int]
    answer: list[int]
    prediction: Seq[int] = ()


def repeating_text(kind: str, prompt_length: int, num_tokens: int, vocab_size: int) -> Text:
    """Returns a text of random tokens whose answer repeats something.

    Args:
        kind: "quote" for an answer of passages of the prompt, of 20 to 60 tokens each, with 4 to 12
            new tokens between them; "json" for an answer of entries with the same six keys of seven
            tokens, which include punctuation, and new values of 1 to 6 tokens; "prediction" for new
            tokens that the client predicts.
        prompt_length: number of tokens of the prompt.
        num_tokens: number of tokens of the answer.
        vocab_size: number of different tokens.
    """
    draw = random.Random(kind)

    def fresh(count: int) -> list[int]:
        return [draw.randrange(1, vocab_size) for _ in range(count)]

    prompt, answer = fresh(prompt_length), list[int]()
    keys = [fresh(_KEY) for _ in range(_NUM_KEYS)]
    while len(answer) < num_tokens:
        if kind == "quote":
            start = draw.randrange(max(1, prompt_length - _PASSAGE[1]))
            answer += fresh(draw.randint(*_BETWEEN))
            answer += prompt[start : start + draw.randint(*_PASSAGE)]
        elif kind == "json":
            answer += [token for key in keys for token in (*key, *fresh(draw.randint(*_VALUE)))]
        else:
            answer += fresh(num_tokens)
    answer = answer[:num_tokens]
    return Text(prompt, answer, answer if kind == "prediction" else ())
