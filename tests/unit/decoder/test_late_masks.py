"""Token masks that arrive while a step is computed, on the model runner."""

import msgspec
import numpy as np
import pytest

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from tests.decoder_harness import Harness, write_checkpoint
from tests.sampling_twins import mask_of
from tests.unit.decoder.test_runner import NUM_TOKENS, SAMPLED, start


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(write_checkpoint(tmp_path_factory.mktemp("late") / "model"))


@pytest.mark.parametrize("sampled", [SAMPLED, [SamplingParams()] * 4], ids=["any", "greedy"])
@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_masks_that_arrive_while_a_step_is_computed_or_later_give_the_same_tokens(
    harness: Harness, delay: int, plans: bool, sampled: list[SamplingParams]
) -> None:
    """As if every mask had been there before its step was planned; penalties, seeds, logprobs."""
    chooser = np.random.default_rng(7)
    vocab_size = harness.runner.info.vocab_size
    allowed = chooser.random((len(sampled), NUM_TOKENS + 1, vocab_size)) < 0.15

    def run(*, overlap: bool, delay: int) -> tuple[dict[int, list[int]], dict, int]:
        engine = Engine(harness.runner, overlap=overlap)
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        due: list[tuple[int, tuple[int, int, np.ndarray]]] = []
        for kind, params in enumerate(sampled):
            given = start(harness, 3 * kind, 0)
            limits = {"max_tokens": NUM_TOKENS, "min_tokens": 0}
            engine.add(
                AddSequence(
                    sequence_id=kind, prompt_token_ids=given.token_ids.tobytes(), positions=b"",
                    position_delta=0, images=[], token_masks=kind != 1,
                    sampling=msgspec.structs.replace(params, **limits),
                )
            )  # fmt: skip
            if kind != 1:
                due.append((0, (kind, 0, mask_of(allowed[kind, 0]).view(np.int32))))
        harness.started.clear()
        now = 0
        while engine.has_work or due:
            if plans:
                engine.plan()
            for _, mask in [one for one in due if one[0] <= now]:
                engine.mask_ready(*mask)
            due = [one for one in due if one[0] > now]
            done, now = engine.step(), now + 1
            for event in done.events if done else ():
                number = event.sequence_id
                tokens.setdefault(number, []).extend(event.token_ids)
                logprobs.setdefault(number, []).extend(one.logprob for one in event.logprobs)
                if event.end is None and number != 1:
                    count = len(tokens[number])
                    mask = mask_of(allowed[number, count]).view(np.int32)
                    late = delay and (number + count) % 3 == 0
                    due.append((now + delay * late, (number, count, mask)))
        return tokens, logprobs, engine.stats().num_steps

    expected, expected_logprobs, _ = run(overlap=False, delay=0)
    found, logprobs, num_steps = run(overlap=True, delay=delay)
    assert found == expected
    assert all(len(tokens) == NUM_TOKENS for tokens in found.values())
    # A late mask puts rows into batches of other sizes, whose float32 sums round otherwise: up to
    # 8e-6 on a logprob of -13, where two neighbouring floats are 1e-6 apart. The logprobs of two
    # tokens are 0.1 apart and more.
    for number, values in expected_logprobs.items():
        assert logprobs[number] == pytest.approx(values, rel=0, abs=3e-5)
    if delay == 0:  # a token each in every step, and one step whose tokens are not needed
        assert num_steps <= NUM_TOKENS + 1
    for number, tokens in found.items():
        if number != 1:
            assert all(allowed[number, at, token] for at, token in enumerate(tokens))
