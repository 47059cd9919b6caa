from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.messages import ImageSpan
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, expected_tokens

prompts = st.tuples(st.integers(0, 2), st.integers(1, 40))
arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": prompts,
            "image": st.none() | st.tuples(st.sampled_from(KEYS), st.integers(0, 30)),
            "image_delay": st.integers(0, 12),
            "max_tokens": st.integers(1, 24),
            "stop": st.booleans(),
            "at": st.integers(0, 15),
            "abort_after": st.none() | st.integers(0, 15),
        }
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    rows=st.integers(1, 6),
    budget=st.integers(6, 48),
    blocks=st.integers(12, 40),
    out_of_memory_at=st.none() | st.integers(0, 20),
    again_after=st.integers(0, 6),
)
def test_every_sequence_ends_once_with_the_tokens_it_has_alone(
    arrivals, overlap, prefix_caching, rows, budget, blocks, out_of_memory_at, again_after
):
    harness = Harness(
        overlap=overlap, prefix_caching=prefix_caching, max_num_sequences=rows,
        max_batched_tokens=budget, num_blocks=blocks, again_after=again_after,
    )  # fmt: skip
    todo: dict[int, list] = {}
    for number, arrival in enumerate(arrivals):
        seed, length = arrival["prompt"]
        images = ()
        if arrival["image"] is not None:
            key, offset = arrival["image"]
            offset = min(offset, length - 1)
            images = (ImageSpan(key, offset, min(6, length - offset)),)
        message = add_message(
            number, prompt_of(seed, length), images=images, max_tokens=arrival["max_tokens"]
        )
        if arrival["stop"]:
            tokens, _ = expected_tokens(message, harness.engine.max_model_len)
            message = add_message(
                number, prompt_of(seed, length), images=images,
                max_tokens=arrival["max_tokens"], stop_token_ids=(tokens[len(tokens) // 2],),
            )  # fmt: skip
        at = arrival["at"]
        todo.setdefault(at, []).append(("add", message))
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
                case _:
                    harness.engine.abort(subject)
        harness.step()
    harness.run()
    assert set(harness.ends) == set(harness.added)
    assert list(harness.ends.values()).count("failed") <= (out_of_memory_at is not None)
    harness.assert_all_as_alone()
    harness.assert_empty()
