"""A model's chat template: messages to text and added tokens, as transformers renders them.

A request's text must never become an added token, but the template writes its own added tokens
beside it. So before rendering, each string of the request is guarded with two noncharacters that do
not occur in the request. `break` is inserted into every added token in the string, and at an end of
the string that could form an added token with its neighbour. In an assistant's message, tokens that
are not special (`</think>`) get `quote` in front instead, because templates search for them there.
The output is then split at added tokens, except after `quote`, and both noncharacters are removed.

`PromptBuilder` renders with it. Messages that a template refuses are an `InvalidRequest`; a
template that is missing or not valid is a `ModelSpecError` at start.
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest
from services.common.model_spec import ModelSpecError, read_json
from services.gateway.tokenizer import AddedToken

# Noncharacters: valid in a string, assigned to nothing.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

_PROBE = "a late system message"

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages for one model. Thread-safe.

    Args:
        source: the Jinja template.
        special_tokens: `bos_token` and the like, by the names that templates use.
        added: the tokenizer's added tokens by content.

    Raises:
        ModelSpecError: the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        added: Mapping[str, AddedToken],
    ) -> None:
        environment = _environment()
        try:
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelSpecError(f"the chat template is not valid: {error}") from None
        self._special_tokens = dict(special_tokens)
        # An alternation takes the first that matches: the longest, as `tokenizers` does.
        self._contents = contents = sorted(added, key=len, reverse=True)
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._quotable = frozenset(c for c in contents if not added[c].special)
        self._heads = frozenset(c[:n] for c in contents for n in range(1, len(c)))
        self._tails = frozenset(c[n:] for c in contents for n in range(1, len(c)))
        self._max_part = max(map(len, contents), default=1) - 1

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether system messages after the first are rendered, not refused or left out."""
        user, first, late = (
            {"role": "user", "content": "u"}, {"role": "system", "content": "f"},
            {"role": "system", "content": _PROBE},
        )  # fmt: skip
        for messages in ((first, late, user), (user, late, user)):
            try:
                rendered = "".join(piece for piece, _ in self.render(messages, {}))
            except InvalidRequest:
                return False
            if _PROBE not in rendered:
                return False
        return True

    @classmethod
    def from_directory(cls, directory: Path, added: Mapping[str, AddedToken]) -> "ChatTemplate":
        """Reads a checkpoint directory.

        Raises:
            ModelSpecError: it has no chat template, or one that is not valid.
        """
        return cls(read_template(directory), read_special_tokens(directory), added)

    def render(
        self, messages: Sequence[Message], options: Mapping[str, object]
    ) -> Iterator[tuple[str, bool]]:
        """The prompt in pieces, in order.

        Args:
            messages: dicts of `role` and `content`; content is a string, or a list of
                `{"type": "text", "text": ...}` and `{"type": "image"}`.
            options: further variables of the template.

        Yields:
            A piece, and whether it is an added token.

        Raises:
            InvalidRequest: the template refuses the messages, or the text leaves no noncharacter.
        """
        text = "\0".join(message_texts(messages))
        free = list(islice((c for c in _NONCHARACTERS if c not in text), 2))
        if len(free) < 2:
            raise InvalidRequest(
                "the text uses too many noncharacters of Unicode", param="messages"
            )
        break_, quote = free
        guarded = [self._guard_message(message, break_, quote) for message in messages]
        try:
            rendered = self._template.render(
                **self._special_tokens,
                messages=guarded,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **options,
            )
        except (jinja2.TemplateError, TypeError) as error:
            reason = str(error) if isinstance(error, _Refusal) else "they do not fit it"
            raise InvalidRequest(
                f"the chat template refuses the messages: {reason}", param="messages"
            ) from None
        for index, piece in enumerate(self._added(quote).split(rendered)):
            if index % 2:
                yield piece, True
            elif text := piece.replace(break_, "").replace(quote, ""):
                yield text, False

    def _added(self, quote: str) -> re.Pattern[str]:
        """Matches added tokens, except after `quote`.

        The quote is looked for behind a token's first character: as the pattern's first element it
        would be tried at each character of the text.
        """
        if quote not in self._patterns:
            alternatives = (
                f"{re.escape(content[0])}(?<!{quote}.){re.escape(content[1:])}"
                for content in self._contents
            )
            pattern = "|".join(alternatives) or "(?!)"
            self._patterns[quote] = re.compile(f"({pattern})", re.DOTALL)
        return self._patterns[quote]

    def _guard_message(self, message: Message, break_: str, quote: str) -> dict[str, Any]:
        quotable = self._quotable if message["role"] == "assistant" else frozenset[str]()
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._guard(content, break_, quote, quotable)}
        parts = [
            {**part, "text": self._guard(part["text"], break_, quote, quotable)}
            if "text" in part
            else part
            for part in content
        ]
        return {**message, "content": parts}

    def _guard(self, text: str, break_: str, quote: str, quotable: frozenset[str]) -> str:
        def guard_token(match: re.Match[str]) -> str:
            token = match[0]
            return quote + token if token in quotable else token[0] + break_ + token[1:]

        added, guarded = self._added(quote), text
        while added.search(guarded):  # again: added tokens may overlap
            guarded = added.sub(guard_token, guarded)
        size = min(len(text), self._max_part)
        if any(text[:n] in self._tails for n in range(1, size + 1)):
            guarded = break_ + guarded
        if any(text[-n:] in self._heads for n in range(1, size + 1)):
            guarded += break_
        return guarded


def message_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Every string of the messages' contents."""
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if "text" in part)


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


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers configures it for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
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
