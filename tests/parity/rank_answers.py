"""What an engine answers with a checkpoint, alone or as rank 0, and the ranks that follow it."""

import socket
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from services.common.families import read_spec
from services.common.nn.collectives import ALONE, Ranks
from services.decoder.engine.draft_reader import DraftReader
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.drafting_runner import DraftingRunner
from services.decoder.engine.run.kv_cache import KVCacheShape
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.runner import Runner
from services.decoder.engine.schedule.draft_pace import DraftPace
from services.decoder.models.rank_spec import rank_spec
from services.decoder.models.transformer import Transformer
from services.decoder.ranks.steps import Follower, LeadingRunner
from tests.engine_harness import small_pieces
from tests.known_drafts import KnownDrafts, KnownSources, from_answer

NUM_BLOCKS = 8  # fewer than three sequences have at their ends


def created(directory: Path, ranks: Ranks) -> ModelRunner:
    """Of tiny steps, so that prompts are computed in chunks, and of few blocks."""
    text = rank_spec(read_spec(directory).text, ranks)
    has_head = text.num_mtp_layers > 0
    shape = KVCacheShape(
        len(text.attention_layers) + has_head, 16, text.num_kv_heads, text.head_dim, torch.float32
    )
    options = RunnerOptions(
        model_directory=directory, device="cpu", max_num_sequences=3, max_batched_tokens=16,
        max_model_len=96, kv_cache_bytes=(NUM_BLOCKS + 1) * shape.block_bytes,
        checkpoint_bytes=1 << 20, max_drafts=2, draft_head=has_head,
    )  # fmt: skip
    return create_runner(options, None, ranks)


class OneRank:
    """In place of `RankProcesses`: a rank of a test's own at the other end of a socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def send(self, record: bytes) -> None:
        self._link.sendall(record)


def answers(directory: Path, ranks: Ranks = ALONE, link: socket.socket | None = None) -> dict:
    """Tokens of five greedy answers, twice, so that the second time their prefixes are known; the
    logprobs of a prompt; and how often a sequence was preempted. Of a model for search: the results
    of the five prompts, twice.
    """
    runner = leading = created(directory, ranks)
    if link is not None:
        other: Any = OneRank(link)
        leading = LeadingRunner(runner, other)
    engine = Engine(leading, overlap=True)
    small_pieces(engine)
    generates = runner.info.task == "generate"
    found: dict = {"tokens": {}, "prompt": [], "hits": [], "results": {}}
    for turn in range(2):
        for number in range(5):
            ids = np.arange(20 + 9 * number, dtype=np.int32) * 7 % 300
            ids[20:] += number
            wanted = 1 if (turn, number) == (0, 4) else None
            sampling = SamplingParams(max_tokens=16, prompt_logprobs=wanted)
            if not generates:
                every = 0 if runner.info.task == "token_embed" else None
                sampling = SamplingParams(max_tokens=1, prompt_logprobs=every)
            engine.add(AddSequence(5 * turn + number, ids.tobytes(), b"", 0, [], sampling))
        while engine.has_work:
            done = engine.step()
            for event in done.events if done is not None else ():
                assert event.end is None or event.end.reason in ("stop", "length"), event
                if not generates:
                    scored = event.prompt_logprobs
                    vectors = (b"" if scored is None else scored.top_logprobs) + event.vector
                    result = found["results"].setdefault(str(event.sequence_id), [])
                    result += np.frombuffer(vectors, np.float32).tolist()
                found["tokens"].setdefault(str(event.sequence_id), []).extend(event.token_ids)
                if event.prompt_logprobs is not None:
                    found["prompt"] += np.frombuffer(
                        event.prompt_logprobs.logprobs, np.float32
                    ).tolist()
        found["hits"].append(engine.stats().num_prefix_hit_tokens)
    found["preemptions"] = engine.stats().num_preemptions
    found["drafts"], found["offered"], found["on_device"] = [], {}, 0
    if generates:
        found["drafts"], found["offered"] = _drafted(leading, found["tokens"]["0"])
        if isinstance(runner, DraftingRunner):
            found["on_device"] = _accepted_on_device(leading, runner, found["tokens"]["0"])
    if link is not None:
        link.shutdown(socket.SHUT_WR)
    return found


def _drafted(runner: Runner, answer: list[int]) -> tuple[list[int], dict[str, list[int]]]:
    """Numbers of drafts and of right drafts of a sequence that has the answer of sequence 0, and
    what the model's own layer has drafted, by the number of tokens before.
    """
    engine = Engine(runner, overlap=True, max_drafts=2)
    prompt = np.arange(20, dtype=np.int32) * 7 % 300
    engine.speculation.sources = KnownSources(
        lambda message, index: from_answer(message, answer, index), 0.8
    )
    sampling = SamplingParams(max_tokens=16)
    engine.add(AddSequence(0, prompt.tobytes(), b"", 0, [], sampling))
    source = engine.sequences[0].drafts
    with mock.patch.object(DraftReader, "_needs_ids", return_value=True):  # so that ids are offered
        assert _tokens_of(engine) == answer
    offered: dict[int, list[int]] = {}
    if source is not None:
        assert isinstance(source.source, KnownDrafts)
        offered = source.source.offered
    drafts = engine.stats().drafts
    counts = [] if drafts is None else [drafts.num_drafts, drafts.num_accepted]
    return counts, {str(number): found for number, found in offered.items()}


def _tokens_of(engine: Engine) -> list[int]:
    tokens: list[int] = []
    while engine.has_work:
        done = engine.step()
        for event in done.events if done is not None else ():
            tokens += event.token_ids
    return tokens


def _accepted_on_device(runner: Runner, own: DraftingRunner, answer: list[int]) -> int:
    """Number of accepted drafts whose ids the host did not know when it launched their step. The
    layer's logits on rank 0 are replaced, so that each draft is the token of the answer.
    """
    engine, drafter = Engine(runner, overlap=True, max_drafts=2), own.drafter
    prompt = np.arange(20, dtype=np.int32) * 7 % 300
    message = AddSequence(0, prompt.tobytes(), b"", 0, [], SamplingParams(max_tokens=len(answer)))
    logits, num_calls = drafter._head.logits, 0

    def right(hidden: torch.Tensor, model: Transformer) -> torch.Tensor:
        nonlocal num_calls
        found = logits(hidden, model)  # with all ranks
        sample, index, *_ = drafter.groups(len(hidden))[1:3, 0].tolist()
        given = drafter.groups(len(hidden))[4:, 0].tolist()
        accepted = 0
        while given[accepted : accepted + 1] == [int(drafter._sampled[sample + accepted])]:
            accepted += 1
        place = index + accepted + 2 + num_calls % drafter.num_drafts
        num_calls += 1
        found[:, from_answer(message, answer, place)] = 1e4
        return found

    engine.add(message)
    with (
        mock.patch.object(drafter._head, "logits", right),
        mock.patch.object(DraftPace, "drafts", return_value=True),
    ):
        assert _tokens_of(engine) == answer
    drafts = engine.stats().drafts
    return 0 if drafts is None else drafts.num_accepted


def follow(directory: Path, ranks: Ranks, link: socket.socket) -> None:
    """The other half of `answers`."""
    follower = Follower(created(directory, ranks))
    while follower.take(link):
        pass
