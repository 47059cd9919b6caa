"""Adapters beside the base model give PEFT's logits, float32 on the CPU, many in one batch."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.adapter_config import AdapterError
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, ResetPrefixCache, SamplingParams
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from tests.adapters import adapted_oracle
from tests.cases import first
from tests.decoder_harness import Harness
from tests.engine_harness import Untimed
from tests.parity import qwen3_5_oracle, text_oracle
from tests.parity.oracle import CONFIGS, Oracle, largest_difference, make_oracle
from tests.parity.test_language_model import TOLERANCE

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]

MIXED = r".*(q_proj|o_proj|down_proj|out_proj|in_proj_qkv|in_proj_a|shared_expert_gate)"
# Eight adapters that differ in everything that is served.
ADAPTERS: tuple[dict[str, Any], ...] = (
    {},
    {"target_modules": ["q_proj", "v_proj"], "r": 16, "lora_alpha": 16},
    {"use_rslora": True, "r": 6},
    {"use_dora": True, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
    {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {r"layers\.1\..*": 3}},
    {"target_modules": MIXED, "lora_alpha": 4},
    {"target_modules": ["lm_head", "gate_proj"]},
    {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["k_proj"]},
)
FAMILIES = {
    "vl": lambda directory: make_oracle(CONFIGS["gqa3-hd32-odd-heads"], directory),
    "vl, tied": lambda directory: make_oracle(CONFIGS["gqa1-hd16-one-tap"], directory),
    "qwen2-vl": lambda directory: make_oracle(CONFIGS["qwen2-gqa3-hd32"], directory),
    "qwen2.5-vl": lambda directory: make_oracle(CONFIGS["qwen2.5-gqa2-hd16"], directory),
    "paddleocr": lambda directory: make_oracle(CONFIGS["paddleocr-gqa4-hd32-biases"], directory),
    "vl, experts": lambda directory: make_oracle(CONFIGS["moe-gqa3-two-taps"], directory),
    "biases": lambda directory: text_oracle.make_text_oracle(
        text_oracle.CONFIGS["llama-gqa1-biases-tied"](), directory
    ),
    "qwen2": lambda directory: text_oracle.make_text_oracle(
        text_oracle.CONFIGS["qwen2-odd-heads-yarn"](), directory
    ),
    "qwen3": lambda directory: text_oracle.make_text_oracle(
        text_oracle.CONFIGS["qwen3-biases"](), directory
    ),
    "mistral": lambda directory: text_oracle.make_text_oracle(
        text_oracle.CONFIGS["mistral-wide-heads"](), directory
    ),
    "hybrid": lambda directory: qwen3_5_oracle.make_qwen3_5(
        qwen3_5_oracle.CONFIGS["experts-one-shared"], directory
    ),
    "hybrid, dense": lambda directory: qwen3_5_oracle.make_qwen3_5(
        qwen3_5_oracle.CONFIGS["odd-heads-repeated-thrice"], directory
    ),
}


def start(harness: Harness, oracle: Oracle, adapter: int, row: int, seed: int):
    """Starts a prompt, with an image where the model takes one; returns its true logits, too."""
    is_text = oracle.spec.vision is None
    prompt = oracle.prompt(*((9 + row,) if is_text else (4 + row, (4, 6), 5)), seed=seed)
    answer = oracle.answer(prompt)
    images = list(zip(prompt.offsets, answer.embeddings, strict=True))
    positions = None if is_text else answer.positions
    sequence = harness.start(
        prompt.token_ids, row, positions=positions, delta=answer.delta, images=images,
        adapter=adapter,
    )  # fmt: skip
    return sequence, answer.logits


@pytest.mark.parametrize("family", first(1, list(FAMILIES)))
def test_eight_adapters_in_one_step_give_logits_of_peft(family: str, tmp_path: Path) -> None:
    base = FAMILIES[family](tmp_path / "model")
    places = [tmp_path / f"adapter-{number}" for number in range(len(ADAPTERS))]
    # More is amplified too much by eight layers with recurrent states.
    scale = 0.1 if family.startswith("hybrid") else 0.3
    oracles = [
        adapted_oracle(base, place, number, scale=scale, **config)
        for number, (place, config) in enumerate(zip(places, ADAPTERS, strict=True))
    ]
    # The slots are in another order than the rows, and a sequence without adapter is between them.
    harness = Harness(
        base.directory, adapters=tuple(reversed(places)), max_adapters=9, max_num_sequences=10
    )
    slots = [*reversed(range(len(ADAPTERS)))]
    sources = [
        *zip(oracles[:4], slots[:4], strict=True),
        (base, -1),
        *zip(oracles[4:], slots[4:], strict=True),
    ]
    started = [
        start(harness, oracle, slot, row, seed=row) for row, (oracle, slot) in enumerate(sources)
    ]
    found = harness.logits(*(harness.chunk(sequence) for sequence, _ in started))
    plain = [start(harness, base, -1, row, seed=row)[1] for row in range(len(sources))]  # control
    harness.started = []
    parts = found.split([len(logits) for _, logits in started])
    for row, (part, (_, expected)) in enumerate(zip(parts, started, strict=True)):
        assert largest_difference(part, expected) < TOLERANCE, row
        if row != 4:
            assert largest_difference(plain[row], expected) > 100 * TOLERANCE


PROMPT = 70  # tokens: several blocks


class Served:
    """An engine over a tiny model with adapters, one slot of which is free."""

    def __init__(
        self, base: Oracle, places: list[Path], max_drafts: int = 0, **options: Any
    ) -> None:
        chosen: dict[str, Any] = {
            "device": "cpu", "block_size": 16, "max_num_sequences": 8, "max_batched_tokens": 200,
            "max_model_len": 256, "kv_cache_bytes": 16 << 20, "dtype": "float32",
            "adapters": tuple(places), "max_adapters": len(places) + 1,
        } | options  # fmt: skip
        self.runner = create_runner(RunnerOptions(model_directory=base.directory, **chosen))
        cost = Untimed() if max_drafts else None
        self.engine = Engine(self.runner, overlap=False, max_drafts=max_drafts, step_cost=cost)
        self.cached: dict[int, int] = {}

    def ask(self, *asked: tuple[list[int], int], num_tokens: int = 12) -> list[list[int]]:
        """Answers prompts at the same time, each by an adapter's slot; -1 is the base model."""
        found: dict[int, list[int]] = {number: [] for number in range(len(asked))}
        for number, (prompt, slot) in enumerate(asked):
            self.engine.add(
                AddSequence(
                    number, np.array(prompt, np.int32).tobytes(), b"", 0, [],
                    SamplingParams(max_tokens=num_tokens), adapter=slot,
                    cache_salt=b"" if slot < 0 else b"adapter%d" % slot,
                )
            )  # fmt: skip
        while self.engine.has_work:
            done = self.engine.step()
            for event in done.events if done else ():
                found[event.sequence_id] += event.token_ids
                if event.start is not None:
                    self.cached[event.sequence_id] = event.start.num_cached_tokens
        return list(found.values())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, list[Path], list[Oracle]]:
    """A text model with three adapters."""
    directory = tmp_path_factory.mktemp("text")
    base = text_oracle.make_text_oracle(
        text_oracle.CONFIGS["mistral-wide-heads"](), directory / "model"
    )
    places = [directory / f"adapter-{number}" for number in range(3)]
    configs = ADAPTERS[0], ADAPTERS[3], ADAPTERS[6]
    adapted = [
        adapted_oracle(base, place, 20 + number, **config)
        for number, (place, config) in enumerate(zip(places, configs, strict=True))
    ]
    return base, places, adapted


def greedy(oracle: Oracle, prompt: list[int], num_tokens: int = 12) -> list[int]:
    """The answer of Hugging Face with PEFT."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = cast(Any, oracle.model).generate(
            ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def test_hits_never_cross_adapters_and_drafts_change_no_answer(text) -> None:
    base, places, adapted = text
    prompt = base.prompt(PROMPT, seed=1).token_ids
    right = [greedy(oracle, prompt) for oracle in (base, *adapted)]
    assert len({tuple(answer) for answer in right}) == 4  # control
    asked = [(prompt, slot) for slot in (-1, 0, 1, 2)]
    served = Served(base, places)
    for one in asked:
        assert served.ask(one) == [right[one[1] + 1]]
        assert served.cached[0] == 0  # no block of another adapter
    assert served.ask(*reversed(asked)) == right[::-1]
    assert all(count > 0 for count in served.cached.values())  # its own blocks
    drafting = Served(base, places, max_drafts=4)
    assert drafting.ask(*asked) == right
    assert drafting.ask(*asked) == right


def test_slots_are_filled_and_emptied_between_steps(text) -> None:
    base, places, adapted = text
    prompt = base.prompt(30, seed=2).token_ids
    served = Served(base, places[:1], max_adapters=2)
    for place, oracle in zip(places[1:], adapted[1:], strict=True):
        served.runner.load_adapter(1, str(place))
        found = served.ask((prompt, 0), (prompt, 1), (prompt, -1))
        assert found == [greedy(each, prompt) for each in (adapted[0], oracle, base)]
        served.runner.load_adapter(1, "")
        served.engine.handle(ResetPrefixCache())
    assert served.ask((prompt, 1)) == [greedy(base, prompt)]  # an empty slot is the base


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(text, tmp_path: Path) -> None:
    base, places, _ = text
    served = Served(base, places[:1], max_adapters=2)
    prompt = base.prompt(30, seed=3).token_ids
    before = served.ask((prompt, 0), (prompt, -1))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"modules_to_save": ["norm"]}, "is replaced; fold the adapter into the weights"),
        ({"r": 32}, "has rank 32, more than the largest rank 16"),
    )
    for number, (config, message) in enumerate(cases):
        adapted_oracle(base, tmp_path / str(number), **config)
        with pytest.raises(AdapterError, match=message):
            served.runner.load_adapter(1, str(tmp_path / str(number)))
    served.engine.handle(ResetPrefixCache())
    assert served.ask((prompt, 0), (prompt, -1)) == before


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_factors_that_are_not_finite_are_refused(text, tmp_path: Path, part: str) -> None:
    """A step multiplies them by zeros for the tokens of other adapters, which would be NaN."""
    base, places, _ = text
    served = Served(base, places[:1], max_adapters=2)
    adapted_oracle(base, tmp_path / "broken", use_dora=True)
    file = tmp_path / "broken" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if f"down_proj.{part}" in name)
    tensors[name].flatten()[0] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(AdapterError, match=r"mlp\.down_proj has values that are not finite"):
        served.runner.load_adapter(1, str(tmp_path / "broken"))


def test_graphs_fit_again_when_an_adapter_with_dora_has_left(text) -> None:
    """Graphs that were captured before it have no factors of DoRA."""
    base, places, _ = text
    served = Served(base, places[:1], max_adapters=2)
    adapters = served.runner.computer.model.adapters
    assert adapters is not None
    adapters.note_capture()
    assert adapters.fit_graphs
    served.runner.load_adapter(1, str(places[1]))
    assert not adapters.fit_graphs
    served.runner.load_adapter(1, "")
    assert adapters.fit_graphs
