"""A layer for multi-token prediction that was trained on a tiny model: its drafts are accepted, and
fewer of them are if the layer reads another hidden state than the one it was trained on.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from services.decoder.engine.run.drafter import Drafter
from services.decoder.engine.schedule.drafts import Drafts
from tests.parity.mtp_oracle import Head, make_with_head
from tests.parity.oracle import Oracle
from tests.parity.qwen3_5_oracle import CONFIGS
from tests.parity.test_same_answers import Bench

pytestmark = pytest.mark.nightly

NUM_TOKENS, NUM_PROMPTS, STEPS = 24, 8, 250
SHAPES = ((12,),)


class Trained(Bench):
    """Requests over a checkpoint whose head was trained on their answers.

    Attributes:
        answers: greedy answers without drafts.
        random: accepted drafts of the head before it was trained.
    """

    def __init__(self, directory: Path) -> None:
        tiny = replace(CONFIGS["odd-heads-repeated-thrice"], layers=4)
        oracle, head = make_with_head(tiny, directory, seed=3)
        # A final norm that changes directions more than those of other tests do.
        norm: Any = oracle.model.model.language_model.norm
        norm.weight.data.uniform_(-0.95, 3.0, generator=torch.Generator().manual_seed(4))
        path = directory / "model.safetensors"
        name = "model.language_model.norm.weight"
        tensors = load_file(path)
        assert name in tensors
        save_file(tensors | {name: norm.weight.data.clone()}, path)
        super().__init__(oracle, SHAPES)
        del self.questions[NUM_PROMPTS:]
        for question in self.questions:
            sampling = question.message.sampling
            question.message.sampling = type(sampling)(max_tokens=NUM_TOKENS)
        self.answers = self.ask(self.engine(), range(NUM_PROMPTS))
        self.random = self.accepted()
        texts = [
            oracle.prompt(*SHAPES[0], seed=number).token_ids + answer
            for number, answer in self.answers.items()
        ]
        train(oracle, head, texts)
        tensors = load_file(path) | {f"mtp.{n}": t for n, t in head.state_dict().items()}
        save_file(tensors, path)

    def accepted(self) -> float:
        """Accepted drafts of each verification, of which no sequence leaves any out."""
        engine = self.engine(max_drafts=3, draft_head=True, max_num_sequences=64)
        with mock.patch.object(Drafts, "pauses", return_value=False):
            assert self.ask(engine, range(NUM_PROMPTS)) == self.answers
        found = engine.stats().drafts
        assert found is not None
        return found.num_accepted / found.num_chunks


def train(oracle: Oracle, head: Head, texts: list[list[int]]) -> None:
    """Trains the head to predict the token after the next one."""
    language: Any = oracle.model.model.language_model
    with torch.no_grad():
        batches = []
        for text in texts:
            ids = torch.tensor([text])
            hidden = language(input_ids=ids).last_hidden_state[0]
            batches.append((language.embed_tokens(ids)[0], hidden, ids[0]))
    for parameter in oracle.model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for step in range(STEPS):
        embedded, hidden, ids = batches[step % len(batches)]
        positions = torch.arange(len(ids) - 2).expand(3, -1)
        out = head(oracle, embedded[1:-1], hidden[:-2], positions)
        loss = F.cross_entropy(oracle.model.lm_head(out), ids[2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield Trained(tmp_path_factory.mktemp("trained"))


def test_the_accepted_length_rises_with_training(bench: Trained) -> None:
    assert bench.random < 0.2
    assert bench.accepted() > 1.0


def test_the_state_before_the_final_norm_is_told_apart(bench: Trained) -> None:
    """The layer's own norm takes away all of the final norm but its weight."""
    observe = Drafter.observe

    def observe_before_norm(
        self: Drafter, entry: Any, entered: Any, hidden: Tensor, visual: Any
    ) -> None:
        observe(self, entry, entered, hidden / self._model.norm.weight, visual)

    trained = bench.accepted()
    with mock.patch.object(Drafter, "observe", observe_before_norm):
        assert bench.accepted() < 0.9 * trained


def test_the_state_of_another_token_is_told_apart(
    bench: Trained,
) -> None:
    """Each token gets the hidden state of the token before its own."""
    observe = Drafter.observe

    def observe_rolled(
        self: Drafter, entry: Any, entered: Any, hidden: Tensor, visual: Any
    ) -> None:
        observe(self, entry, entered, hidden.roll(1, 0), visual)

    trained = bench.accepted()
    with mock.patch.object(Drafter, "observe", observe_rolled):
        assert bench.accepted() < 0.7 * trained
