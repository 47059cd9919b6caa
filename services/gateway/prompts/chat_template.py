"""A model's chat template, which turns messages into text and added tokens as transformers does.

The template writes added tokens, such as `<|im_end|>`, beside the text of the request. The same
characters in the request's text must never become an added token. Each string of the request
(messages, tools, options) is therefore a traced text (`traced_text.py`) while the template is
rendered. The result has a shadow in which the request's characters are blank, so an added token
that is found in the shadow was written by the template.

`PromptBuilder` calls `ChatTemplate.render`. If the template refuses the messages, it raises an
`InvalidRequest`. A template that is missing or not valid is a `ModelSpecError` at start.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.meta
import jinja2.nodes

from services.common.errors import InvalidRequest
from services.common.model_spec import ModelSpecError, read_json
from services.gateway.forms.tools import strings_of
from services.gateway.media.images import ImageSource
from services.gateway.media.videos import VideoSource
from services.gateway.prompts.template_environment import TemplateEnvironment, TemplateRefusal
from services.gateway.prompts.traced_text import BLANK, request_text, shadow_of
from services.gateway.tokenizer.tokenizer import AddedToken

_SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

# Writes messages one after the other. It stands for the template of models for search, which have
# prompts of their own, and whose checkpoints need not have a chat template.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
_PROBE = "a late system message"
# Variables that a request may not set.
RESERVED = frozenset(
    (
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner",
        "namespace", *_SPECIAL_TOKEN_NAMES,
    )
)  # fmt: skip
# Words of the API with which templates compare. They stay plain strings.
_TYPES = frozenset(("text", "image", "video", "function"))
# The text that transformers appends to a message that is to be continued. Its last character shows
# whether the template trims.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
# Exceptions of rendering that mean that the messages are not those that the template expects.
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The input of a chat template.

    Attributes:
        messages: dicts with `role`, `content`, and optionally `tool_calls`, `tool_call_id`, `name`
            and `reasoning_content`. The content is a string, or a list of
            `{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`.
        tools: definitions in OpenAI's shape. None if the request has no tools.
        options: values of the template's other variables, such as `enable_thinking`.
        add_generation_prompt: True if the prompt ends with the beginning of the model's turn.
        continue_final_message: True if the prompt ends with the text of the last message, which the
            model then continues.
        ignored: names of the request's fields that have no effect on this model's answers.
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
        """All strings of the request that the template may write, joined by NUL characters."""
        return "\0".join(strings_of([*self.messages, *(self.tools or ()), self.options]))


class ChatTemplate:
    """Renders messages for one model. Thread-safe.

    Args:
        source: the Jinja template.
        special_tokens: special tokens by the names that templates use, such as `bos_token`.
        added: the tokenizer's added tokens by content.

    Attributes:
        variables: names of the variables that a request may set.
        takes_tools: True if the template writes tools.

    Raises:
        ModelSpecError: the template is not valid Jinja.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], added: Mapping[str, AddedToken]
    ) -> None:
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self.variables = jinja2.meta.find_undeclared_variables(tree) - RESERVED
            self.takes_tools = any(n.name == "tools" for n in tree.find_all(jinja2.nodes.Name))
            self._template = environment.compile_tree(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ModelSpecError(f"the chat template is not valid: {error}") from None
        self._special_tokens = dict(special_tokens)
        # Longer tokens come first, because a regular expression takes the first alternative that
        # matches, and `tokenizers` takes the longest token.
        contents = sorted((c for c in added if BLANK not in c), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        self.source = source

    @cached_property
    def takes_late_system(self) -> bool:
        """Returns whether the template renders system messages that are not the first message."""
        user, first, late = (
            {"role": "user", "content": "u"},
            {"role": "system", "content": "f"},
            {"role": "system", "content": _PROBE},
        )
        probes = (first, late, user), (user, late, user)
        return all(_PROBE in "".join(p for p, _ in self.probed(*probe)) for probe in probes)

    def probed(self, *messages: Message) -> list[tuple[str, bool]]:
        """Returns the pieces of a prompt made of some messages, to find out what the template does
        with them. Empty if the template refuses them.
        """
        try:
            return list(self.render(Conversation(messages=messages, options={})))
        except InvalidRequest:
            return []

    @classmethod
    def from_directory(
        cls, directory: Path, added: Mapping[str, AddedToken], file: Path | None = None
    ) -> "ChatTemplate":
        """Reads a checkpoint directory.

        Args:
            file: file with a template to use instead of the checkpoint's.

        Raises:
            ModelSpecError: the directory has no chat template, or the template is not valid.
            OSError: `file` cannot be read.
        """
        source = read_template(directory) if file is None else file.read_text(encoding="utf-8")
        return cls(source, read_special_tokens(directory), added)

    def render(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """Yields the prompt in pieces, in order.

        Yields:
            A piece, and True if the piece is an added token that the template has written.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        messages = [_traced_message(message) for message in conversation.messages]
        if conversation.continue_final_message:
            place, key = _text_part(messages[-1])
            place[key] += _CONTINUED
        try:
            rendered = self._template.render(
                **self._special_tokens,
                messages=messages,
                add_generation_prompt=conversation.add_generation_prompt,
                tools=_traced(conversation.tools) if conversation.tools else None,
                documents=None,
                **{name: _traced(value) for name, value in conversation.options.items()},
            )
        except _REFUSALS as error:
            reason = str(error) if isinstance(error, TemplateRefusal) else "they do not fit it"
            raise InvalidRequest(
                f"the chat template refuses the messages: {reason}", param="messages"
            ) from None
        text, shadow = str.__str__(rendered), shadow_of(rendered)
        if conversation.continue_final_message:
            text = _cut(text, conversation.messages[-1])
        start = 0
        for match in self._added.finditer(shadow, 0, len(text)):
            if match.start() > start:
                yield text[start : match.start()], False
            yield match[0], True
            start = match.end()
        if start < len(text):
            yield text[start:], False


def _traced_message(message: Message) -> dict[str, Any]:
    return {name: value if name == "role" else _traced(value) for name, value in message.items()}


def _traced(value: object) -> Any:  # noqa: ANN401
    """Returns a JSON value with traced texts in place of strings, except for values of `type`."""
    if isinstance(value, str):
        return request_text(value)
    if isinstance(value, Mapping):
        return {
            request_text(key): item
            if key == "type" and isinstance(item, str) and item in _TYPES
            else _traced(item)
            for key, item in cast("Mapping[str, object]", value).items()
        }
    if isinstance(value, Sequence):
        return list(map(_traced, cast("Sequence[object]", value)))
    return value


def _text_part(message: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the place of a message's text, or of its last text part, as an object and a key.

    Raises:
        InvalidRequest: the message has no text.
    """
    if isinstance(message["content"], str):
        return message, "content"
    for part in reversed(message["content"]):
        if "text" in part:
            return part, "text"
    raise InvalidRequest("the last message has no text", param="continue_final_message")


def _cut(rendered: str, message: Message) -> str:
    """Returns the prompt up to the end of the last message's text.

    Raises:
        InvalidRequest: the template has left the text out, or changed it.
    """
    place, key = _text_part(message)
    end = rendered.rfind(_CONTINUED.strip())
    if end < 0 or place[key].strip() not in rendered:
        raise InvalidRequest(
            "the chat template leaves out or changes the last message's text",
            param="continue_final_message",
        )
    if rendered.startswith(_CONTINUED, end):
        return rendered[:end]
    return rendered[:end].rstrip()  # The template has trimmed the text.


def read_template(directory: Path) -> str:
    """Returns the chat template of a checkpoint, from chat_template.jinja, chat_template.json or
    tokenizer_config.json. The first of these files that has a template counts.

    Raises:
        ModelSpecError: no file has a chat template.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        if not path.exists():
            continue
        template = read_json(path).get("chat_template")
        if isinstance(template, list):  # The file has several templates, by name.
            named = cast("list[dict[str, str]]", template)
            template = {entry["name"]: entry["template"] for entry in named}.get("default")
        if isinstance(template, str):
            return template
    raise ModelSpecError(f"{directory} has no chat template")


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json by name, such as `bos_token`.

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
