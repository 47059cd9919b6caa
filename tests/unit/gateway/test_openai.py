"""Requests: accepted fields, refused fields by name, and the resulting sampling parameters."""

import json
import time

import pytest

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.pb.decoder_pb2 import SamplingParams
from services.gateway.answers.answer_reader import _num_characters
from services.gateway.bounds import Bounds
from services.gateway.forms.openai import MAX_PARTS, parse_chat_request
from services.gateway.prompts.conversation import read_messages
from services.gateway.request.sampling import (
    BadWords,
    SamplingReader,
    choice_seed,
    model_defaults,
)
from tests.noise import least

HELLO = [{"role": "user", "content": "hello"}]
DEFAULTS = SamplingParams(
    temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=4096,
    stop_token_ids=(7, 8),
)  # fmt: skip


def parse(**fields):
    return parse_chat_request(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode_prompt(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(character) for character in text]


class Words:
    """A tokenizer that knows some texts.

    Args:
        vocabulary: token ids of each text.
    """

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def encode_prompt(self, text, add_special_tokens):
        assert not add_special_tokens
        return self.vocabulary[text]


def sampling(prompt_tokens=10, **fields):
    request, reader = parse(**fields), SamplingReader(Characters(), DEFAULTS)
    found = reader.read(request, vocab_size=1000)
    reader.limit(found, request, prompt_tokens, max_model_len=100)
    return found


def test_fields_without_effect_are_accepted():
    found = parse(
        user="u", metadata={"a": [1, {"b": None}]}, store=True, service_tier="auto",
        safety_identifier="x", prompt_cache_key="k", prompt_cache_retention="24h",
        prediction={"type": "content", "content": "x"}, parallel_tool_calls=True,
        stream=True, stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert found.stream


def test_whole_numbers_may_be_written_as_floats():
    """JSON knows one kind of numbers: Java and Lua write all of them with a point."""
    image = {"type": "image_url", "image_url": {"url": "data:,", "max_pixels": 65536.0}}
    found = parse(max_tokens=1e3, n=2.0, messages=[{"role": "user", "content": [image]}])
    assert (found.max_tokens, found.n) == (1000, 2)
    assert found.messages[0].content[0].image.max_pixels == 65536
    for field, value in (("max_tokens", 1.5), ("max_tokens", True), ("n", 0.0)):
        with pytest.raises(InvalidRequest) as refused:
            parse(**{field: value})
        assert refused.value.param == field


def test_unserved_fields_may_have_their_default_values():
    found = parse(
        tools=None, tool_choice="none", response_format={"type": "text"}, modalities=["text"],
        functions=None, function_call="auto", audio=None, reasoning_effort=None, verbosity=None,
        web_search_options=None,
    )  # fmt: skip
    assert [message.content for message in found.messages] == ["hello"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}), ("functions", [{"name": "f"}]), ("best_of", 2),
        ("web_search_options", {"a": 1}), ("guided_json", {"type": "object"}),
    ],
)  # fmt: skip
def test_unserved_field_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as refused:
        parse(**{field: value})
    assert refused.value.param == field


def test_our_own_answer_can_be_sent_back():
    found = parse(
        messages=[
            *HELLO,
            {"role": "assistant", "content": None, "refusal": None, "annotations": [],
             "tool_calls": None, "function_call": None, "audio": None, "reasoning": ""},
            *HELLO,
        ]
    )  # fmt: skip
    assert [message.role for message in found.messages] == ["user", "assistant", "user"]


LONG, LISTS = "a" * 9000, [[]] * 9000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": LONG}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": LONG, "arguments": "{}"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": LISTS})}}]}]},
        {"chat_template_kwargs": {"enable_thinking": LONG}},
        {"chat_template_kwargs": {"enable_thinking": LISTS}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": LISTS}}}]},
    ],
)  # fmt: skip
def test_what_is_long_to_render_counts_as_such(fields):
    """And is rendered in a thread, not in the event loop."""
    assert parse(**fields).num_characters > 8192


@pytest.mark.parametrize("numbers", [[0] * 600_000, [[0] * 10] * 10_000], ids=["flat", "nested"])
def test_numbers_without_end_are_long_at_once(numbers):
    """The event loop asks, and a body may have two million."""
    function = {"name": "f", "strict": True, "parameters": {"a": numbers}}
    request = parse(
        tools=[{"type": "function", "function": function}],
        chat_template_kwargs={"enable_thinking": numbers},
    )

    def ask() -> float:
        start = time.process_time()
        assert request.num_characters > 8192 and _num_characters(request) > 8192
        return time.process_time() - start

    assert least(ask, 0.05) <= 0.05


def test_defaults_are_the_models():
    found = sampling()
    assert (found.temperature, found.top_p, found.top_k) == pytest.approx((0.7, 0.8, 20))
    assert found.repetition_penalty == pytest.approx(1.05)
    assert found.stop_token_ids == [7, 8]
    assert found.max_tokens == 90
    assert not found.HasField("top_logprobs")


def test_given_fields_override_the_defaults():
    found = sampling(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1, seed=-1,
        presence_penalty=-2, frequency_penalty=2, logit_bias={"5": -100, "999": 1.5},
        stop_token_ids=[9, 7], max_tokens=5, min_tokens=2, logprobs=True,
    )  # fmt: skip
    assert (found.temperature, found.top_p, found.top_k) == (0, 0.5, 0)
    assert found.min_p == pytest.approx(0.1)
    assert found.logit_bias == {5: -100, 999: 1.5}
    assert found.stop_token_ids == [7, 8, 9]
    assert (found.max_tokens, found.min_tokens, found.top_logprobs) == (5, 2, 0)
    assert found.HasField("top_logprobs")
    assert found.seed == (1 << 64) - 1
    assert choice_seed(found.seed, 1) == 0
    assert sampling(ignore_eos=True).stop_token_ids == []


def test_seed_is_drawn_when_none_is_given():
    assert sampling().seed != sampling().seed
    assert sampling(seed=5) == sampling(seed=5)


def test_greedy_model_stays_greedy(spec):
    import dataclasses

    greedy = dataclasses.replace(spec, generation={"do_sample": False, "temperature": 0.9})
    assert model_defaults(greedy).temperature == 0.0
    greedy = dataclasses.replace(spec, generation={"temperature": 0.0})
    assert model_defaults(greedy).temperature == 0.0


def test_context_bounds():
    for field in ("max_tokens", "max_completion_tokens"):
        assert [sampling(**{field: n}).max_tokens for n in (89, 90, 91, 1 << 30)] == [
            89,
            90,
            90,
            90,
        ]
    for length in (100, 101):
        with pytest.raises(ContextLengthExceeded):
            sampling(length)
    with pytest.raises(InvalidRequest) as refused:
        sampling(max_tokens=1000, min_tokens=91)
    assert refused.value.param == "min_tokens"


def image(**fields):
    return {"type": "image_url", "image_url": {"url": "data:,", **fields}}


def conversation(content, max_images=8, takes_images=True, **fields):
    request = parse(messages=[{"role": "user", "content": content}], **fields)
    return read_messages(request, Bounds(max_images), takes_images=takes_images)[:2]


def test_images_keep_their_order_and_place():
    messages, images = conversation([image(), {"type": "text", "text": "x"}, image(detail="low")])
    assert [i.param for i in images] == ["messages[0].content[0]", "messages[0].content[2]"]
    assert [p["type"] for p in messages[0]["content"]] == ["image", "text", "image"]
    assert images[1].detail == "low"


def test_too_many_images_are_refused():
    with pytest.raises(InvalidRequest, match="at most 1"):
        conversation([image(), image()], max_images=1)
    with pytest.raises(InvalidRequest):
        conversation([{"type": "text", "text": ""}] * (MAX_PARTS + 1))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "data:,", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": "data:,", "format": "image/png"}},
        {"type": "input_image", "image_url": "data:,", "detail": "auto"},
        {"type": "input_image", "image_url": {"url": "data:,"}},
        {"type": "image", "image": "data:,"},
    ],
)
def test_spellings_of_an_image(part):
    _, (found,) = conversation([part])
    assert (found.url, found.detail) == ("data:,", "auto")


def test_detail_beside_an_image_is_that_of_the_image():
    for inner, expected in ({}, "low"), ({"detail": "high"}, "high"):
        part = {"type": "input_image", "image_url": {"url": "data:,", **inner}, "detail": "low"}
        assert conversation([part])[1][0].detail == expected


def test_spellings_of_text():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b", "cache_control": 1}]
    assert conversation(parts)[0] == [
        {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}
    ]
    assert conversation([], takes_images=False)[0] == [{"role": "user", "content": ""}]
    assert conversation([])[0] == [{"role": "user", "content": []}]


def test_innermost_pixel_limit_holds():
    inner = image(min_pixels=1)
    inner["min_pixels"] = 2
    part = image()
    part["min_pixels"] = 2
    for content, expected in ((inner, 1), (part, 2), (image(), 3)):
        _, images = conversation([content], min_pixels=3, mm_processor_kwargs={"min_pixels": 4})
        assert images[0].min_pixels == expected
    _, images = conversation([image()], mm_processor_kwargs={"max_pixels": 4})
    assert images[0].max_pixels == 4


@pytest.mark.parametrize(
    ("param", "content", "fields"),
    [
        ("messages[0].content[1]", [{"type": "text", "text": "x"}, image()], {}),
        ("min_pixels", "x", {"min_pixels": 1}),
        ("max_pixels", "x", {"max_pixels": 1}),
        ("mm_processor_kwargs", "x", {"mm_processor_kwargs": {"max_pixels": 1}}),
    ],
)
def test_text_model_refuses_images_by_field(param, content, fields):
    with pytest.raises(InvalidRequest, match="takes no images") as refused:
        conversation(content, takes_images=False, **fields)
    assert refused.value.param == param


def test_text_model_gets_text_parts_as_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages, _ = conversation(parts, takes_images=False)
    assert messages == [{"role": "user", "content": "a\nb"}]


def test_developer_is_system_and_null_is_empty():
    request = parse(
        messages=[{"role": "developer", "content": "x"}, {"role": "assistant", "content": None}]
    )
    assert read_messages(request, Bounds(0), takes_images=True)[0] == [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": ""},
    ]


def test_allowed_ids_and_bad_words():
    found = sampling(allowed_token_ids=[3, 5, 3], bad_words=["x", " yz", "\n"])
    assert list(found.allowed_token_ids) == [3, 5, 3]
    words = [list(word.ids) for word in found.bad_words]
    assert words == [[120], [32, 120], [121, 122], [32, 121, 122], [10]]
    assert not sampling().allowed_token_ids and not sampling(bad_words=[]).bad_words


def test_a_bad_word_is_one_at_the_start_and_after_a_space():
    vocabulary = {
        "cat": [1],
        " cat": [2],
        "big cat": [3, 2],
        " big cat": [4, 2],
        "idiot": [5, 6],
        " idiot": [7],
    }
    words = BadWords(Words(vocabulary))
    assert words.token_ids("cat") == [[1], [2]]
    assert words.token_ids(" big cat") == [[3, 2], [4, 2]]
    assert words.token_ids("idiot") == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 1000]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [7, 8], "min_tokens": 2}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
    ],
)
def test_allowed_ids_and_bad_words_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        sampling(**fields)
    assert refused.value.param.startswith(param)
