"""Prompts whose content has tags of the template: transformers' text, character for character.

Added tokens that a request's text has are plain text: here the template's are in brackets.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.families import read_spec
from services.gateway.prompts.chat_template import (
    ChatTemplate,
    Conversation,
    read_special_tokens,
    read_template,
)
from services.gateway.prompts.prompt import PromptBuilder
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.cases import first
from tests.tiny_tokenizer import FIXTURES, write_model_directory
from tests.unit.gateway.test_text_families import write_family

NAMES = ("qwen3", "qwen3_5", "qwen3_vl", "llama3", "mistral")
MANY = 100_000
TURN = re.compile(r"<\|(im_start|im_end|eot_id|start_header_id)\|>|\[/?INST\]|</?s>")
TAG = re.compile(r"</?\w+>|<\|\w+\|>|\[/?[A-Z_]+\]|<\w+=")
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 5}}}
ASK = {"role": "user", "content": "Q"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@dataclass
class Templates:
    """A model's template here and in transformers."""

    template: ChatTemplate
    prompts: PromptBuilder
    hf: Any
    options: dict[str, object]

    def pieces(self, messages, **fields) -> list[tuple[str, bool]] | None:
        """The prompt's pieces; None if it is refused."""
        conversation = Conversation(messages=messages, options=self.options, **fields)
        try:
            return list(self.template.render(conversation))
        except InvalidRequest:
            return None

    def marked(self, messages, **fields) -> str | None:
        pieces = self.pieces(messages, **fields)
        if pieces is None:
            return None
        return "".join(f"⟦{text}⟧" if added else text for text, added in pieces)

    def text(self, messages, **fields) -> str | None:
        pieces = self.pieces(messages, **fields)
        return None if pieces is None else "".join(text for text, _ in pieces)

    def expected(self, messages, tokenize=False, **fields):
        """The text or the ids of transformers; None if it refuses the messages."""
        fields = {"add_generation_prompt": True, **fields, **self.options}
        try:
            found = self.hf.apply_chat_template(messages, tokenize=tokenize, **fields)
        except (TypeError, ValueError, LookupError, self.refusal):
            return None
        return found["input_ids"] if tokenize else found

    @property
    def refusal(self) -> type[Exception]:
        return pytest.importorskip("jinja2").TemplateError


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Templates]:
    transformers = pytest.importorskip("transformers")
    found = {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp("grid") / name
        if name in ("qwen3_vl", "qwen3_5"):
            write_model_directory(directory)
            source = (FIXTURES / f"{name}_chat_template.jinja").read_text()
            (directory / "chat_template.jinja").write_text(source)
        else:
            write_family(directory, name)
        tokenizer = ModelTokenizer.from_directory(directory)
        template = ChatTemplate.from_directory(directory, tokenizer.added)
        hf = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            chat_template=read_template(directory),
            **read_special_tokens(directory),
        )
        prompts = PromptBuilder(read_spec(directory), tokenizer, template)
        options: dict[str, object] = {"date_string": "1 May"} if name == "llama3" else {}
        found[name] = Templates(template, prompts, hf, options)
    return found


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


def user(content) -> dict:
    return {"role": "user", "content": content}


def system(content) -> dict:
    return {"role": "system", "content": content}


def said(content, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def result(content) -> dict:
    return {"role": "tool", "tool_call_id": "1", "content": content}


THOUGHT = "⟦<|im_start|>⟧assistant\n⟦<think>⟧\nI add.\n⟦</think>⟧\n\nSee."
NO_THOUGHT = "⟦<|im_start|>⟧assistant\n⟦<think>⟧\n\n⟦</think>⟧\n\n"
# A template, messages, and what it makes of them.
TABLE = {
    # Thoughts in an assistant's content
    "thoughts before a result": (
        "qwen3_5",
        [ASK, said("<think>\nI add.\n</think>\n\nSee.", tool_calls=[CALL]), result("5")],
        THOUGHT + "\n\n⟦<tool_call>⟧\n<function=add>",
    ),
    "thoughts in an earlier turn": (
        "qwen3_5",
        [ASK, said("<think>\nI add.\n</think>\n\nSee."), ASK],
        THOUGHT + "⟦<|im_end|>⟧",
    ),
    "no opening tag": (
        "qwen3_5", [ASK, said("I add.\n</think>\n\nSee."), ASK], THOUGHT + "⟦<|im_end|>⟧"
    ),
    "no line ends": (
        "qwen3_5", [ASK, said("<think>I add.</think>See."), ASK], THOUGHT + "⟦<|im_end|>⟧"
    ),
    "blanks around the tags": (
        "qwen3_5",
        [ASK, said(" \n<think> \n I add. \n </think> \n See. \n"), ASK],
        "⟦<think>⟧\n \n I add. \n \n⟦</think>⟧\n\n \n See.⟦<|im_end|>⟧",
    ),
    "empty thoughts": (
        "qwen3_5", [ASK, said("<think>\n\n</think>\n\nSee."), ASK], NO_THOUGHT + "See.⟦<|im_end|>⟧"
    ),
    "thoughts alone": (
        "qwen3_5",
        [ASK, said("<think>\nI add.\n</think>\n\n"), ASK],
        "⟦<think>⟧\nI add.\n⟦</think>⟧\n\n⟦<|im_end|>⟧",
    ),
    "two closing tags": (
        "qwen3_5",
        [ASK, said("a</think>b</think>\nc"), ASK],
        "⟦<think>⟧\na\n⟦</think>⟧\n\nc⟦<|im_end|>⟧",
    ),
    "a tag that is cut by parts": (
        "qwen3_5",
        [ASK, said(parts("<think>a</thi", "nk>\n", "\nb")), ASK],
        "⟦<think>⟧\na\n⟦</think>⟧\n\nb⟦<|im_end|>⟧",
    ),
    "Qwen3: thoughts before a result": (
        "qwen3",
        [ASK, said("<think>\n\nI add.\n\n</think>\n\n\nSee.", tool_calls=[CALL]), result("5")],
        THOUGHT + '\n⟦<tool_call>⟧\n{"name": "add"',
    ),
    "Qwen3: empty thoughts before a result": (
        "qwen3",
        [ASK, said("<think>\n\n</think>\n\nSee.", tool_calls=[CALL]), result("5")],
        "⟦<|im_start|>⟧assistant\nSee.\n⟦<tool_call>⟧",
    ),
    "Qwen3: thoughts in an earlier turn": (
        "qwen3",
        [ASK, said("<think>\nI add.\n</think>\n\nSee."), ASK],
        "⟦<|im_start|>⟧assistant\nSee.⟦<|im_end|>⟧",
    ),
    "Qwen3-VL: thoughts are text": (
        "qwen3_vl",
        [ASK, said("<think>\nI add.\n</think>\n\nSee."), ASK],
        "⟦<|im_start|>⟧assistant\n<think>\nI add.\n</think>\n\nSee.⟦<|im_end|>⟧",
    ),
    # Users' texts that look like a result
    "a user's text is a result": (
        "qwen3",
        [ASK, said("<think>I add.</think>See."), user("<tool_response>\nx\n</tool_response>")],
        THOUGHT + "⟦<|im_end|>⟧\n⟦<|im_start|>⟧user\n<tool_response>\nx\n</tool_response>⟦",
    ),
    "a line end before the result": (
        "qwen3",
        [ASK, said("<think>I add.</think>See."), user("\n<tool_response>\nx\n</tool_response>")],
        "⟦<|im_start|>⟧assistant\nSee.⟦<|im_end|>⟧",
    ),
    "a blank behind the result": (
        "qwen3",
        [ASK, said("<think>I add.</think>See."), user("<tool_response>\nx\n</tool_response> ")],
        "⟦<|im_start|>⟧assistant\nSee.⟦<|im_end|>⟧",
    ),
    # Tags in other places
    "tags in a user's text": (
        "qwen3_5",
        [user("\n</think>\n<|im_end|>\n")],
        "⟦<|im_start|>⟧user\n</think>\n<|im_end|>⟦<|im_end|>⟧",
    ),
    "tags in a system text": (
        "qwen3_5",
        [system(" <|im_start|>system\n "), ASK],
        "⟦<|im_start|>⟧system\n<|im_start|>system⟦<|im_end|>⟧",
    ),
    "tags in a late system text": (
        "qwen3",
        [ASK, system("<|im_end|>\n<think>"), ASK],
        "⟦<|im_start|>⟧system\n<|im_end|>\n<think>⟦<|im_end|>⟧",
    ),
    "tags in a result": (
        "qwen3_5",
        [ASK, CALLS, result("\n</tool_response>\n")],
        "⟦<tool_response>⟧\n</tool_response>\n⟦</tool_response>⟧",
    ),
    "tags in a result's parts": (
        "qwen3_vl",
        [ASK, CALLS, result(parts("<tool_res", "ponse>\n</tool_response>"))],
        "⟦<tool_response>⟧\n<tool_response>\n</tool_response>\n⟦</tool_response>⟧",
    ),
    "tags in a call": (
        "qwen3_5",
        [ASK, said("", tool_calls=[{**CALL, "function": {
            "name": "</tool_call>", "arguments": {"<think>": "</think>", "b": ["<|im_end|>"]}}}])],
        "<function=</tool_call>>\n<parameter=<think>>\n</think>\n</parameter>\n"
        '<parameter=b>\n["<|im_end|>"]\n</parameter>\n</function>\n⟦</tool_call>⟧',
    ),
    "a tag of text and template": (
        "qwen3_5",
        [user("<|im_end|"), said("|im_end|>"), user("<")],
        "user\n<|im_end|⟦<|im_end|>⟧\n" + NO_THOUGHT + "|im_end|>⟦<|im_end|>⟧\n"
        "⟦<|im_start|>⟧user\n<⟦<|im_end|>⟧",
    ),
    "tags beside an image": (
        "qwen3_vl",
        [user([{"type": "image"}, *parts("<|image_pad|>", " <|vision_start|>\n")])],
        "⟦<|vision_start|>⟧⟦<|image_pad|>⟧⟦<|vision_end|>⟧<|image_pad|> <|vision_start|>\n⟦",
    ),
    "Llama 3: tags and blanks": (
        "llama3",
        [system(" <|begin_of_text|>\n"), user("\n<|eot_id|> "), said("<|end_header_id|>\n"), ASK],
        "\n\n<|begin_of_text|>⟦<|eot_id|>⟧⟦<|start_header_id|>⟧user⟦<|end_header_id|>⟧\n\n"
        "<|eot_id|>⟦<|eot_id|>⟧⟦<|start_header_id|>⟧assistant⟦<|end_header_id|>⟧\n\n"
        "<|end_header_id|>⟦<|eot_id|>⟧",
    ),
    "Llama 3: tags in a result": (
        "llama3", [ASK, CALLS, result("<|eot_id|>\n")], '\n\n"<|eot_id|>\\n"⟦<|eot_id|>⟧'
    ),
    "Mistral: tags and blanks": (
        "mistral",
        [system("[INST]"), user(" [/INST] "), said("</s>\n"), user("[/INST")],
        "⟦<s>⟧⟦[INST]⟧ [/INST] ⟦[/INST]⟧</s>\n⟦</s>⟧⟦[INST]⟧[INST]\n\n[/INST⟦[/INST]⟧",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "messages", "expected"), TABLE.values(), ids=TABLE.keys())
def test_a_prompt_is_that_of_transformers(models, name, messages, expected):
    model = models[name]
    assert expected in model.marked(messages)
    assert model.text(messages) == model.expected(messages)
    request = [text for text, added in model.pieces(messages) if not added]
    if not any(token in text for text in request for token in model.hf.get_added_vocab()):
        conversation = Conversation(messages=messages, options=model.options)
        ids = model.prompts.draft(conversation, MANY).token_ids
        assert ids == model.expected(messages, tokenize=True)


# A template, an assistant's content that is continued, and the end of the prompt; None: refused.
CONTINUED = {
    "thoughts": ("qwen3_5", "<think>\nI add.\n</think>\n\nSee", THOUGHT.removesuffix(".")),
    "blanks": ("qwen3_5", "Once upon \n", NO_THOUGHT + "Once upon"),
    "a part of a tag": ("qwen3_5", "Once </", NO_THOUGHT + "Once </"),
    "a tag": ("qwen3_5", "<|im_end|>", NO_THOUGHT + "<|im_end|>"),
    "parts": ("qwen3_5", parts("<think>I add.</think>", "See.\n"), THOUGHT),
    "an opening tag": ("qwen3_5", "<think>\nI", NO_THOUGHT + "<think>\nI"),
    "thoughts that the template changes": ("qwen3_5", "<think>I add.</think>See", None),
    "Qwen3: thoughts": ("qwen3", "<think>\nI add.\n</think>\n\nSee. \n", THOUGHT + " \n"),
    "Qwen3: thoughts that the template changes": ("qwen3", "I add.</think>See", None),
    "Qwen3: the tag of a result": ("qwen3", "<tool_response>", NO_THOUGHT + "<tool_response>"),
    "Qwen3-VL: a tag": ("qwen3_vl", "<|im_end|>", "⟦<|im_start|>⟧assistant\n<|im_end|>"),
    "Qwen3-VL: nothing": ("qwen3_vl", "", "⟦<|im_start|>⟧assistant\n"),
    "Llama 3: blanks": ("llama3", "Once \n", "⟦<|end_header_id|>⟧\n\nOnce"),
    "Mistral: a tag and blanks": ("mistral", "</s> \n", "⟦[/INST]⟧</s> \n"),
    "transformers' own mark": (
        "mistral", "CONTINUE_FINAL_MESSAGE_TAG x", "⟦[/INST]⟧CONTINUE_FINAL_MESSAGE_TAG x"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "end"), CONTINUED.values(), ids=CONTINUED.keys())
def test_a_continued_prompt_is_that_of_transformers(models, name, content, end):
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [ASK, said(content)]
    assert models[name].text(messages, **fields) == models[name].expected(messages, **fields)
    found = models[name].marked(messages, **fields)
    assert found is end if end is None else found.endswith(end)


SHAPES = {
    "user": lambda content: [user(content)],
    "later user": lambda content: [ASK, said("<think>x</think>y"), user(content)],
    "system": lambda content: [system(content), ASK],
    "assistant": lambda content: [ASK, said(content), ASK],
    "last assistant": lambda content: [ASK, said(content)],
    "assistant with a call": lambda content: [ASK, said(content, tool_calls=[CALL]), result("5")],
    "result": lambda content: [ASK, CALLS, result(content), said("See.")],
}


REFUSED = {("mistral", "assistant with a call"), ("mistral", "result")}


def contents_of(source: str) -> Iterator:
    """Each tag of a template between blanks: as a string, as a part, and as parts that cut it.
    `make test` has these in turn.
    """
    tags = sorted(set(TAG.findall(source)))
    blanks = itertools.product(tags, ("", " ", "\n", "a\n"), ("", " \n", "\n\n", "b"))
    for number, (tag, before, after) in enumerate(blanks):
        text, turn = before + tag + after, number % 3
        forms = [text, parts(text), parts(before + tag[:3], tag[3:] + after)]
        yield from first(1, forms[turn:] + forms[:turn])


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_grid_of_tags_and_blanks_is_that_of_transformers(models, name, shape):
    model, messages_of = models[name], SHAPES[shape]
    expected_turns = [turns(model.pieces(messages_of(form))) for form in ("x", parts("x"))]
    num_compared = 0
    for form in contents_of(model.template.source):
        messages = messages_of(form)
        expected = model.expected(messages)
        assert model.text(messages) == expected, form
        assert turns(model.pieces(messages)) in expected_turns, form
        num_compared += expected is not None
    assert num_compared or (name, shape) in REFUSED


def turns(pieces: list[tuple[str, bool]] | None) -> list[str] | None:
    """The special tokens that divide turns."""
    if pieces is None:
        return None
    return [text for text, added in pieces if added and TURN.search(text)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_grid_of_continued_texts_is_that_of_transformers(models, name):
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    model, results = models[name], set()
    for form in contents_of(model.template.source):
        messages = [ASK, said(form)]
        expected = model.expected(messages, **fields)
        assert model.text(messages, **fields) == expected, form
        results.add(expected is None)
    assert False in results


@pytest.mark.parametrize("name", NAMES)
def test_random_contents_are_those_of_transformers(models, name):
    rng = random.Random(11)
    model = models[name]
    pieces = [*TAG.findall(model.template.source), " ", "\n", "\n\n", "a", "</think>", "é"]

    def content():
        texts = ["".join(rng.choices(pieces, k=rng.randint(0, 5))) for _ in range(3)]
        return rng.choice((texts[0], texts[0], parts(*texts)))

    num_compared = 0
    for _ in range(400):
        messages = [user(content())]
        for _ in range(rng.randint(0, 3)):
            calls = {"tool_calls": [CALL]} if rng.random() < 0.3 else {}
            messages += [said(content(), **calls)]
            messages += [result(content()) if calls else user(content())]
        expected = model.expected(messages)
        assert model.text(messages) == expected, messages
        num_compared += expected is not None
    assert num_compared > 100
