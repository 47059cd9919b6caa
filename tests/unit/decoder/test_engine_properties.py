"""The engine's contract on a fake runner, for random sequences, sizes and arrivals."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.messages import ImageSpan, ResetPrefixCache
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from tests.cases import cases
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, expected_tokens

pytestmark = pytest.mark.thorough

prompts = st.tuples(st.integers(0, 2), st.integers(1, 40))
arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": prompts,
            "image": st.none() | st.tuples(st.sampled_from(KEYS), st.integers(0, 30)),
            "image_delay": st.integers(0, 12),
            "max_tokens": st.integers(1, 24),
            "stop": st.booleans(),
            "continued": st.integers(0, 6),
            "reset_after": st.none() | st.integers(0, 15),
            "at": st.integers(0, 15),
            "abort_after": st.none() | st.integers(0, 15),
            "token_masks": st.booleans(),
            "tenant": st.sampled_from(["", "a", "b"]),
            "priority": st.integers(-2, 2),
            "prompt_logprobs": st.none() | st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=14,
)


class ErraticCost(StepCost):
    """Learns random times instead of the fake device's; prompts may go on by a token a step."""

    @property
    def min_chunk(self) -> int:
        return 1

    def __init__(self, seed: int) -> None:
        super().__init__(60)
        self._random = random.Random(seed)

    def observe(self, load: StepLoad, ms: float, rate: float = 0.5) -> None:
        super().observe(load, self._random.uniform(0.1, 100.0), rate)


@settings(max_examples=cases(60, 150), deadline=None)
@given(
    arrivals=arrivals,
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    rows=st.integers(1, 6),
    budget=st.integers(6, 48),
    blocks=st.integers(12, 40),
    out_of_memory_at=st.none() | st.integers(0, 20),
    again_after=st.integers(0, 6),
    mask_after=st.integers(0, 6),
    plans=st.booleans(),
    most=st.integers(1, 4),
    step_ms=st.none() | st.floats(1, 50),
    seed=st.integers(0, 2**16),
)
def test_every_sequence_ends_once_with_the_tokens_it_has_alone(
    arrivals, overlap, prefix_caching, rows, budget, blocks, out_of_memory_at, again_after,
    mask_after, plans, most, step_ms, seed,
):  # fmt: skip
    """No token lost or doubled, no block lost, whatever runs beside a sequence, and however many
    tokens a step yields and however long it takes, images and masks that arrive late, preemptions,
    and answers that another decoder has begun.
    """
    harness = Harness(
        overlap=overlap, prefix_caching=prefix_caching, max_num_sequences=rows,
        max_batched_tokens=max(budget, rows * most), num_blocks=blocks, again_after=again_after,
        mask_after=mask_after, plans=plans, max_tokens_per_step=most,
        step_ms=step_ms or math.inf, step_cost=None if step_ms is None else ErraticCost(seed),
    )  # fmt: skip
    harness.runner.random.seed(seed)
    todo: dict[int, list] = {}
    for number, arrival in enumerate(arrivals):
        seed, length = arrival["prompt"]
        images = ()
        if arrival["image"] is not None:
            key, offset = arrival["image"]
            offset = min(offset, length - 1)
            images = (ImageSpan(key, offset, min(6, length - offset)),)
        names = ("max_tokens", "token_masks", "tenant", "priority", "prompt_logprobs")
        fields = {name: arrival[name] for name in names}
        message = add_message(number, prompt_of(seed, length), images=images, **fields)
        limit = harness.runner.info.max_model_len
        tokens, _ = expected_tokens(message, limit)
        if arrival["stop"]:
            stop = (tokens[len(tokens) // 2],)
            message = add_message(
                number, prompt_of(seed, length), images=images, stop_token_ids=stop, **fields
            )
            tokens, _ = expected_tokens(message, limit)
        known = tokens[: min(arrival["continued"], len(tokens) - 1)]
        message.generated_token_ids = np.array(known, "<i4").tobytes()
        at = arrival["at"]
        todo.setdefault(at, []).append(("add", message))
        if arrival["reset_after"] is not None:
            todo.setdefault(at + arrival["reset_after"], []).append(("reset", None))
        if arrival["abort_after"] is not None:
            todo.setdefault(at + arrival["abort_after"], []).append(("abort", number))
        for span in images:
            todo.setdefault(at + arrival["image_delay"], []).append(("image", number, span.key))

    if out_of_memory_at is not None:
        count = iter(range(10**9))

        def fail_once(batch):
            if next(count) == out_of_memory_at:
                raise MemoryError("once")

        harness.runner.on_execute = fail_once
    for now in range(max(todo) + 1):
        for action, subject, *rest in todo.get(now, ()):
            match action:
                case "add":
                    harness.add(subject, images_ready=False)
                case "image":
                    harness.image(subject, rest[0])
                case "reset":
                    harness.engine.handle(ResetPrefixCache())
                case _:
                    harness.engine.abort(subject)
        harness.step()
    harness.run()
    assert set(harness.ends) == set(harness.added)
    assert list(harness.ends.values()).count("failed") <= (out_of_memory_at is not None)
    harness.assert_all_as_alone()
    harness.assert_empty()


@settings(max_examples=cases(8, 60), deadline=None)
@given(
    ahead=st.integers(0, 5),
    masked=st.integers(1, 4),
    mask_after=st.integers(0, 5),
    prompt=st.integers(1, 20),
    kind=st.sampled_from([{}, {"has_states": True}, {"max_tokens_per_step": 4}]),
)
def test_a_late_mask_costs_the_sequence_steps_and_others_nothing(
    ahead, masked, mask_after, prompt, kind
):
    """A sequence with masks runs in every step if each arrives while the step before is computed.
    Where that does not help, it runs in the step after its mask has arrived. All others run in
    every step, one step ahead of their tokens.
    """
    steps = 30
    harness = Harness(
        max_num_sequences=12, num_blocks=1000, max_batched_tokens=256, mask_after=mask_after, **kind
    )  # fmt: skip
    kinds = [{}] * ahead + [{"token_masks": True}] * masked
    for number, fields in enumerate(kinds):
        harness.add(add_message(number, prompt_of(number, prompt), max_tokens=150, **fields))
    for _ in range(mask_after + 1):  # masks of the first tokens arrive
        harness.step()
    for _ in range(4):
        harness.step()
    # A read after the launch of an empty step adds none: counted are steps of the engine.
    first = len(harness.runner.batches)
    harness.launches.clear()
    for _ in range(steps):
        harness.step()
    assert len(harness.runner.batches) - first <= steps
    for number, fields in enumerate(kinds):
        ran = [step for step, ids in enumerate(harness.launches) if number in ids]
        gaps = {after - before for before, after in itertools.pairwise(ran)}
        if not fields:
            assert gaps == {1} and len(ran) == steps
        elif kind:
            assert gaps == {max(2, 1 + mask_after)}
        else:
            # A mask in time costs nothing; a late one costs the step that it missed.
            assert max(gaps) <= (1 if mask_after == 0 else 2 + mask_after)
            assert mask_after or len(ran) == steps
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
