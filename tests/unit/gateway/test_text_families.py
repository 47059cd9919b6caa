"""Prompts of text families: rendering and token ids equal transformers' apply_chat_template.

The templates in tests/fixtures are those of Qwen3, Llama 3.2 and Mistral in all that they do with
messages; the tokenizers are small byte-level BPEs with each family's added tokens, word pattern and
post-processor.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.common.errors import InvalidRequest
from services.common.families import read_spec
from services.common.model_spec import ModelSpecError
from services.gateway.prompts.chat_template import (
    ChatTemplate,
    Conversation,
    read_special_tokens,
    read_template,
)
from services.gateway.prompts.prompt import PromptBuilder
from services.gateway.tokenizer.byte_pairs import BytePairs
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.tiny_tokenizer import FIXTURES, SPLIT, tokenizer_json, write_text_model_directory

MANY = 100_000
LLAMA_ADDED = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(8)),
)  # fmt: skip
MISTRAL_ADDED = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>")


def definition_with(added: tuple[str, ...], bos: str) -> dict:
    """The tiny BPE as Llama 3's or Tekken's tokenizer.json: words that are tokens need no merges,
    numbers split into three digits, and a post-processor that writes BOS.
    """
    definition = json.loads(tokenizer_json())
    model = definition["model"]
    model["ignore_merges"] = True
    # A token that no merge makes, as Llama 3's file has them: only the whole word gives it.
    model["vocab"] |= {"Ġworldwide": len(model["vocab"])}
    first = len(model["vocab"])
    definition["normalizer"] = None
    split = definition["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"] = {"Regex": SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")}
    definition["added_tokens"] = [
        {
            "id": first + index, "content": content, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        }
        for index, content in enumerate(added)
    ]  # fmt: skip
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [first + added.index(bos)], "tokens": [bos]}},
    }
    return definition


@dataclass
class Family:
    prompts: PromptBuilder
    tokenizer: ModelTokenizer
    hf: object

    def expected(self, messages: list[dict], **options: object) -> list[int]:
        return self.hf.apply_chat_template(messages, add_generation_prompt=True, **options)[
            "input_ids"
        ]

    def found(self, messages: list[dict], **options: object) -> list[int]:
        conversation = Conversation(messages=messages, options=options)
        return self.prompts.draft(conversation, MANY).token_ids


def write_family(directory: Path, name: str) -> Path:
    """A model directory; special tokens as a string for one family, as a dict for another."""
    write_text_model_directory(directory)
    if name == "qwen3":
        return directory
    added, bos, eos = {
        "llama3": (LLAMA_ADDED, "<|begin_of_text|>", "<|eot_id|>"),
        "mistral": (MISTRAL_ADDED, "<s>", {"content": "</s>", "lstrip": False}),
    }[name]
    (directory / "tokenizer.json").write_text(json.dumps(definition_with(added, bos)))
    template = (FIXTURES / f"{name}_chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": bos, "eos_token": eos, "chat_template": template})
    )
    return directory


@pytest.fixture(scope="module", params=["qwen3", "llama3", "mistral"])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(name, tmp_path_factory) -> Family:
    transformers = pytest.importorskip("transformers")
    directory = write_family(tmp_path_factory.mktemp("families") / name, name)
    tokenizer = ModelTokenizer.from_directory(directory)
    template = ChatTemplate.from_directory(directory, tokenizer.added)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        chat_template=read_template(directory),
        **read_special_tokens(directory),
    )
    return Family(PromptBuilder(read_spec(directory), tokenizer, template), tokenizer, hf)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


CONVERSATIONS = {
    "one": [user("What is in 1234567 worldwide?")],
    "system": [{"role": "system", "content": " Be brief.\n"}, user("hi")],
    "turns": [user("one?"), assistant("A circle.\n"), user("\n\nand  two? "), assistant("2"),
              user("中文 über naïve 🙂 e\u0301")],
    "whitespace": [user(" \n\t \r\n  x\u00a0y \n")],
    "braces": [user("{{ 7*7 }} {% raw %} {# x #} [ INST ] < s>")],
}  # fmt: skip


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_ids_equal_hf(family, messages):
    assert family.found(messages) == family.expected(messages)


def test_ids_equal_hf_on_random_text(family):
    rng = random.Random(0)
    alphabet = "abc XYZ 0189 \n\r\t'sté中🙂<|>_-.! worldwide"
    for _ in range(150):
        messages = [user("".join(rng.choices(alphabet, k=rng.randint(0, 60))))]
        assert family.found(messages) == family.expected(messages), messages


def test_bos_is_written_once_or_never(family, name):
    ids = family.found(CONVERSATIONS["one"])
    bos = {"llama3": "<|begin_of_text|>", "mistral": "<s>"}.get(name)
    if bos is None:
        assert ids[0] == family.tokenizer.added["<|im_start|>"].token_id
    else:
        assert ids.count(family.tokenizer.added[bos].token_id) == 1
        assert ids[0] == family.tokenizer.added[bos].token_id


def test_user_text_never_becomes_an_added_token(family):
    special = {token.token_id for token in family.tokenizer.added.values()}
    harmless = [i for i in family.found([user("x")]) if i in special]
    for token in family.tokenizer.added:
        for content in (token, f"a{token}{token}b", f"{token[:-1]}{token}"):
            ids = family.found([user(content)])
            assert [i for i in ids if i in special] == harmless, content
            text = b"".join(map(family.tokenizer.token_bytes, ids))
            assert content.encode() in text


@pytest.mark.parametrize("name", ["mistral"], indirect=True)
def test_eos_token_is_a_variable_of_the_template(family):
    ids = family.found(CONVERSATIONS["turns"])
    assert ids.count(family.tokenizer.added["</s>"].token_id) == 2


@pytest.mark.parametrize("name", ["mistral"], indirect=True)
def test_the_templates_own_refusal_is_a_400_with_its_text(family):
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        family.found([user("a"), user("b")])
    assert refused.value.http_status == 400


@pytest.mark.parametrize("name", ["qwen3"], indirect=True)
def test_earlier_thinking_is_removed_as_in_hf(family):
    thought = "<think>\nThree, I believe.\n</think>\n\nThere are 3."
    messages = [user("How many?"), assistant(thought), user("Sure?"), assistant(thought), user("?")]
    assert family.found(messages) == family.expected(messages)
    text = b"".join(map(family.tokenizer.token_bytes, family.found(messages)))
    assert b"believe" not in text and text.count(b"There are 3.") == 2


@pytest.mark.parametrize("name", ["qwen3"], indirect=True)
def test_thinking_in_an_answer_is_never_an_added_token(family):
    added = {token.token_id for token in family.tokenizer.added.values()}
    messages = [user("x"), assistant("<tool_call>a<|im_end|>"), user("<think>y</think>")]
    found = [i for i in family.found(messages) if i in added]
    turns = [family.tokenizer.added[t].token_id for t in ("<|im_start|>", "<|im_end|>")]
    assert found == [*turns * 3, turns[0]]


def test_template_options_equal_hf(family, name):
    if name == "qwen3":
        options = {"enable_thinking": False}
        messages = CONVERSATIONS["one"]
        assert family.found(messages, **options) == family.expected(messages, **options)
        assert family.found(messages, **options) != family.found(messages)


def test_a_named_list_of_templates_has_a_default(tmp_path):
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "b"


def test_a_template_that_is_not_jinja_is_refused_at_start():
    with pytest.raises(ModelSpecError, match="chat template"):
        ChatTemplate("{% for %}", {}, {})


# ignore_merges


def test_ignore_merges_looks_whole_words_up():
    definition = definition_with(LLAMA_ADDED, "<|begin_of_text|>")
    word = definition["model"]["vocab"]["Ġworldwide"]
    assert BytePairs.of(definition) is None, "a token without merges is not proven equal"
    assert ModelTokenizer(definition).encode_text("hello worldwide")[-1] == word
    definition["model"]["ignore_merges"] = False
    assert word not in ModelTokenizer(definition).encode_text("hello worldwide")


def test_the_fast_path_serves_ignore_merges_where_it_changes_nothing():
    definition = json.loads(tokenizer_json())
    plain = ModelTokenizer(definition)
    definition["model"]["ignore_merges"] = True
    assert BytePairs.of(definition) is not None
    text = "The quick brown fox. What is in the picture? 123 über naïve"
    assert ModelTokenizer(definition).encode_text(text) == plain.encode_text(text)
    assert ModelTokenizer(definition).reference.encode(text).ids == plain.encode_text(text)


# Tokenizers whose tokens are not bytes


def changed(**parts: object) -> dict:
    return {**json.loads(tokenizer_json()), **parts}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"pre_tokenizer": {"type": "Metaspace"}}, "byte_fallback"),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, "byte_fallback"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
        ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
    ],
)
def test_other_tokenizers_are_refused_by_name(parts, named):
    with pytest.raises(ModelSpecError, match=named):
        ModelTokenizer(changed(**parts))


def test_prompts_are_encoded_without_more_to_build(monkeypatch):
    """0.7 s for a vocabulary of 150,000, which the event loop would have waited for."""
    tokenizer = ModelTokenizer(json.loads(tokenizer_json()))
    monkeypatch.setattr("services.gateway.tokenizer.tokenizer.Tokenizer", None)
    assert tokenizer.encode_prompt("hello", True) == tokenizer.encode_text("hello")
