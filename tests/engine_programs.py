"""Random programs for an engine on a fake runner, and what has to hold after each of them.

A program is a list of arrivals: sequences that are added at some step, with images that arrive
late, and with what happens to the sequence later. `play` runs a program on a `Harness`, which knows
the tokens that each sequence has when it runs alone (`fake_runner.expected_tokens`).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from services.common.process.device_turns import NO_TURNS
from services.decoder.engine.messages import AddSequence, ImageSpan, ResetPrefixCache
from services.decoder.engine.step import Step
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import FakeRunner, add_message, expected_tokens
from tests.random_turns import RandomTurns

_IMAGE_TOKENS = 6
# Lengths of prompts that fill their last block, so that equal prompts are found whole.
_WHOLE_BLOCKS = (8, 16, 24, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A sequence of a program. All times are numbers of steps.

    Attributes:
        seed, shared: the prompt begins with `shared` tokens that all prompts of the seed have.
        own: number of tokens that only this prompt has, after the shared ones.
        image: key of an image and the place of its first token. None if there is no image.
        image_delay: time from the arrival until the image is there.
        max_tokens: limit of the completion.
        stops: True if a token of the completion is a stop token.
        continued: number of completion tokens that another decoder has generated, at most.
        at: time of the arrival.
        reset_after, abort_after: time until the prefix cache is emptied, and until the sequence is
            aborted. None if that does not happen.
        token_masks: True if the sequence has token masks.
        tenant, priority, prompt_logprobs: as in `AddSequence`. A tenant whose name ends with
            "/batch" runs in the background.
    """

    seed: int
    shared: int
    own: int
    image: tuple[bytes, int] | None
    image_delay: int
    max_tokens: int
    stops: bool
    continued: int
    at: int
    reset_after: int | None
    abort_after: int | None
    token_masks: bool
    tenant: str
    priority: int
    prompt_logprobs: int | None

    def message(self, number: int, max_model_len: int) -> AddSequence:
        """The message that adds the sequence under a number."""
        prompt = prompt_of(self.seed, self.shared) + prompt_of(100 + number, self.own)
        prompt = prompt or [number]
        images = ()
        if self.image is not None:
            key, place = self.image
            place = min(place, len(prompt) - 1)
            images = (ImageSpan(key, place, min(_IMAGE_TOKENS, len(prompt) - place)),)
        names = ("max_tokens", "token_masks", "tenant", "priority", "prompt_logprobs")
        fields = {name: getattr(self, name) for name in names}
        fields["background"] = self.tenant.endswith("/batch")
        fields["request"] = f"request {number % 3}"  # whose share counts if the model is for search
        message = add_message(number, prompt, images=images, **fields)
        tokens, _ = expected_tokens(message, max_model_len)
        if self.stops:
            stop = (tokens[len(tokens) // 2],)
            message = add_message(number, prompt, images=images, stop_token_ids=stop, **fields)
            tokens, _ = expected_tokens(message, max_model_len)
        known = tokens[: min(self.continued, len(tokens) - 1)]
        message.generated_token_ids = np.array(known, "<i4").tobytes()
        return message


def programs(seeds: int, shared: int, own: int, last: int) -> st.SearchStrategy[list[Arrival]]:
    """Programs of 1 to 14 sequences.

    What keeps sequences from sharing their beginnings or from running side by side for long is
    rarer than the rest: resets of the prefix cache, logprobs of prompts, and stop tokens.

    Args:
        seeds: number of different beginnings of prompts.
        shared, own: most tokens of each part of a prompt.
        last: time of the last arrival.
    """
    steps = st.integers(0, 15)
    arrival = st.builds(
        Arrival,
        seed=st.integers(0, seeds - 1),
        shared=st.integers(0, shared) | st.sampled_from(_WHOLE_BLOCKS),
        own=st.integers(0, own),
        image=st.none() | st.tuples(st.sampled_from(KEYS), st.integers(0, shared)),
        image_delay=st.integers(0, 12),
        max_tokens=st.integers(1, 24),
        stops=_rarely(st.just(1)).map(bool),
        continued=st.integers(0, 6),
        at=st.integers(0, last),
        reset_after=_rarely(steps),
        abort_after=st.none() | steps,
        token_masks=st.booleans(),
        tenant=st.sampled_from(["", "a", "b", "a/batch", "b/batch"]),
        priority=st.integers(-2, 2),
        prompt_logprobs=_rarely(st.integers(0, 3)),
    )
    return st.lists(arrival, min_size=1, max_size=14)


def _rarely(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    """None in three cases of four."""
    return st.integers(0, 3).flatmap(lambda case: values if case == 3 else st.none())


# Turns of an engine that shares its device. Each example has its own.
turns = st.builds(RandomTurns, st.integers(0, 2**16), st.sampled_from([0.0, 0.05, 0.3, 1.0]))


def engines(least_blocks: int, most_blocks: int) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a `Harness` that hold for engines of all models."""
    return st.fixed_dictionaries(
        {
            "overlap": st.booleans(),
            "max_num_sequences": st.integers(1, 6),
            "max_batched_tokens": st.integers(6, 48),
            "num_blocks": st.integers(least_blocks, most_blocks),
            "again_after": st.integers(0, 6),
            "mask_after": st.integers(0, 6),
            "turns": st.just(NO_TURNS) | turns,
        }
    )


# Number of the step that runs out of memory.
failures = st.none() | st.integers(0, 20)


def fail_at(runner: FakeRunner, number: int) -> None:
    """Lets the runner's step of this number run out of memory."""
    steps = itertools.count()

    def fail(_: Step) -> None:
        if next(steps) == number:
            raise MemoryError("once")

    runner.on_execute = fail


def play(harness: Harness, program: Sequence[Arrival], failure: int | None) -> None:
    """Runs a program to its end.

    Afterwards each sequence has ended once, with the tokens that it has alone, at most one sequence
    has failed, if a step did, and no block is held. After each step the bookkeeping agrees.

    Args:
        harness: an engine that has not run.
        program: the sequences. The sequence ids are places in the list.
        failure: number of the step that runs out of memory. None if no step does.
    """
    if failure is not None:
        fail_at(harness.runner, failure)
    todo = _timetable(harness, program)
    for now in range(max(todo) + 1):
        for action in todo[now]:
            action()
        harness.step()
    harness.run()
    assert set(harness.ends) == set(harness.added) == set(range(len(program)))
    assert list(harness.ends.values()).count("failed") <= (failure is not None)
    harness.assert_all_as_alone()
    harness.assert_empty()


def _timetable(
    harness: Harness, program: Sequence[Arrival]
) -> defaultdict[int, list[Callable[[], object]]]:
    """What happens before each step."""
    todo: defaultdict[int, list[Callable[[], object]]] = defaultdict(list)

    def at(time: int, action: Callable[..., object], *arguments: object) -> None:
        todo[time].append(lambda: action(*arguments))

    for number, arrival in enumerate(program):
        message = arrival.message(number, harness.runner.info.max_model_len)
        at(arrival.at, lambda message=message: harness.add(message, images_ready=False))
        if arrival.reset_after is not None:
            at(arrival.at + arrival.reset_after, harness.engine.handle, ResetPrefixCache())
        if arrival.abort_after is not None:
            at(arrival.at + arrival.abort_after, harness.engine.abort, number)
        for span in message.images:
            at(arrival.at + arrival.image_delay, harness.image, number, span.key)
    return todo
