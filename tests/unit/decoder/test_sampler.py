"""The sampler against distributions written out one row at a time in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import ALL_MASKED
from kernels.sampling.sampling import (
    MaskedRows,
    SamplingInputs,
    by_rank,
    greedy,
    greedy_masked,
    sample,
    split_width,
)
from services.decoder.engine.messages import SamplingParams
from services.decoder.engine.run.pending_step import DevicePendingStep, Readback
from services.decoder.engine.run.sampler import (
    GREEDY_TEMPERATURE,
    Sampled,
    Sampler,
    uniforms,
)
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.step import RowSampling, SampleStep
from services.decoder.operations.ops import Ops, PlainOps
from tests import sampling_twins
from tests.sampling_twins import distribution, mask_of

CPU = torch.device("cpu")
VOCAB_SIZE = 50


class Bench:
    """Sampler and staging for rows 0 .. len(params) - 1."""

    def __init__(
        self, params: list[SamplingParams], vocab_size: int = VOCAB_SIZE, ops: Ops | None = None
    ) -> None:
        self.sampler = Sampler(len(params), vocab_size, CPU, ops or PlainOps())
        self.staging = Staging(1 << 22, CPU)
        for row, one in enumerate(params):
            self.sampler.start_row(RowSampling(row, one, 0))

    def prepare(
        self, rows: list[int], generated: list[int], masks: dict[int, np.ndarray] | None = None
    ) -> SamplingInputs | MaskedRows | None:
        self.staging.begin()
        masked = np.array(sorted(masks or {}), np.int64)
        step = SampleStep()
        if masks:
            words = np.stack([masks[i] for i in masked.tolist()])
            step = SampleStep(masked=masked, token_masks=words)
        inputs = self.sampler.prepare(np.array(rows), np.array(generated), self.staging, step)
        self.staging.upload()
        return inputs

    def draw(
        self,
        logits: torch.Tensor,
        rows: list[int],
        generated: list[int],
        masks: dict[int, np.ndarray] | None = None,
    ) -> Sampled:
        inputs = self.prepare(rows, generated, masks)
        if inputs is None:
            return Sampled(greedy(logits), None)
        if isinstance(inputs, MaskedRows):
            token_ids = greedy(logits)
            greedy_masked(logits, inputs, token_ids, torch.zeros(len(rows), dtype=torch.int32))
            return Sampled(token_ids, None)
        return self.sampler.sample(logits, inputs)


def draw(params: list[SamplingParams], logits: torch.Tensor, generated: int = 0) -> list[int]:
    bench = Bench(params, logits.shape[-1])
    rows = list(range(len(params)))
    return bench.draw(logits, rows, [generated] * len(rows)).token_ids.tolist()


def logits_for(num_rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


TRUNCATIONS = {
    "none": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
    "one": SamplingParams(temperature=1.0, top_k=1),
}


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**fields | {"seed": seed})


@pytest.mark.parametrize("temperature", [0.0, GREEDY_TEMPERATURE, 1.0, 2.0])
@pytest.mark.parametrize("penalty", [1e-6, 10.0])
def test_the_extreme_penalties_of_a_request_leave_logits_finite(
    penalty: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    bench = Bench([params], VOCAB_SIZE)
    logits = torch.full((1, VOCAB_SIZE), -1e5)  # far beyond what models give
    logits[0, 3] = 1e5
    for generated in range(3):  # what was sampled is penalized afterwards
        (token_id,) = bench.draw(logits, [0], [generated]).token_ids.tolist()
        assert token_id == 3


@pytest.mark.parametrize("params", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_frequencies_are_the_distribution(params: SamplingParams) -> None:
    num = 8000
    one = logits_for(1)
    tokens = draw([seeded(params, seed) for seed in range(num)], one.expand(num, -1))
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    probabilities = distribution(one[0].numpy(), params)
    assert not counts[probabilities == 0].any()
    spread = np.sqrt(num * probabilities * (1 - probabilities))
    assert (np.abs(counts - num * probabilities) <= 5 * spread + 1e-9).all()


@pytest.mark.parametrize(
    ("params", "has_top_k", "has_top_p"),
    [
        (SamplingParams(temperature=1.0), False, False),
        (SamplingParams(temperature=1.0, top_k=4), True, False),
        (SamplingParams(temperature=1.0, top_p=0.9), False, True),
        (SamplingParams(temperature=0.0, top_k=4, top_p=0.9, top_logprobs=1), False, False),
        (SamplingParams(temperature=1.0, top_k=VOCAB_SIZE), False, False),
    ],
)
def test_inputs_say_which_searches_are_needed(
    params: SamplingParams, has_top_k: bool, has_top_p: bool
) -> None:
    bench = Bench([params, SamplingParams()])
    inputs = bench.prepare([0, 1], [0, 0])
    assert isinstance(inputs, SamplingInputs)
    assert (inputs.has_top_k, inputs.has_top_p) == (has_top_k, has_top_p)


def test_greedy_rows_with_masks() -> None:
    sampling_twins.check_greedy_masked(greedy_masked, logits_for(9))


def test_temperature_zero_and_almost_zero_are_greedy() -> None:
    logits = logits_for(2)
    for temperature in (0.0, 1e-6):
        params = [SamplingParams(temperature=temperature, seed=n) for n in range(2)]
        assert draw(params, logits) == logits.argmax(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_batch(data: st.DataObject) -> None:
    num = data.draw(st.integers(2, 9))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_k=data.draw(st.sampled_from([0, 1, 7, 40, 49, 200])),
            top_p=data.draw(st.sampled_from([1.0, 0.8, 0.3])),
            min_p=data.draw(st.sampled_from([0.0, 0.1])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            logit_bias=data.draw(st.sampled_from([{}, {3: 4.0}])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
        )
        for _ in range(num)
    ]
    # Rounded, so that equal logits are common and their order is put to the test.
    logits = logits_for(num, data.draw(st.integers(0, 1000))).round()
    together = draw(params, logits, generated=5)
    alone = [draw([one], logits[i : i + 1], 5)[0] for i, one in enumerate(params)]
    assert together == alone


def test_top_k_steps_agree_on_equal_logits() -> None:
    """More candidates than needed change nothing, even where all logits are equal."""
    logits = torch.zeros(1, 3000)
    few = SamplingParams(temperature=1.0, top_k=20, seed=5)
    for mate in (2, 100, 900, 2000):
        other = SamplingParams(temperature=1.0, top_k=mate, seed=1)
        assert draw([few, other], logits.expand(2, -1))[0] == draw([few], logits)[0] < 20


def test_seeds_and_counters_decide_alone() -> None:
    logits = torch.zeros(1, 3000)
    params = SamplingParams(temperature=1.0, seed=7)
    tokens = [draw([params], logits, generated)[0] for generated in range(50)]
    assert tokens == [draw([params], logits, generated)[0] for generated in range(50)]
    assert len(set(tokens)) > 40
    other = [draw([seeded(params, 8)], logits, generated)[0] for generated in range(50)]
    assert tokens != other


def test_uniforms_are_uniform_and_apart() -> None:
    seeds = np.repeat(np.arange(64, dtype=np.uint64), 512)
    counters = np.tile(np.arange(512), 64)
    drawn = uniforms(seeds, counters)
    assert drawn.min() > 0 and drawn.max() < 1 and len(np.unique(drawn)) == len(drawn)
    counts = np.histogram(drawn, bins=32, range=(0, 1))[0]
    assert np.abs(counts - 1024).max() < 5 * math.sqrt(1024)
    grid = drawn.reshape(64, 512)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03


def test_ranks_are_by_logit_then_id() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0, 3.0, 0.0, -torch.inf, 1.0, -2.0]])
    for count in (3, 8):
        values, ids = by_rank(logits, count)
        assert ids[0].tolist() == [1, 3, 0, 6, 4, 2, 7, 5][:count]
        assert torch.equal(values[0], logits[0, ids[0]])


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "few"])
@pytest.mark.parametrize(("vocab_size", "count"), [(151936, 32), (151936, 1024), (4096, 20)])
def test_ranks_of_few_among_many_are_those_of_a_sort(
    vocab_size: int, count: int, kind: str
) -> None:
    assert split_width(vocab_size, count) > 0
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(3, vocab_size, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "zeros":
        signs = torch.randint(0, 2, logits.shape, generator=generator)
        logits = torch.where(signs > 0, 0.0, -0.0)
    elif kind == "few":  # all others are forbidden
        allowed = torch.randperm(vocab_size, generator=generator)[: count // 2]
        logits = torch.full_like(logits, -torch.inf).index_copy_(1, allowed, logits[:, allowed])
    values, ids = by_rank(logits, count)
    expected = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :count]
    assert np.array_equal(ids.numpy(), expected)
    assert torch.equal(values, logits.gather(1, ids))


def test_penalties_follow_vllm() -> None:
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, top_logprobs=0
    )
    bench = Bench([params])
    prompt, completion = [1, 2, 2], [2, 3, 3]
    seen = (np.array(ids, np.int32).tobytes() for ids in (prompt, completion))
    bench.sampler.start_row(RowSampling(0, params, 0, *seen))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 1:5] = torch.tensor([3.0, -1.0, 4.0, 2.2])
    # 1: 3 / 1.5 = 2. 2: -1 * 1.5 - 0.3 - 0.4. 3: 4 / 1.5 - 0.6 - 0.4 = 1.67. 4: untouched.
    assert bench.draw(logits, [0], [3]).token_ids.tolist() == [4]
    # Now 4 has been seen once: 2.2 / 1.5 - 0.7 = 0.77, and 1 is the best at 2.
    assert bench.draw(logits, [0], [4]).token_ids.tolist() == [1]
    # Then 1: 2 - 0.7 = 1.3, less than 3 at 1.67.
    assert bench.draw(logits, [0], [5]).token_ids.tolist() == [3]


def test_counts_of_a_row_are_reset() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    bench = Bench([params])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = 0.5
    for _ in range(2):
        bench.sampler.start_row(RowSampling(0, params, 0, np.array([7], np.int32).tobytes()))
        assert bench.draw(logits, [0], [0]).token_ids.tolist() == [7]
        assert bench.draw(logits, [0], [1]).token_ids.tolist() != [7]


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 4] = 5.0
    assert draw([SamplingParams(logit_bias={9: 6.0})], logits) == [9]
    assert draw([SamplingParams(logit_bias={4: -100.0, 8: 0.1})], logits) == [8]
    assert draw([SamplingParams(logit_bias={VOCAB_SIZE + 5: 100.0})], logits) == [4]
    waiting = SamplingParams(min_tokens=2, stop_token_ids=(4, 4000))
    bench = Bench([waiting])
    tokens = [bench.draw(logits, [0], [n]).token_ids.item() for n in range(3)]
    assert tokens[0] != 4 and tokens[1] != 4 and tokens[2] == 4
    sampled = [
        draw([SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=(4,), seed=n)], logits)
        for n in range(40)
    ]
    assert [4] not in sampled


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_for(3)
    params = [
        SamplingParams(temperature=1.0, top_k=3, logit_bias={2: 50.0}, top_logprobs=4),
        SamplingParams(),
        SamplingParams(top_logprobs=0),
    ]
    bench = Bench(params)
    sampled = bench.draw(logits, [0, 1, 2], [0, 0, 0])
    raw = logits.log_softmax(-1)
    assert sampled.logprobs is not None and sampled.token_ids[0] == 2
    chosen = raw[[0, 2], sampled.token_ids[[0, 2]].long()]
    assert torch.allclose(sampled.logprobs.chosen, chosen, atol=1e-6)
    best = raw[0].topk(4)
    assert sampled.logprobs.top_ids[0].tolist() == best.indices.tolist()
    assert torch.allclose(sampled.logprobs.top[0], best.values, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("plain", [True, False])
def test_a_row_that_is_not_finite_fails_alone(value: float, plain: bool) -> None:
    logits = logits_for(3)
    expected = logits.argmax(-1).tolist()
    logits[1, 11] = value
    params = [SamplingParams(top_logprobs=None if plain else 1)] * 3
    bench = Bench(params)
    tokens = bench.draw(logits, [0, 1, 2], [0, 0, 0]).token_ids.tolist()
    assert tokens == [expected[0], -1, expected[2]]


class ArgmaxOps(PlainOps):
    """Samples the most likely token of each row, as a kernel on a GPU could."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[SamplingInputs] = []

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        self.asked.append(inputs)
        broken = torch.isnan(logits) | (logits.abs() == torch.inf)
        if inputs.bias is not None:
            broken &= logits != -torch.inf
        return logits.argmax(-1).masked_fill(broken.any(-1), -1).to(torch.int32)


def test_the_tokens_of_a_kernel_are_taken_as_they_are() -> None:
    waiting = SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=(4,))
    liked = SamplingParams(temperature=0.8, top_k=3, top_p=0.9, presence_penalty=3.0)
    plain = SamplingParams(temperature=1.0, top_logprobs=2)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 4], logits[:, 7] = 5.0, 4.0
    for broken in (False, True):
        ops = ArgmaxOps()
        bench = Bench([waiting, liked, plain], ops=ops)
        bench.sampler.start_row(RowSampling(1, liked, 0, np.array([4], np.int32).tobytes()))
        logits[2, 0] = torch.nan if broken else 0.0
        tokens = [bench.draw(logits, [0, 1, 2], [n] * 3).token_ids for n in range(2)]
        assert tokens[0].dtype == torch.int32
        # The second row's first token counts against itself from then on.
        last = -1 if broken else 4
        assert [t.tolist() for t in tokens] == [[7, 4, last], [7, 7, last]]
        assert all(inputs.bias is not None for inputs in ops.asked)
        ops.asked.clear()
        sampled = bench.draw(logits[1:], [2, 2], [0, 0])
        assert sampled.token_ids.tolist() == [4, last] and ops.asked[0].bias is None
        assert sampled.logprobs is not None and torch.isfinite(sampled.logprobs.chosen[0])


@pytest.mark.parametrize("masked", [False, True])
def test_plain_samples_are_those_of_the_distribution(masked: bool) -> None:
    allowed = np.random.default_rng(3).random((len(sampling_twins.ROWS), 3000)) < 0.2
    logits = torch.randn(allowed.shape, generator=torch.Generator().manual_seed(1)) * 3
    for one in (logits, logits.round()):
        sampling_twins.check(sample, one, sampling_twins.ROWS, 5, allowed if masked else None)
    sampling_twins.check_masked_out(sample, logits)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_mask_decides_for_its_own_row_alone(data: st.DataObject) -> None:
    """Greedy or not, with penalties and biases: a masked row has an allowed token, as if all others
    were forbidden by bias; a row without a mask has the token it has alone.
    """
    num = data.draw(st.integers(1, 6))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.8])),
            top_k=data.draw(st.sampled_from([0, 1, 7])),
            top_p=data.draw(st.sampled_from([1.0, 0.6])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            seed=data.draw(st.integers(0, 99)),
        )
        for _ in range(num)
    ]
    logits = logits_for(num, data.draw(st.integers(0, 1000)))
    chooser = np.random.default_rng(data.draw(st.integers(0, 1000)))
    allowed = {}
    for row in range(num):
        if data.draw(st.booleans()):
            allowed[row] = chooser.random(VOCAB_SIZE) < data.draw(st.sampled_from([0.0, 0.1, 0.7]))
    masks = {row: mask_of(one) for row, one in allowed.items()}
    rows = list(range(num))
    found = Bench(params).draw(logits, rows, [3] * num, masks).token_ids.tolist()
    for row, one in enumerate(params):
        fields = {name: getattr(one, name) for name in one.__struct_fields__}
        if row in allowed:
            forbidden = np.flatnonzero(~allowed[row]).tolist()
            fields["logit_bias"] = dict.fromkeys(forbidden, -math.inf)
        (alone,) = Bench([SamplingParams(**fields)]).draw(logits[row : row + 1], [0], [3]).token_ids
        assert found[row] == alone
        if row in allowed:
            assert allowed[row][found[row]] if allowed[row].any() else found[row] == ALL_MASKED


def test_named_tokens_have_logprobs_beside_the_most_likely() -> None:
    raw = logits_for(4)
    params = [
        SamplingParams(top_logprobs=2, logprob_token_ids=(5, 3)),
        SamplingParams(),
        SamplingParams(top_logprobs=0, logprob_token_ids=(7,)),
        SamplingParams(top_logprobs=1),
    ]
    bench = Bench(params)
    inputs = bench.prepare([0, 1, 2, 3], [0] * 4)
    assert inputs is not None
    sampled = bench.sampler.sample(raw, inputs)
    assert sampled.logprobs is not None
    pending = DevicePendingStep(Readback(len(params), CPU).tokens(sampled, inputs))
    right = raw.log_softmax(-1)
    found = pending.result().logprobs
    assert found.keys() == {0, 2, 3}
    for row, named, count in ((0, (5, 3), 2), (2, (7,), 0), (3, (), 1)):
        best = raw[row].topk(count).indices.tolist()
        expected = [*best, *(i for i in named if i not in best)]
        (entry,) = found[row]
        assert entry.top_token_ids == expected
        assert entry.top_logprobs == pytest.approx(right[row, expected].tolist(), abs=1e-5)


def test_logprobs_are_of_the_logits_without_the_mask() -> None:
    logits = logits_for(1)
    allowed = np.zeros(VOCAB_SIZE, np.bool_)
    allowed[[3, 9]] = True
    bench = Bench([SamplingParams(top_logprobs=2)])
    sampled = bench.draw(logits, [0], [0], {0: mask_of(allowed)})
    best = 3 if logits[0, 3] > logits[0, 9] else 9
    assert sampled.token_ids.tolist() == [best] and sampled.logprobs is not None
    raw = logits.log_softmax(-1)
    assert torch.allclose(sampled.logprobs.chosen, raw[:, best])
    assert sampled.logprobs.top_ids[0].tolist() == raw[0].topk(2).indices.tolist()


def test_many_rows_are_sampled_in_parts() -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=n) for n in range(150)]
    logits = logits_for(150)
    together = draw(params, logits)
    assert together == [draw([params[n]], logits[n : n + 1])[0] for n in range(150)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = logits_for(4).to(dtype)
    params = [*list(TRUNCATIONS.values())[:3], SamplingParams()]
    assert draw(params, logits) == draw(params, logits.float())
