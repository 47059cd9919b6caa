"""The grammar of an answer that has to hold a call, or may hold only right ones.

`PromptBuilder` asks for it once the request's tools and the prompt's end are known. A call is
written as the model's template writes it, with the function's JSON schema for its arguments; the
parser of the form reads it back. `required` and named choices begin with a call; with strict
functions text is free, and what begins as a call has to become one. Reasoning stays free.

The text is Lark in llguidance's dialect, where `<[id]>` is a token and `%json` a schema. Added
tokens, such as a call's tags, are never part of a regular expression's text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from services.common.errors import InvalidGrammar, InvalidRequest
from services.common.schema_formats import strip_unknown_formats
from services.gateway.answers.answer import AnswerFormat, ToolCalls
from services.gateway.answers.argument_values import Schema, resolve, types_of
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.reasoning import CLOSE, OPEN
from services.gateway.answers.tool_parsers import (
    CallParser,
    HermesParser,
    Llama3JsonParser,
    Qwen3CoderParser,
)
from services.gateway.forms.tools import FunctionDefinition, check_nesting
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# As templates write arguments: Python's JSON.
_CALL_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANSWER_STYLE = {"whitespace_pattern": r"[ ]?|\n[ ]{0,40}"}
_BREAK = r"/\n{0,2}/"  # after the closing tag, as models write it
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)  # and escaped characters, which stay
_ANNOTATIONS = {
    "$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title",
    "writeOnly",
}  # fmt: skip
_ROOT = {"$defs", "additionalProperties", "definitions", "properties", "required", "type"}
_SCALARS = {"string", "null", "boolean", "integer", "number"}


def answer_grammar(
    asked: Grammar | None, answer_format: AnswerFormat, tokenizer: ModelTokenizer
) -> Grammar | None:
    """What an answer has to be, with its calls; None: it is free.

    Args:
        asked: by `response_format` or `structured_outputs`: of an answer without a call.
        answer_format: reasoning and calls.
        tokenizer: of the model.

    Raises:
        InvalidRequest: a schema or an option cannot be held to; `param` names it.
    """
    calls = answer_format.tool_calls
    if calls is not None and (calls.use.is_constrained or asked is not None):
        writer = _Writer(tokenizer, calls)
        body, rules, param = writer.body(asked), writer.rules, writer.param
    elif asked is None or not answer_format.thinks:
        return asked
    elif answer_format.reasoning == "open" or asked.kind == "grammar":
        return replace(asked, begins_after=_end_of_reasoning(tokenizer))
    else:
        body, rules, param = "answer", [f"answer: {_answer(asked)}"], asked.param
    begins_after: tuple[int, ...] = ()
    start, end = (tokenizer.added.get(name) for name in (OPEN, CLOSE))
    if answer_format.thinks and (answer_format.reasoning == "open" or not (start and end)):
        body, begins_after = f"{_BREAK} ({body})", _end_of_reasoning(tokenizer)
    elif answer_format.thinks and start and end:
        # A grammar that waits for the closing tag never begins if the model does not think.
        body = f"(<[{start.token_id}]> TEXT <[{end.token_id}]> {_BREAK})? ({body})"
    text = "\n".join([f"start: {body}", *rules, r"TEXT: /(.|\n)*/"])
    return Grammar("grammar", text, param, begins_after)


def _end_of_reasoning(tokenizer: ModelTokenizer) -> tuple[int, ...]:
    added = tokenizer.added.get(CLOSE)
    return (added.token_id,) if added is not None else tuple(tokenizer.encode_text(CLOSE))


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that may be called, and its place in the request."""

    definition: FunctionDefinition
    param: str

    @property
    def is_strict(self) -> bool:
        return bool(self.definition.strict)

    def style(self) -> dict[str, object]:
        """Of the arguments' JSON; a function that is not strict may have unknown keywords."""
        return {**_CALL_STYLE, "lenient": not self.is_strict}

    def schema(self) -> dict[str, Any]:
        """Of the arguments: an object, with the named properties alone unless it says otherwise."""
        given = self.definition.parameters
        schema = {"additionalProperties": False} if given is None else dict(given)
        if schema.get("type", "object") != "object":
            raise InvalidGrammar("not the schema of an object", param=f"{self.param}.type")
        open_ended = {
            "patternProperties",
            "unevaluatedProperties",
            "anyOf",
            "oneOf",
            "allOf",
            "$ref",
        }
        if "properties" in schema and not open_ended & schema.keys():
            schema.setdefault("additionalProperties", False)
        return {**schema, "type": "object"}

    def refuse(self, path: str, what: str) -> None:
        """Refuses what the form of calls cannot hold the model to, if that was promised."""
        if self.is_strict:
            raise InvalidGrammar(
                f"{what} is not supported with strict in the model's form of calls",
                param=f"{self.param}{path}",
            )


class _Writer:
    """Rules of one request's calls.

    Attributes:
        rules: so far.
        param: of a schema that the decoder refuses.
    """

    def __init__(self, tokenizer: ModelTokenizer, calls: ToolCalls) -> None:
        self.rules: list[str] = []
        self._tokenizer = tokenizer
        self._parser = calls.parser
        self._use = use = calls.use
        self._functions = [
            _Function(function, f"tools[{index}].function.parameters")
            for index, definition in enumerate(use.definitions)
            if (function := use.functions.get(definition["function"]["name"])) is not None
        ]
        self.param = self._functions[0].param if len(self._functions) == 1 else "tools"

    def body(self, asked: Grammar | None) -> str:
        """The answer after its reasoning."""
        single = self._parser is Llama3JsonParser or self._use.max_calls == 1
        self.rules.append(f"call: {self._call()}")
        calls = "call" if single else 'call ("\\n" call)*'
        if self._use.required:
            return calls
        if asked is not None:
            return f"{calls} | {self._answer(asked)}"
        if self._parser is Llama3JsonParser:
            # Without tags, text is what does not begin like a call.
            return r"call | /([^{\s](.|\n)*)?/"
        if not self._tag_is_token("<tool_call>"):
            raise InvalidRequest("strict is not supported with this tokenizer", param="tools")
        return "TEXT (call TEXT)?" if single else "TEXT (call TEXT)*"

    def tag(self, name: str) -> str:
        """A tag, as the tokenizer has it: a token or plain text."""
        added = self._tokenizer.added.get(name)
        return _literal(name) if added is None else f"<[{added.token_id}]>"

    def _tag_is_token(self, name: str) -> bool:
        return name in self._tokenizer.added

    def _call(self) -> str:
        write = _FORMS[self._parser]
        start, end = self.tag("<tool_call>"), self.tag("</tool_call>")
        alternatives = " | ".join(f"({write(self, function)})" for function in self._functions)
        if self._parser is Llama3JsonParser:
            return alternatives
        return f'{start} "\\n" ({alternatives}) "\\n" {end}'

    def _answer(self, asked: Grammar) -> str:
        """An answer without a call, as a rule."""
        if self._parser is Llama3JsonParser:
            # Without tags, an answer of JSON and a call begin alike.
            raise InvalidRequest(
                "not supported together with tools in the model's form of calls",
                param=asked.param,
            )
        return self._rule(_answer(asked))

    def _rule(self, text: str) -> str:
        """A new rule of that text; its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {text}")
        return name

    def _write_json(self, function: _Function, key: str) -> str:
        head = f'{{"name": {json.dumps(function.definition.name)}, "{key}": '
        arguments = self._rule(_json(function.schema(), function.style()))
        return f'{_literal(head)} {arguments} "}}"'

    def write_hermes(self, function: _Function) -> str:
        """`{"name": …, "arguments": …}`."""
        return self._write_json(function, "arguments")

    def write_llama(self, function: _Function) -> str:
        """`{"name": …, "parameters": …}`."""
        return self._write_json(function, "parameters")

    def write_xml(self, function: _Function) -> str:
        """`<function=…>` and the properties in the schema's order."""
        root = function.schema()
        for keyword in root.keys() - _ROOT - _ANNOTATIONS:
            function.refuse(f".{keyword}", keyword)
        if root.get("additionalProperties", False) is not False:
            function.refuse(".additionalProperties", "additionalProperties")
        properties = cast("object", root.get("properties"))
        required: object = root.get("required", [])
        written: list[str] = []
        for name, schema in _items(properties):
            value = self._parameter(function, root, name, schema)
            rule = self._rule(f'{_literal(f"<parameter={name}>" + chr(10))} {value} "\\n"')
            is_required = isinstance(required, list) and name in required
            written.append(rule if is_required else f"{rule}?")
        start = _literal(f"<function={function.definition.name}>\n")
        return " ".join([start, *written, '"</function>"'])

    def _parameter(self, function: _Function, root: Schema, name: str, schema: object) -> str:
        """A value and its closing tag: text as it is, all else as JSON."""
        schema, path = resolve(schema, root), f".properties.{name}"
        end = '"\\n</parameter>"'
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = cast("list[object]", schema.get("enum", [schema.get("const")]))
            written = (v if isinstance(v, str) else json.dumps(v) for v in values)
            return f"({' | '.join(map(_literal, written))}) {end}"
        types = types_of(root, name)
        if types and "string" not in types:
            definitions = {k: root[k] for k in ("$defs", "definitions") if k in root}
            return f"{self._rule(_json({**definitions, **schema}, function.style()))} {end}"
        for keyword in _constraints(schema, root):
            function.refuse(path, keyword)
        rule = f"r{len(self.rules)}"
        self.rules.append(f'{rule}[suffix="</parameter>"]: /(.|\\n)*/')
        return rule


_FORMS: dict[type[CallParser], Callable[[_Writer, _Function], str]] = {
    HermesParser: _Writer.write_hermes,
    Llama3JsonParser: _Writer.write_llama,
    Qwen3CoderParser: _Writer.write_xml,
}


def _answer(asked: Grammar) -> str:
    """An answer without a call, in Lark."""
    if asked.kind in ("json_schema", "json_object"):
        try:
            schema = msgspec.json.decode(asked.text) if asked.text else {"type": "object"}
        except (msgspec.MsgspecError, RecursionError):
            raise InvalidGrammar("not a JSON schema", param=asked.param) from None
        check_nesting(schema, asked.param)
        return _json(schema, _ANSWER_STYLE)
    if asked.kind == "choice":
        return " | ".join(map(_literal, msgspec.json.decode(asked.text)))
    if asked.kind == "regex":
        return f"/{_SLASH.sub(_escape_slash, asked.text)}/"
    raise InvalidRequest("not supported together with tools", param=asked.param)


def _escape_slash(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _constraints(schema: Schema, root: Schema) -> Iterator[str]:
    """What a value written as bare text would not be held to."""
    for keyword, value in schema.items():
        if keyword in ("anyOf", "oneOf") and isinstance(value, list):
            for branch in cast("list[object]", value):
                yield from _constraints(resolve(branch, root), root)
        elif keyword == "type":
            types = cast("list[object]", value) if isinstance(value, list) else [value]
            yield from (f"type {kind}" for kind in types if kind not in _SCALARS)
        elif keyword not in _ANNOTATIONS:
            yield keyword


def _items(properties: object) -> Iterator[tuple[str, object]]:
    if isinstance(properties, Mapping):
        yield from cast("Mapping[str, object]", properties).items()


def _json(schema: object, style: Mapping[str, object]) -> str:
    """A value of the schema."""
    if isinstance(schema, dict):
        schema = {**strip_unknown_formats(cast("dict[str, Any]", schema)), "x-guidance": style}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
