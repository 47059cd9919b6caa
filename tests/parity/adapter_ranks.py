"""Two ranks over gloo with adapters, run by test_adapters_beside.py.

    python -m tests.parity.adapter_ranks answers|changes MODEL ADAPTER...

`answers` prints as JSON the greedy tokens of the same prompt by each adapter and by the base model.
The last adapter is loaded while the ranks run. `changes` prints what `changes` returns. The control
of each line is the answer of one rank, which the caller computes.
"""

import itertools
import json
import multiprocessing
import random
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed

from services.common.adapter_config import AdapterError
from services.common.nn.adapter import Adapter
from services.common.nn.collectives import ALONE, Ranks
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.models.adapters import Adapters
from services.decoder.ranks.steps import Follower, LeadingRunner
from tests.engine_harness import Untimed, small_pieces
from tests.parity.rank_answers import OneRank


def created(
    model: Path, adapters: list[Path], ranks: Ranks = ALONE, *, slots: int | None = None
) -> ModelRunner:
    """A runner with all adapters but the last, and a slot for it."""
    options = RunnerOptions(
        model_directory=model, device="cpu", max_num_sequences=8, max_batched_tokens=64,
        max_model_len=128, kv_cache_bytes=8 << 20, adapters=tuple(adapters[:-1]),
        max_adapters=len(adapters) if slots is None else slots,
    )  # fmt: skip
    return create_runner(options, None, ranks)


def answers(runner: ModelRunner | LeadingRunner, adapters: list[Path]) -> list[list[int]]:
    """Tokens of the prompt by each slot, and by the base model."""
    runner.load_adapter(len(adapters) - 1, str(adapters[-1]))
    engine = Engine(runner, overlap=False)
    small_pieces(engine)
    prompt = (np.arange(40, dtype=np.int32) * 7 % 300).tobytes()
    found: list[list[int]] = []
    for number in range(len(adapters) + 1):
        slot = number if number < len(adapters) else -1
        sampling = SamplingParams(max_tokens=10)
        engine.add(
            AddSequence(number, prompt, b"", 0, [], sampling, adapter=slot, cache_salt=b"%d" % slot)
        )
        found.append([])
    while engine.has_work:
        done = engine.step()
        for event in done.events if done else ():
            found[event.sequence_id] += event.token_ids
    return found


PROMPTS = [(np.arange(20 + 9 * n, dtype=np.int32) * (7 + n) % 300).tobytes() for n in range(3)]
# Loads that fail, by number: on rank 0 or 1, while the files are read or behind the first changes.
_UNREAD, _FULL = {1: {2, 9}, 0: {4}}, {1: {6, 12}, 0: {8}}
_NUM_CHANGES, _NUM_TOKENS = 24, 8


class Changed(NamedTuple):
    """What happened while adapters were loaded and unloaded between steps.

    Attributes:
        answers: adapter (-1: none), prompt and tokens of each sequence.
        num_refused: number of refused loads.
        num_planned: number of steps that were planned before a load or an unload.
    """

    answers: list[tuple[int, int, list[int]]]
    num_refused: int
    num_planned: int


@contextmanager
def failing(rank: int) -> Iterator[None]:
    """Lets some loads fail on a rank alone."""
    read, load, number = Adapter.read, Adapters.load, itertools.count()
    last = 0

    def unread(config: object) -> Adapter:
        nonlocal last
        last = next(number)
        if last in _UNREAD[rank]:
            raise AdapterError("the file is gone")
        return read(config)  # pyright: ignore[reportArgumentType]

    def full(self: Adapters, slot: int, adapter: Adapter) -> None:
        load(self, slot, adapter)
        # With DoRA, the other rank would wait within a sum.
        if last in _FULL[rank] and not adapter.config.uses_dora:
            raise torch.OutOfMemoryError("the memory is full\nand more")

    with mock.patch.object(Adapter, "read", unread), mock.patch.object(Adapters, "load", full):
        yield


def each_alone(runner: ModelRunner, adapters: list[Path]) -> dict[tuple[int, int], list[int]]:
    """Tokens of one rank by adapter (-1: none) and prompt."""
    engine, found = Engine(runner, overlap=False), dict[tuple[int, int], list[int]]()
    for slot, directory in enumerate(adapters):
        runner.load_adapter(slot, str(directory))
    for slot, prompt in itertools.product(range(-1, len(adapters)), range(len(PROMPTS))):
        sampling, tokens = SamplingParams(max_tokens=_NUM_TOKENS), list[int]()
        engine.add(
            AddSequence(
                0, PROMPTS[prompt], b"", 0, [], sampling, adapter=slot, cache_salt=b"%d" % slot
            )
        )
        while engine.has_work:
            done = engine.step()
            for event in done.events if done else ():
                tokens += event.token_ids
        found[slot, prompt] = tokens
    return found


def changes(runner: ModelRunner | LeadingRunner, adapters: list[Path]) -> Changed:
    """Loads and unloads adapters in two slots between the steps of sequences that use them.

    A slot is emptied when its last sequence has ended, while a step with a token for the sequence
    may be in flight, and is filled again before the next step. Sequences have token masks and are
    planned ahead, so that the ranks have staged a step when the slots change.
    """
    engine = Engine(runner, overlap=True, clock=lambda: 0.0, step_cost=Untimed())
    small_pieces(engine)
    draw = random.Random(0)
    loaded: dict[int, int] = {}  # adapter by slot
    users: dict[int, set[int]] = {0: set(), 1: set()}  # running sequences by slot
    kinds: dict[int, tuple[int, int]] = {}  # adapter and prompt by sequence
    tokens: dict[int, list[int]] = {}
    masks: list[tuple[int, int]] = []
    num_changes = num_refused = num_planned = 0

    def add() -> None:
        number, prompt = len(kinds), draw.randrange(len(PROMPTS))
        slot = draw.choice([-1, *loaded])
        kinds[number], tokens[number] = (loaded.get(slot, -1), prompt), []
        users.get(slot, set()).add(number)
        message = AddSequence(
            number, PROMPTS[prompt], b"", 0, [], SamplingParams(max_tokens=_NUM_TOKENS),
            adapter=slot, token_masks=True, cache_salt=b"%d" % kinds[number][0],
        )  # fmt: skip
        engine.add(message)
        masks.append((number, 0))

    while num_changes < _NUM_CHANGES or engine.has_work or masks:
        if num_changes < _NUM_CHANGES and len(engine.sequences) < 4:
            add()
        engine.plan()
        for slot in (0, 1):
            if users[slot] or num_changes == _NUM_CHANGES:
                continue
            if loaded.pop(slot, None) is not None:
                runner.load_adapter(slot, "")
            chosen = draw.randrange(len(adapters))
            num_planned += engine.planned is not None
            try:
                runner.load_adapter(slot, str(adapters[chosen]))
                loaded[slot] = chosen
            except AdapterError:
                num_refused += 1
            num_changes += 1
            if slot in loaded:
                add()
        for number, count in masks:
            engine.mask_ready(number, count, np.empty(0, np.int32))
        masks.clear()
        done = engine.step()
        for event in done.events if done else ():
            number = event.sequence_id
            tokens[number] += event.token_ids
            if event.end is not None:
                assert event.end.reason == "length", event
                for each in users.values():
                    each.discard(number)
            else:
                masks.append((number, len(tokens[number])))
    answers = [(*kinds[number], tokens[number]) for number in kinds]
    return Changed(answers, num_refused, num_planned)


def run_rank(store: str, rank: int, link: socket.socket, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    meeting = torch.distributed.FileStore(store, 2)  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=2)
    kind = arguments[0]
    model, *adapters = map(Path, arguments[1:])
    ranks = Ranks(rank, 2, meeting)
    runner = created(model, adapters if kind == "answers" else [], ranks, slots=len(adapters))
    with failing(rank) if kind == "changes" else nullcontext():
        if rank:
            follower = Follower(runner)
            while follower.take(link):
                pass
        else:
            leader = LeadingRunner(runner, OneRank(link))  # pyright: ignore[reportArgumentType]
            found = answers(leader, adapters) if kind == "answers" else changes(leader, adapters)
            print(json.dumps(found), flush=True)
            link.shutdown(socket.SHUT_WR)
    torch.distributed.destroy_process_group()


def main() -> None:
    first, second = socket.socketpair()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        other = fork.Process(target=run_rank, args=(store, 1, second, sys.argv[1:]))
        other.start()
        second.close()
        with first:  # the other rank ends, too, if this one fails
            run_rank(store, 0, first, sys.argv[1:])
        other.join()
    sys.exit(other.exitcode)


if __name__ == "__main__":
    main()
