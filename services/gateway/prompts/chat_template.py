"""A model's chat template: messages to text and added tokens, as transformers renders them.

A request's text must never become an added token, but the template writes its own added tokens
beside it. So before rendering, each string of the request (messages, tools, options) is guarded
with two noncharacters that do not occur in the request. `break` is inserted into every added token
in the string, and at an end of the string that could form an added token with its neighbour. In an
assistant's message, tokens that are not special (`</think>`) get `quote` in front instead, because
templates search for them there. The output is then split at added tokens, except after `quote`, and
both noncharacters are removed.

`PromptBuilder` renders with it. Messages that a template refuses are an `InvalidRequest`; a
template that is missing or not valid is a `ModelSpecError` at start.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest
from services.common.model_spec import ModelSpecError, read_json
from services.gateway.forms.tools import strings_of
from services.gateway.media.images import ImageSource
from services.gateway.media.videos import VideoSource
from services.gateway.tokenizer.tokenizer import AddedToken

# Noncharacters: valid in a string, assigned to nothing.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

_PROBE = "a late system message"
# Variables that are not a request's to set.
RESERVED = frozenset(
    (
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner",
        "namespace", *_SPECIAL_TOKEN_NAMES,
    )
)  # fmt: skip
# Words of the API that templates compare with.
_TYPES = frozenset(("text", "image", "video", "function"))
# What HF appends to a message that is to be continued: the blank shows whether the template trims.
_BLANK = " "

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template takes.

    Attributes:
        messages: dicts of `role` and `content`; content is a string, or a list of
            `{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`. Further:
            `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
        tools: definitions in OpenAI's shape; None: none.
        options: further variables of the template.
        add_generation_prompt: the prompt ends with the beginning of the model's turn.
        continue_final_message: it ends with the last message's text instead.
        ignored: fields of the request that change no answer of this model.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, object]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()
    ignored: Sequence[str] = ()

    @cached_property
    def text(self) -> str:
        """Every string of the request that the template may write, with NULs between them."""
        return "\0".join(strings_of([*self.messages, *(self.tools or ()), self.options]))


class ChatTemplate:
    """Renders messages for one model. Thread-safe.

    Args:
        source: the Jinja template.
        special_tokens: `bos_token` and the like, by the names that templates use.
        added: the tokenizer's added tokens by content.

    Attributes:
        variables: names that a request's options may set.
        takes_tools: the template writes tools.

    Raises:
        ModelSpecError: the template is not valid Jinja.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], added: Mapping[str, AddedToken]
    ) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.variables = jinja2.meta.find_undeclared_variables(tree) - RESERVED
            self.takes_tools = any(n.name == "tools" for n in tree.find_all(jinja2.nodes.Name))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelSpecError(f"the chat template is not valid: {error}") from None
        self._special_tokens = dict(special_tokens)
        # An alternation takes the first that matches: the longest, as `tokenizers` does.
        self._contents = contents = sorted(added, key=len, reverse=True)
        self.added: Callable[[str], re.Pattern[str]] = cache(self._added)
        self.source = source
        # Of the guard: tokens that may be quoted, and what parts of tokens look like.
        self.quotable = frozenset(c for c in contents if not added[c].special)
        self.heads = frozenset(c[:n] for c in contents for n in range(1, len(c)))
        self.tails = frozenset(c[n:] for c in contents for n in range(1, len(c)))
        self.max_part = max(map(len, contents), default=1) - 1
        self.edges = frozenset(character for c in contents for character in (c[0], c[-1]))

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether system messages after the first are rendered, not refused or left out."""
        user, first, late = (
            {"role": "user", "content": "u"}, {"role": "system", "content": "f"},
            {"role": "system", "content": _PROBE},
        )  # fmt: skip
        probes = (first, late, user), (user, late, user)
        return all(_PROBE in "".join(p for p, _ in self.probed(*probe)) for probe in probes)

    def probed(self, *messages: Message) -> list[tuple[str, bool]]:
        """The pieces of such messages; none: they are refused."""
        try:
            return list(self.render(Conversation(messages=messages, options={})))
        except InvalidRequest:
            return []

    @classmethod
    def from_directory(cls, directory: Path, added: Mapping[str, AddedToken]) -> "ChatTemplate":
        """Reads a checkpoint directory.

        Raises:
            ModelSpecError: it has no chat template, or one that is not valid.
        """
        return cls(read_template(directory), read_special_tokens(directory), added)

    def render(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """The prompt in pieces, in order.

        Yields:
            A piece, and whether it is an added token.

        Raises:
            InvalidRequest: the template refuses the messages, or the text leaves no noncharacter.
        """
        free = list(islice((c for c in _NONCHARACTERS if c not in conversation.text), 3))
        if len(free) < 3:
            raise InvalidRequest(
                "the text uses too many noncharacters of Unicode", param="messages"
            )
        break_, quote, mark = free
        guard = _Guard(self, break_, quote)
        messages = [guard.message(message) for message in conversation.messages]
        if conversation.continue_final_message:
            _append(messages[-1], mark + _BLANK)
        try:
            rendered = self._template.render(
                **self._special_tokens,
                messages=messages,
                add_generation_prompt=conversation.add_generation_prompt,
                tools=guard.value(conversation.tools) if conversation.tools else None,
                documents=None,
                **{name: guard.value(value) for name, value in conversation.options.items()},
            )
        except _REFUSALS as error:
            reason = str(error) if isinstance(error, _Refusal) else "they do not fit it"
            raise InvalidRequest(
                f"the chat template refuses the messages: {reason}", param="messages"
            ) from None
        if conversation.continue_final_message:
            rendered = _cut(rendered, mark)
        for index, piece in enumerate(self.added(quote).split(rendered)):
            if index % 2:
                yield piece, True
            elif text := piece.replace(break_, "").replace(quote, ""):
                yield text, False

    def _added(self, quote: str) -> re.Pattern[str]:
        """Matches added tokens, except after `quote`.

        The quote is looked for behind a token's first character: as the pattern's first element it
        would be tried at each character of the text.
        """
        alternatives = (
            f"{re.escape(content[0])}(?<!{quote}.){re.escape(content[1:])}"
            for content in self._contents
        )
        return re.compile(f"({'|'.join(alternatives) or '(?!)'})", re.DOTALL)


class _Guard:
    """Guards the strings of one request."""

    def __init__(self, template: ChatTemplate, break_: str, quote: str) -> None:
        self._template = template
        self._added = template.added(quote)
        self._break = break_
        self._quote = quote

    def message(self, message: Message) -> dict[str, Any]:
        """A message; the text of an assistant's may hold tokens that are not special."""
        quotable = self._template.quotable if message["role"] == "assistant" else frozenset[str]()
        return {
            name: value if name == "role" else self.value(value, quotable)
            for name, value in message.items()
        }

    def value(self, value: object, quotable: frozenset[str] = frozenset()) -> Any:  # noqa: ANN401
        """A JSON value, with the keys of its objects; `type` is a word of the API."""
        if isinstance(value, str):
            return self._string(value, quotable)
        if isinstance(value, Mapping):
            return {
                self._string(key, frozenset()): item
                if key == "type" and isinstance(item, str) and item in _TYPES
                else self.value(item, quotable)
                for key, item in cast("Mapping[str, object]", value).items()
            }
        if isinstance(value, Sequence):
            return [self.value(item, quotable) for item in cast("Sequence[object]", value)]
        return value

    def _string(self, text: str, quotable: frozenset[str]) -> str:
        template, break_ = self._template, self._break
        if not any(character in text for character in template.edges):
            return text

        def guard_token(match: re.Match[str]) -> str:
            token = match[0]
            return self._quote + token if token in quotable else token[0] + break_ + token[1:]

        guarded = text
        while self._added.search(guarded):  # again: added tokens may overlap
            guarded = self._added.sub(guard_token, guarded)
        size = min(len(text), template.max_part)
        if any(text[:n] in template.tails for n in range(1, size + 1)):
            guarded = break_ + guarded
        if any(text[-n:] in template.heads for n in range(1, size + 1)):
            guarded += break_
        return guarded


def _append(message: dict[str, Any], text: str) -> None:
    """Appends to a message's text, or to its last text part."""
    if isinstance(message["content"], str):
        message["content"] += text
        return
    for part in reversed(message["content"]):
        if "text" in part:
            part["text"] += text
            return
    raise InvalidRequest("the last message has no text", param="continue_final_message")


def _cut(rendered: str, mark: str) -> str:
    """The prompt up to the mark; blanks before it go if the template trimmed those after it."""
    end = rendered.rfind(mark)
    if end < 0:
        raise InvalidRequest(
            "the chat template leaves out the last message", param="continue_final_message"
        )
    is_trimmed = rendered[end + 1 : end + 2] != _BLANK
    return rendered[:end].rstrip() if is_trimmed else rendered[:end]


def read_template(directory: Path) -> str:
    """The chat template: chat_template.jinja, else chat_template.json or tokenizer_config.json.

    Raises:
        ModelSpecError: there is none.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        if not path.exists():
            continue
        template = read_json(path).get("chat_template")
        if isinstance(template, list):  # several, by name
            named = cast("list[dict[str, str]]", template)
            template = {entry["name"]: entry["template"] for entry in named}.get("default")
        if isinstance(template, str):
            return template
    raise ModelSpecError(f"{directory} has no chat template")


def read_special_tokens(directory: Path) -> dict[str, str]:
    """`bos_token` and the like, from tokenizer_config.json: a string each, or a dict with one.

    Raises:
        ModelSpecError: the file is malformed.
    """
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = cast("dict[str, Any]", token).get("content")
        if isinstance(token, str):
            found[name] = token
    return found


class _Refusal(jinja2.TemplateError):
    """Raised by the template's `raise_exception`."""


# What rendering raises if the messages are not what the template expects.
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`, around what the model writes: trainers look for
    it, and it is rendered as if the tags were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers configures it for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    filters: dict[str, Any] = cast(Any, environment).filters
    filters["tojson"] = _to_json
    names: dict[str, Any] = cast(Any, environment).globals
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
