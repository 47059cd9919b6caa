r"""Strings that know which of their characters the chat template wrote.

A chat template writes added tokens (`<|im_end|>`) beside the text of a request, which must never
become an added token. Nothing can be put into the text to keep the two apart, because templates
search in the text and cut it. A `TracedText` is the text itself, with a *shadow* beside it: a
string of the same length that has the template's characters in their places, and `BLANK` in the
place of each character of the request:

    text    <|im_start|>user\nHello<|im_end|>
    shadow  <|im_start|>user\n·····<|im_end|>

An added token that is found in the shadow was written by the template. Methods and operators of a
traced text return traced texts. If a method cannot know where the characters of its result come
from, all of them count as the request's. A plain `str` counts as the template's.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, cast

# Character in place of the request's characters in shadows. It is in no added token, is no white
# space, and has no upper or lower case.
BLANK = "\0"
_RUN_OF_TEMPLATE = re.compile(f"[^{BLANK}]+")


def request_text(text: str) -> str:
    """Returns a traced text that counts as the request's."""
    return _traced(text, BLANK * len(text))


def template_text(text: str) -> "TracedText":
    """Returns a traced text that counts as the template's."""
    return _new(text, text)


def shadow_of(text: str) -> str:
    """Returns the shadow of a text. Other subclasses of `str` count as the request's."""
    kind = type(text)
    if kind is str:
        return text
    if kind is TracedText:
        return cast("TracedText", text)._shadow  # pyright: ignore[reportPrivateUsage]
    return BLANK * len(text)


def concatenate(parts: Iterable[str]) -> str:
    """Returns the concatenation of texts."""
    items = list(parts)
    return _traced("".join(items), "".join(map(shadow_of, items)))


def format_traced(
    format_text: Callable[..., str],
    format_shadow: Callable[..., str],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> str:
    """Returns a formatted text.

    Args:
        format_text: the formatting operation of the format's text.
        format_shadow: the same operation of the format's shadow.
        args: positional arguments of the operation.
        kwargs: named arguments of the operation.
    """
    text = str.__str__(format_text(*args, **kwargs))
    try:
        shadow = format_shadow(*_shadowed(args), **_shadowed(kwargs))
    except (TypeError, ValueError, LookupError, AttributeError):
        return request_text(text)
    runs = _RUN_OF_TEMPLATE.finditer(shadow)
    is_aligned = len(shadow) == len(text) and all(text.startswith(r[0], r.start()) for r in runs)
    return _traced(text, shadow) if is_aligned else request_text(text)


def _traced(text: str, shadow: str) -> str:
    """Returns a text with its shadow. If all of it is the template's, this is a plain string."""
    return text if text == shadow else _new(text, shadow)


def _new(text: str, shadow: str) -> "TracedText":
    """Makes a traced text. A constructor of the class would take twice as long."""
    found = TracedText(text)
    found._shadow = shadow  # pyright: ignore[reportPrivateUsage]
    return found


def _shadowed(value: Any) -> Any:  # noqa: ANN401
    """Returns arguments of a formatting operation with shadows in the place of texts."""
    if isinstance(value, str):
        return shadow_of(value)
    if isinstance(value, tuple):
        return tuple(map(_shadowed, cast("tuple[object, ...]", value)))
    if isinstance(value, list):
        return list(map(_shadowed, cast("list[object]", value)))
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return {key: _shadowed(item) for key, item in items}
    return value


class TracedText(str):
    """A text and its shadow. `request_text` and `template_text` make one."""

    __slots__ = ("_shadow",)

    _shadow: str

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return map(_traced, str.__iter__(self), self._shadow)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return _traced(str.__getitem__(self, key), self._shadow[key])

    def __add__(self, other: str) -> str:
        if type(other) not in (str, TracedText):
            return NotImplemented  # `Markup` has to escape this text.
        return _traced(str.__add__(self, other), self._shadow + shadow_of(other))

    def __radd__(self, other: str) -> str:
        return _traced(str.__add__(other, self), shadow_of(other) + self._shadow)

    def __mul__(self, count: SupportsIndex) -> str:
        return _traced(str.__mul__(self, count), self._shadow * count)

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def __mod__(self, values: Any) -> str:  # noqa: ANN401
        format_text = super().__mod__
        return format_traced(format_text, self._shadow.__mod__, (values,), {})

    # Methods whose result consists of pieces of the text

    def strip(self, chars: str | None = None, /) -> str:
        text = str.strip(self, chars)
        start = len(self) - len(str.lstrip(self, chars))
        return _traced(text, self._shadow[start : start + len(text)])

    def lstrip(self, chars: str | None = None, /) -> str:
        text = str.lstrip(self, chars)
        return _traced(text, self._shadow[len(self) - len(text) :])

    def rstrip(self, chars: str | None = None, /) -> str:
        text = str.rstrip(self, chars)
        return _traced(text, self._shadow[: len(text)])

    def removeprefix(self, prefix: str, /) -> str:
        text = str.removeprefix(self, prefix)
        return _traced(text, self._shadow[len(self) - len(text) :])

    def removesuffix(self, suffix: str, /) -> str:
        text = str.removesuffix(self, suffix)
        return _traced(text, self._shadow[: len(text)])

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(str.splitlines(self, True), "")
        ends = map(len, str.splitlines(self, keepends))
        return [line[:end] for line, end in zip(lines, ends, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._located(str.partition(self, sep), "")
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._located(str.rpartition(self, sep), "")
        return head, middle, tail

    def _located(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """Returns pieces of the text, in order, with their shadows.

        Args:
            pieces: the pieces as plain strings.
            sep: the text between two pieces. None if it is any white space.
        """
        return list(map(_traced, pieces, self._shadows(pieces, sep)))

    def _shadows(self, pieces: Sequence[str], sep: str | None) -> Iterator[str]:
        start = 0
        for piece in pieces:
            if sep is None:
                start = str.find(self, piece, start)
            end = start + len(piece)
            yield self._shadow[start:end]
            start = end if sep is None else end + len(sep)

    # Methods that put texts together

    def join(self, parts: Iterable[str], /) -> str:
        items = list(parts)
        return _traced(str.join(self, items), self._shadow.join(map(shadow_of, items)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        text = str.replace(self, old, new, count)
        if not old:
            return _traced(text, self._shadow.replace("", shadow_of(new), count))
        shadows = self._shadows(str.split(self, old, count), old)
        return _traced(text, shadow_of(new).join(shadows))

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        text = str.center(self, width, fillchar)
        return _traced(text, self._shadow.center(width, shadow_of(fillchar)))

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        text = str.ljust(self, width, fillchar)
        return _traced(text, self._shadow.ljust(width, shadow_of(fillchar)))

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        text = str.rjust(self, width, fillchar)
        return _traced(text, self._shadow.rjust(width, shadow_of(fillchar)))

    # Methods that change characters

    def capitalize(self) -> str:
        return self._changed(str.capitalize(self))

    def casefold(self) -> str:
        return self._changed(str.casefold(self))

    def lower(self) -> str:
        return self._changed(str.lower(self))

    def swapcase(self) -> str:
        return self._changed(str.swapcase(self))

    def title(self) -> str:
        return self._changed(str.title(self))

    def upper(self) -> str:
        return self._changed(str.upper(self))

    def _changed(self, text: str) -> str:
        """Returns a text that has one or more characters in place of each character of this text,
        with its shadow.
        """
        if len(text) != len(self) or not self._shadow.strip(BLANK):
            return self._rewritten(text)
        shadow = _RUN_OF_TEMPLATE.sub(lambda run: text[run.start() : run.end()], self._shadow)
        return _traced(text, shadow)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        return self._rewritten(str.expandtabs(self, tabsize))

    def zfill(self, width: SupportsIndex, /) -> str:
        return self._rewritten(str.zfill(self, width))

    def translate(self, table: Any, /) -> str:  # noqa: ANN401
        return request_text(str.translate(self, table))

    def _rewritten(self, text: str) -> str:
        """Returns the result of an operation that cannot be repeated on the shadow. All of it
        counts as the request's, if this text has any character of the request.
        """
        return text if self._shadow == self else request_text(text)
