"""Two ranks over gloo with adapters, run by test_adapters_beside.py.

    python -m tests.parity.adapter_ranks MODEL ADAPTER...

Prints as JSON the greedy tokens of the same prompt by each adapter and by the base model. The last
adapter is loaded while the ranks run. The control of each line is the answer of one rank, which the
caller computes.
"""

import json
import multiprocessing
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed

from services.common.nn.collectives import ALONE, Ranks
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.ranks.steps import Follower, LeadingRunner
from tests.engine_harness import small_pieces
from tests.parity.rank_answers import OneRank


def created(model: Path, adapters: list[Path], ranks: Ranks = ALONE) -> ModelRunner:
    """A runner with all adapters but the last, and a slot for it."""
    options = RunnerOptions(
        model_directory=model, device="cpu", max_num_sequences=8, max_batched_tokens=64,
        max_model_len=128, kv_cache_bytes=8 << 20, adapters=tuple(adapters[:-1]),
        max_adapters=len(adapters),
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


def run_rank(store: str, rank: int, link: socket.socket, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    meeting = torch.distributed.FileStore(store, 2)  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=2)
    model, *adapters = map(Path, arguments)
    runner = created(model, adapters, Ranks(rank, 2, meeting))
    if rank:
        follower = Follower(runner)
        while follower.take(link):
            pass
    else:
        print(json.dumps(answers(LeadingRunner(runner, OneRank(link)), adapters)), flush=True)  # pyright: ignore[reportArgumentType]
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
        run_rank(store, 0, first, sys.argv[1:])
        other.join()
    sys.exit(other.exitcode)


if __name__ == "__main__":
    main()
