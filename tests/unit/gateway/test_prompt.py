# ruff: noqa: RUF001 - look-alike characters are the point
"""Rendering, tokenizing, expanding: HF's ids; added tokens in user text stay plain text."""

import json
import random
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import jinja2
import pytest

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.geometry import Unit
from services.common.model_spec import ModelSpecError
from services.gateway.bounds import Bounds
from services.gateway.forms.openai import ChatRequest, Message
from services.gateway.prompts.chat_template import ChatTemplate, Conversation, read_template
from services.gateway.prompts.conversation import ConversationReader
from services.gateway.prompts.prompt import Draft, PromptBuilder
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.noise import least
from tests.tiny_tokenizer import ADDED, FIXTURES, SPECIAL, added_ids, tokenizer_json

MANY = 100_000
IMAGE = {"type": "image"}


def text(value):
    return {"type": "text", "text": value}


def user(*content):
    return {"role": "user", "content": list(content)}


@pytest.fixture(scope="session")
def hf(model_directory):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_directory / "tokenizer.json"),
        chat_template=read_template(model_directory),
    )


def builder_of(spec, tokenizer, source):
    return PromptBuilder(spec, tokenizer, ChatTemplate(source, {}, tokenizer.added))


def draft_of(request, spec, tokenizer, source):
    template = ChatTemplate(source, {}, tokenizer.added)
    conversation = ConversationReader(spec, tokenizer, template, Bounds()).read(request)
    return builder_of(spec, tokenizer, source).draft(conversation, MANY)


DROPS_LATE_SYSTEM = (
    "{{ messages[0].content }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        ((FIXTURES / "qwen3_vl_chat_template.jinja").read_text(), False),
        ((FIXTURES / "qwen3_5_chat_template.jinja").read_text(), False),
        ((FIXTURES / "qwen3_chat_template.jinja").read_text(), True),
        ((FIXTURES / "llama3_chat_template.jinja").read_text(), True),
        ((FIXTURES / "mistral_chat_template.jinja").read_text(), False),
        (DROPS_LATE_SYSTEM, False),
    ],
    ids=["qwen3_vl", "qwen3_5", "qwen3", "llama3", "mistral", "drops"],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_late_system_messages_as_the_template_takes_them(spec, tokenizer, template, taken, role):
    user, late = Message("user", "hi"), Message(role, "Be brief.")

    def drafted(*messages):
        found = draft_of(ChatRequest([*messages], "m"), spec, tokenizer, template)
        return b"".join(map(tokenizer.token_bytes, found.token_ids)).decode(), found.ignored

    text, ignored = drafted(user, late)
    if taken:
        assert text.index("hi") < text.index("Be brief.") and not ignored
        return
    assert "Be brief." in text and ignored == ["messages.role"]
    assert drafted(late, user) == (text, [])
    assert "A.\n\nBe brief." in drafted(Message("system", "A."), user, late)[0]


def render(prompts, messages, options, max_tokens):
    """Token ids, one placeholder per image."""
    return prompts.draft(Conversation(messages=messages, options=options), max_tokens).token_ids


CONVERSATIONS = {
    "string": [{"role": "user", "content": "What is in the picture?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    "system parts": [{"role": "system", "content": [text("Be "), text("brief.")]}, user(text("x"))],
    "one image": [user(IMAGE, text("What is this?"))],
    "interleaved": [user(text("a"), IMAGE, text(" b "), IMAGE, IMAGE, text("c"))],
    "turns": [
        user(IMAGE, text("one?")),
        {"role": "assistant", "content": "A circle.\n"},
        user(IMAGE, text("\n\nand  two? ")),
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "中文 über naïve 🙂 e\u0301 ＡＢ"},
    ],
    "whitespace": [{"role": "user", "content": " \n\t \r\n  x\u00a0y \n"}],
    "braces": [{"role": "user", "content": "{{ 7*7 }} {% raw %} {# x #}"}],
    "angles": [{"role": "user", "content": "a < b | c > d <| |> <|im_ end|>"}],
}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_ids_equal_hf(prompts, hf, messages):
    expected = hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert render(prompts, messages, {}, MANY) == expected


def test_ids_equal_hf_on_random_text(prompts, hf):
    rng = random.Random(0)
    alphabet = "abc XYZ 0189 \n\r\t'sté中🙂<|>_-.!\u0301\u200d"
    for _ in range(300):
        content = "".join(rng.choices(alphabet, k=rng.randint(0, 60)))
        messages = [{"role": "user", "content": content}]
        expected = hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert render(prompts, messages, {}, MANY) == expected, content


def test_vision_ids_option(prompts, tokenizer):
    plain = render(prompts, [user(IMAGE)], {}, MANY)
    numbered = render(prompts, [user(IMAGE)], {"add_vision_id": True}, MANY)
    assert len(numbered) == len(plain) + len(tokenizer.encode_text("Picture 1: "))


def template_ids(prompts, messages, replacement):
    """Special ids of a prompt."""
    special = set(added_ids().values())
    return [i for i in render(prompts, messages, {}, MANY) if i in special]


@pytest.mark.parametrize("token", [*SPECIAL, *ADDED])
def test_user_text_never_becomes_an_added_token(prompts, tokenizer, token):
    harmless = [i for i in render(prompts, [user(text("x"))], {}, MANY)]
    special = set(added_ids().values())
    expected = [i for i in harmless if i in special]
    for content in (token, f"a{token}{token}b", token * 50):
        for messages in (
            [{"role": "user", "content": content}],
            [user(text(content))],
            [{"role": "system", "content": content}, {"role": "user", "content": "x"}],
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}],
        ):
            ids = render(prompts, messages, {}, MANY)
            found = [i for i in ids if i in special]
            assert set(found) <= set(expected)
            assert len(found) == 1 + 2 * len(messages)
    # The text is complete.
    ids = render(prompts, [{"role": "user", "content": f"[{token}]"}], {}, MANY)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert f"[{token}]".encode() in joined


def test_added_tokens_do_not_form_across_parts(prompts):
    token = "<|image_pad|>"
    special = set(added_ids().values())
    for cut in range(1, len(token)):
        ids = render(prompts, [user(text(token[:cut]), text(token[cut:]))], {}, MANY)
        assert sum(i in special for i in ids) == 3
    for first in range(1, len(token) - 1):
        for second in range(first + 1, len(token)):
            parts = (token[:first], token[first:second], token[second:])
            ids = render(prompts, [user(*map(text, parts))], {}, MANY)
            assert sum(i in special for i in ids) == 3


def test_random_fragments_never_form_an_added_token(prompts, tokenizer):
    rng = random.Random(7)
    special = set(added_ids().values())
    tokens = [*SPECIAL, *ADDED]

    def fragments() -> str:
        pieces = []
        for _ in range(rng.randint(0, 6)):
            token = rng.choice(tokens)
            start, end = sorted(rng.choices(range(len(token) + 1), k=2))
            pieces.append(rng.choice((token, token[start:end], token[1:], token[:-1], "x", "<")))
        return "".join(pieces)

    for _ in range(400):
        question, answer = fragments(), fragments()
        messages = [
            user(*(text(part) for part in (fragments(), question, fragments()))),
            {"role": "assistant", "content": answer},
            user(text("?")),
        ]
        ids = render(prompts, messages, {}, MANY)
        assert sum(i in special for i in ids) == 2 * len(messages) + 1, messages
        rendered = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert question in rendered and answer in rendered, messages


@pytest.mark.parametrize(
    "content",
    ["\0", "\0<|im_end|>\0", "<|im\0_end|>", "".join(map(chr, range(0xFDD0, 0xFDF0))), "\uffff"],
)
def test_text_may_have_any_characters(prompts, tokenizer, content):
    ids = render(prompts, [{"role": "user", "content": f"[{content}]"}], {}, MANY)
    assert sum(i in set(added_ids().values()) for i in ids) == 3
    assert f"[{content}]".encode() in b"".join(map(tokenizer.token_bytes, ids))


def test_names_of_arguments_do_not_become_added_tokens(spec, tokenizer):
    source = (
        "{% for m in messages %}{% for key, value in m.arguments | items %}"
        "{{ '<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}{% endfor %}{% endfor %}<think>"
    )
    messages = [{"role": "user", "content": "", "arguments": {"think": "<", "tool_call": 1}}]
    ids = render(builder_of(spec, tokenizer, source), messages, {}, MANY)
    assert [i for i in ids if i in added_ids().values()] == [added_ids()["<think>"]]


def test_expand_replaces_each_placeholder_by_its_image(prompts):
    ids = render(prompts, [user(text("a"), IMAGE, text("b"), IMAGE)], {}, MANY)
    units = [(Unit((1, 4, 6)),), (Unit((1, 2, 2)),)]
    prompt = prompts.expand(Draft(ids, []), units)
    pad = added_ids()["<|image_pad|>"]
    assert [run.num_tokens for run in prompt.runs] == [6, 1]
    assert prompt.num_image_tokens == 7
    assert len(prompt.token_ids) == len(ids) + 5
    for offset, length, *_ in prompt.runs:
        assert (prompt.token_ids[offset : offset + length] == pad).all()
        assert prompt.token_ids[offset - 1] == added_ids()["<|vision_start|>"]
        assert prompt.token_ids[offset + length] == added_ids()["<|vision_end|>"]
    assert prompt.positions is not None
    assert prompt.positions.shape == (3, len(prompt.token_ids))
    assert prompt.position_delta == -(6 - 3)


def test_text_has_no_positions(prompts):
    prompt = prompts.expand(Draft(render(prompts, [user(text("a"))], {}, MANY), []), [])
    assert prompt.positions is None
    assert prompt.position_delta == 0


def test_count_of_placeholders_must_be_that_of_images(prompts):
    ids = render(prompts, [user(IMAGE)], {}, MANY)
    for units in ([], [(Unit((1, 2, 2)),)] * 2):
        with pytest.raises(InvalidRequest):
            prompts.expand(Draft(ids, []), units)


def test_text_that_cannot_fit_is_refused_untokenized(prompts, tokenizer):
    content = "a" * (100 * tokenizer.max_token_bytes + 1)
    with pytest.raises(ContextLengthExceeded):
        render(prompts, [{"role": "user", "content": content}], {}, 100)
    # Composed, this is a third as long and fits.
    tokenizer.check_length("e\u0301" * 100, 200 // tokenizer.max_token_bytes + 1)


@pytest.mark.parametrize(
    "text", ["a" + "\u0300\u0327" * 50_000, "中文" * 1_000_000, "x " * 2_000_000]
)
def test_a_long_text_is_measured_at_once(tokenizer, text):
    """Normalized, it takes half a second, in which no other thread goes on."""

    def measure() -> float:
        start = time.process_time()
        with pytest.raises(ContextLengthExceeded):
            tokenizer.check_length(text, 100)
        return time.process_time() - start

    assert least(measure, 0.1) <= 0.1


@pytest.mark.parametrize("text", ["<", "</think>", "<|im_end|>", "<|im_start|"])
def test_a_text_of_parts_of_added_tokens_is_rendered_at_once(tokenizer, text):
    source = (FIXTURES / "qwen3_5_chat_template.jinja").read_text()
    content = text * (2_000_000 // len(text))
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    template = ChatTemplate(source, {}, tokenizer.added)

    def measure() -> float:
        start = time.process_time()
        pieces = list(template.render(Conversation(messages=messages, options={})))
        assert sum(added for _, added in pieces) == 8
        return time.process_time() - start

    assert least(measure, 0.5) <= 0.5  # 2.5 s of "<", where each is searched for in the text


def test_a_long_prompt_leaves_other_threads_their_turn(tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 40_000

    def longest_share() -> float:
        with ThreadPoolExecutor(1) as threads:
            times = [time.monotonic()]
            encoding = threads.submit(tokenizer.encode_prompt, text, True)
            while not encoding.done():
                times.append(time.monotonic())
                time.sleep(0.001)
            times.append(time.monotonic())
        assert len(encoding.result()) > 100_000
        return max(after - before for before, after in pairwise(times)) / (times[-1] - times[0])

    assert least(longest_share, 0.3) <= 0.3  # all of the time, while it keeps the interpreter lock


def test_text_that_fits_once_it_is_normalized_is_not_refused(tokenizer):
    for text in ("\u1fbe\u0308\u0301", "\u1112\u1161\u11ab", "e\u0301", "\u212b"):
        num_bytes = len(unicodedata.normalize("NFC", text).encode())
        tokenizer.check_length(text * tokenizer.max_token_bytes, num_bytes)


def test_template_refusal_is_a_400(spec, tokenizer):
    builder = builder_of(spec, tokenizer, "{{ raise_exception('no such thing') }}")
    with pytest.raises(InvalidRequest, match="no such thing"):
        render(builder, [{"role": "user", "content": "x"}], {}, MANY)


def test_template_is_sandboxed(spec, tokenizer):
    for template in (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__bases__[0].__subclasses__() }}",
        "{% set _ = messages.append({}) %}",
    ):
        builder = builder_of(spec, tokenizer, template)
        with pytest.raises(InvalidRequest):
            render(builder, [{"role": "user", "content": "x"}], {}, MANY)


def test_template_has_hf_semantics(spec, tokenizer):
    template = (
        "{%- for m in messages %}\n    {% if loop.index == 2 %}{% continue %}{% endif %}\n"
        "    {{ {'b': '<é>', 'a': 1} | tojson }}\n{% endfor %}"
    )
    builder = builder_of(spec, tokenizer, template)
    ids = render(builder, [{"role": "user", "content": "x"}] * 3, {}, MANY)
    line = '    {"b": "<é>", "a": 1}\n'
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert joined == line * 2
    assert isinstance(jinja2.__version__, str)


def test_template_may_mark_what_the_model_writes(spec, tokenizer, hf):
    """As templates of trainers do."""
    template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% set text = 'outer' %}"
        "{%- if m.role == 'assistant' %}{%- generation -%}\n  {% set text = m.content %}"
        "{{ text }}<|im_end|>{{ '\n' }}\n{%- endgeneration -%}{{ text }}"
        "{%- else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{% generation %} x {% endgeneration %}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "one?"}, {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    expected = hf.apply_chat_template(messages, chat_template=template, add_generation_prompt=True)[
        "input_ids"
    ]
    assert render(builder_of(spec, tokenizer, template), messages, {}, MANY) == expected


def test_template_is_found_in_each_place(tmp_path):
    with pytest.raises(ModelSpecError):
        read_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert read_template(tmp_path) == "one"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "two"}))
    assert read_template(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_template(tmp_path) == "three"


@pytest.mark.parametrize(
    "content",
    [
        "version https://git-lfs.github.com/spec/v1\n", "[]", '{"decoder": {"type": "ByteLevel"}}',
        json.dumps({**json.loads(tokenizer_json()), "added_tokens": [{"id": 5}]}),
        json.dumps({**json.loads(tokenizer_json()), "added_tokens": 5}),
    ],
    ids=["not fetched", "no object", "no model", "no token", "no tokens"],
)  # fmt: skip
def test_a_malformed_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelSpecError, match=r"tokenizer\.json"):
        ModelTokenizer.from_directory(tmp_path)


def test_unsupported_tokenizers_are_named():
    definition = json.loads(tokenizer_json())
    with pytest.raises(ModelSpecError, match="byte_fallback"):
        ModelTokenizer({**definition, "decoder": {"type": "Metaspace"}})
    broken = [{**definition["added_tokens"][0], "lstrip": True}]
    with pytest.raises(ModelSpecError, match="strips"):
        ModelTokenizer({**definition, "added_tokens": broken})
