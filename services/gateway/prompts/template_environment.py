"""Jinja as transformers configures it for chat templates, with operations that keep traces.

A template sees the same strings as in transformers, and writes the same text. The result of
rendering is a traced text (`traced_text.py`), which knows which characters come from the request.
Jinja's own operations turn traced texts into plain strings, so the environment replaces them: the
output of expressions, concatenation, `%`, methods of plain strings, and filters. If a filter cannot
keep traces and one of its arguments may have text of the request, its whole result counts as text
of the request.

Numbers are not traced: a template may write a number of the request into the name of a token.
"""

import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.visitor
from jinja2.filters import do_replace, make_attrgetter, sync_do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from services.gateway.prompts.traced_text import (
    TracedText,
    concatenate,
    format_traced,
    request_text,
    shadow_of,
    template_text,
)

# A filter or a global function of a template.
Function = Callable[..., Any]
# Filters that call a method of their first argument.
_TEXT_FILTERS = ("capitalize", "center", "format", "lower", "trim", "upper")
# Filters that make no new text: they return an argument, elements of an argument, or a number.
_OTHER_FILTERS = (
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "max",
    "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique",
)  # fmt: skip


class TemplateRefusal(jinja2.TemplateError):
    """Raised by the template's `raise_exception`."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    concat = staticmethod(concatenate)
    intercepted_binops = frozenset("%")

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_text_of,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        filters: dict[str, Function] = cast(Any, self).filters
        for name in filters.keys() - _OTHER_FILTERS:
            keep_traces = _on_text if name in _TEXT_FILTERS else _guarded
            filters[name] = keep_traces(filters[name])
        filters |= {"join": _join, "replace": _replace}
        filters |= {"string": _text_of, "tojson": _guarded(_to_json)}
        names: dict[str, Any] = cast(Any, self).globals
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _guarded(_strftime_now)

    def compile_tree(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Compiles a template that `parse` has returned."""
        tree = _JoinedConcatenations().visit(tree)
        tree.set_environment(self)
        template = self.from_string(tree)
        # Each rendering copies the global names. Jinja keeps them in a `ChainMap`, whose copy takes
        # a third of the time of a short prompt.
        cast(Any, template).globals = dict(template.globals)
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401
        kind = cast("type[object]", type(obj))
        if kind not in _TEXTS:
            return super().getattr(obj, attribute)
        if kind is not str and kind is not TracedText:
            found = super().getattr(obj, attribute)
            return _returning_request_text(found) if callable(found) else found
        if attribute not in ("format", "format_map"):
            return super().getattr(template_text(obj) if kind is str else obj, attribute)
        format_text = super().getattr(str.__str__(obj), attribute)
        format_shadow = super().getattr(shadow_of(obj), attribute)

        def call(*args: object, **kwargs: object) -> str:
            return format_traced(format_text, format_shadow, args, kwargs)

        return call

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401
        if type(obj) in _TEXTS and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: object,
        right: object,
    ) -> Any:  # noqa: ANN401
        left = template_text(left) if type(left) is str else left
        return super().call_binop(context, operator, left, right)


class _RequestMarkup(Markup):
    """Text that HTML filters have made. All of it counts as text of the request."""

    __slots__ = ()

    def __str__(self) -> str:
        return request_text(str.__str__(self))

    def __iter__(self) -> Iterator[str]:
        return map(request_text, str.__iter__(self))


_TEXTS = frozenset((str, TracedText, Markup, _RequestMarkup, bytes))
# Types of arguments that cannot have text of a request.
_PLAIN = frozenset(
    (
        str, int, float, bool, type(None), jinja2.Undefined, jinja2.nodes.EvalContext,
        jinja2.runtime.Context, TemplateEnvironment,
    )
)  # fmt: skip


def _text_of(value: object) -> str:
    """Returns the text that a template writes for a value."""
    if isinstance(value, str):
        return value if type(value) is not Markup else _RequestMarkup(value)
    return str(value) if type(value) in _PLAIN else request_text(str(value))


def _as_traced(value: object) -> str:
    """Returns the text of a value, with the methods of traced texts or of Markup."""
    text = _text_of(value)
    return template_text(text) if type(text) is str else text


def _on_text(function: Function) -> Function:
    """Makes a filter keep traces, because it calls a method of its first argument."""

    @wraps(function)
    def call(value: object, *args: object, **kwargs: object) -> str:
        return function(_as_traced(value), *args, **kwargs)

    return call


def _guarded(function: Function) -> Function:
    """Wraps a function: if it returns a plain string and an argument may have text of the request,
    the string counts as text of the request.
    """

    @wraps(function)
    def call(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        found = function(*args, **kwargs)
        if isinstance(found, Markup):
            return _RequestMarkup(found)
        if type(found) is not str or all(type(a) in _PLAIN for a in (*args, *kwargs.values())):
            return found
        return request_text(found)

    return call


def _returning_request_text(function: Function) -> Function:
    """Wraps a function: if it returns a plain string, the string counts as text of the request."""

    @wraps(function)
    def call(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        found = function(*args, **kwargs)
        return request_text(found) if type(found) is str else found

    return call


@jinja2.pass_eval_context
def _join(
    context: jinja2.nodes.EvalContext,
    value: Iterable[object],
    d: object = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return sync_do_join(context, map(_text_of, value), _as_traced(d))


@jinja2.pass_eval_context
def _replace(
    context: jinja2.nodes.EvalContext,
    s: object,
    old: str,
    new: object,
    count: int | None = None,
) -> str:
    return do_replace(context, _as_traced(s), old, _text_of(new), count)


class _JoinedConcatenations(jinja2.visitor.NodeTransformer):
    """Writes `a ~ b` as `[a, b] | join`, which has the same result."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        line = node.lineno
        values = jinja2.nodes.List(node.nodes, lineno=line)
        return jinja2.nodes.Filter(values, "join", [], [], None, None, lineno=line)


class _Generation(jinja2.ext.Extension):
    """The tags `{% generation %}` … `{% endgeneration %}`, by which trainers find the text that the
    model writes. Here they have no effect.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


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
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
