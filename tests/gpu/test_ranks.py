"""A decoder of two ranks on two cards, over NCCL, in CUDA graphs: its answers are those of one.

bfloat16: logprobs agree within 0.2 where logits are of the order of 10; a token differs only where
the two most likely ones are as near.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from services.common.embeddings.arena import Arena
from services.common.nn.collectives import ALONE, Ranks
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, Logprobs, SamplingParams
from services.decoder.engine.model_runner import ModelRunner
from services.decoder.engine.runner_factory import create_runner
from services.decoder.engine.step import Runner
from services.decoder.engine_options import runner_options
from services.decoder.ranks.joining import join
from services.decoder.ranks.processes import RankProcesses
from services.decoder.ranks.steps import LeadingRunner
from services.decoder.settings import DecoderSettings
from tests.parity.text_oracle import make_text_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
]
TOLERANCE = 0.2
CONFIG = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DecoderSettings:
    directory = tmp_path_factory.mktemp("ranks") / "model"
    make_text_oracle(Qwen3Config(**CONFIG), directory)
    return DecoderSettings(
        model=directory, device="cuda", dtype="bfloat16", tensor_parallel=2,
        max_num_sequences=8, max_model_len=2048, kv_cache_bytes=64 << 20,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ranks(settings: DecoderSettings) -> Iterator[tuple[Ranks, RankProcesses]]:
    arena = Arena(1 << 20)
    processes = RankProcesses(2, settings.model_dump_json(), arena.fd, arena.size_bytes)
    try:
        yield join(0, 2, "cuda:0", processes.store_fd), processes
    finally:
        processes.stop()


def answers(runner: Runner) -> list[list[Logprobs]]:
    """Of prompts of several lengths together, so that decodes, prompts and mixtures are run."""
    engine = Engine(runner, overlap=True)
    found: list[list[Logprobs]] = [[] for _ in range(6)]
    for number in range(6):
        ids = np.arange(5 + 211 * number, dtype=np.int32) * 7 % 1000 + number
        sampling = SamplingParams(max_tokens=32, top_logprobs=2)
        engine.add(AddSequence(number, ids.tobytes(), b"", 0, [], sampling))
    while engine.has_work:
        done = engine.step()
        for event in done.events if done is not None else ():
            found[event.sequence_id] += event.logprobs or []
    return found


def sizes(runner: ModelRunner) -> dict[str, set[int]]:
    """Of the graphs that were captured."""
    return {g.name: {kind.size for kind in g.kinds} for g in runner.computer.graphs}


def test_two_cards_answer_as_one(
    settings: DecoderSettings, ranks: tuple[Ranks, RankProcesses]
) -> None:
    options = runner_options(settings, "cuda:0")
    own = create_runner(options, None, ranks[0])
    ranks[1].ready(on_gpu=True)
    alone = create_runner(options, None, ALONE)
    assert sizes(own) == sizes(alone) != {}
    together, expected = answers(LeadingRunner(own, ranks[1].tell)), answers(alone)
    num_equal = 0
    for ours, theirs in zip(together, expected, strict=True):
        assert len(ours) == len(theirs) == 32
        for mine, other in zip(ours, theirs, strict=True):
            if mine.top_token_ids[0] != other.top_token_ids[0]:
                assert other.top_logprobs[0] - other.top_logprobs[1] < TOLERANCE
                break  # from here on they are other answers
            assert abs(mine.logprob - other.logprob) < TOLERANCE
            num_equal += 1
    assert num_equal > 60
    assert together == answers(LeadingRunner(own, ranks[1].tell))  # graphs, replayed
