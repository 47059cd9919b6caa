"""Writer of the grammar of an answer with tool calls.

`AnswerReader` asks for the grammar once the request's tools and the prompt's end are known. Within
the grammar a call has the format that the model's template shows, with the function's JSON schema
for its arguments; the parser of this format reads the call. With `tool_choice` of `required` or a
function's name, the answer begins with a call. With strict functions, the answer is free text, in
which everything that begins like a call has to be a valid call. Reasoning is always free.

The text is Lark in llguidance's dialect, where `<[id]>` is a token and `%json` a schema. Added
tokens, such as a call's tags, are never part of a regular expression's text.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from services.common.errors import InvalidGrammar, InvalidRequest
from services.common.grammar.grammar_bounds import MAX_GRAMMAR_CHARS, check_grammar
from services.common.grammar.plain_strings import has_plain_bounds, is_plain
from services.gateway.answers.argument_values import Parameters, Schema, listed, named
from services.gateway.answers.bare_values import BareValues, escaped, regex
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.grammar_rules import GrammarRules, json_text
from services.gateway.answers.reasoning import CLOSE, OPEN, Start
from services.gateway.answers.schema_dialects import standard_schema
from services.gateway.answers.schema_place import SchemaPlace
from services.gateway.answers.schema_support import held_to
from services.gateway.answers.thinking_budget import ids_of_tag
from services.gateway.answers.tool_parsers import Llama3JsonParser, Qwen3CoderParser
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.tools import FunctionDefinition, check_nesting
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# JSON as templates write arguments, which is Python's form.
_CALL_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANSWER_STYLE = {"whitespace_pattern": r"[ ]?|\n[ ]{0,40}"}
_BREAK = r"/\n{0,2}/"  # line breaks after the closing tag, as models write them
_SLASH = re.compile(
    r"\\.|/|\n", re.DOTALL
)  # also matches escaped characters, which are not changed
# Keywords that may name further properties than those in `properties`.
_OPEN_ENDED = {"patternProperties", "anyOf", "oneOf", "allOf"}
# Name of a parameter that is not in the schema: the characters that a tag can contain.
_FREE_NAME = r"/[^<>\s\x00-\x1F\x7F]{1,64}/"
# Keywords that the grammar of a list of parameters cannot enforce.
_ROOT_REFUSED = ("anyOf", "oneOf", "allOf", "const", "enum", "patternProperties")


def answer_grammar(
    asked: Grammar | None, start: Start | None, calls: ToolCalls | None, tokenizer: ModelTokenizer
) -> Grammar | None:
    """Returns the grammar of an answer, or None if the answer is free.

    Args:
        asked: grammar of an answer without a call, from `response_format` or `structured_outputs`.
            None if the request has neither.
        start: place where the answer begins. None if the model does not think.
        calls: calls that the answer may contain. None if calls are not allowed.
        tokenizer: tokenizer of the model.

    Raises:
        InvalidRequest: a schema or an option cannot be enforced. `param` names it.
    """
    if asked is not None:
        asked = _checked(asked)
    thinks = start in ("open", "optional")
    if calls is not None and (calls.is_constrained or asked is not None):
        writer = _Writer(tokenizer, calls)
        body, rules, param = writer.body(asked), writer.rules.lines, writer.param
        are_plain = writer.are_plain(asked)
    elif asked is None or not thinks:
        return asked
    elif start == "open" or asked.kind == "grammar":
        return replace(asked, begins_after=ids_of_tag(tokenizer, CLOSE))
    else:
        body, rules, param = "answer", [f"answer: {_answer(asked)}"], asked.param
        are_plain = _are_plain([_schema_of(asked)])
    begins_after: tuple[int, ...] = ()
    opens, closes = (tokenizer.added.get(name) for name in (OPEN, CLOSE))
    if thinks and (start == "open" or not (opens and closes)):
        body, begins_after = f"{_BREAK} ({body})", ids_of_tag(tokenizer, CLOSE)
    elif thinks and opens and closes:
        # The tags are part of this grammar: a grammar that begins after the closing tag would never
        # begin if the model does not think.
        body = f"(<[{opens.token_id}]> TEXT <[{closes.token_id}]> {_BREAK})? ({body})"
    text = "\n".join([f"start: {body}", *rules, r"TEXT: /(.|\n)*/"])
    return Grammar("grammar", text, param, begins_after, are_plain, by_gateway=True)


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that may be called, and its schema's place in the request."""

    definition: FunctionDefinition
    place: SchemaPlace

    @classmethod
    def at(cls, index: int, definition: FunctionDefinition) -> "_Function":
        """Returns the function at an index of the request's tools."""
        param = f"tools[{index}].function.parameters"
        return cls(definition, SchemaPlace(param, definition.name, bool(definition.strict)))

    def style(self) -> dict[str, object]:
        """Returns llguidance's options for the JSON of the arguments.

        For a function that is not strict, the library ignores what it cannot enforce.
        """
        lenient = not self.definition.strict
        return {**_CALL_STYLE, "lenient": lenient, "coerce_one_of": lenient}

    def schema(self) -> dict[str, Any]:
        """Returns the schema of the arguments, without the keywords that cannot be enforced.

        The arguments are an object, and have no properties besides the named ones unless the schema
        says so.

        Raises:
            InvalidGrammar: the schema is not that of an object, or cannot be enforced.
        """
        given = self.definition.parameters
        schema: dict[str, Any] = {"additionalProperties": False}
        if given is not None:
            schema = standard_schema(given, self.place)
        kinds = schema.get("type", "object")
        if "object" not in (cast("list[str]", kinds) if isinstance(kinds, list) else [kinds]):
            shown = json.dumps(kinds, ensure_ascii=False)
            self.place.reject(".type", f"{shown:.100} is not the type of an object")
        schema["type"] = "object"
        if not Parameters(schema).types(schema):
            self.place.reject("", "the schema is not that of an object")
        if "properties" in schema and not (_OPEN_ENDED | {"$ref"}) & schema.keys():
            schema.setdefault("additionalProperties", False)
        return held_to(schema, self.place)


class _Writer:
    """Writer of the rules for one request's calls.

    Attributes:
        param: field of the request that an error of the decoder names.
        rules: rules written so far.
    """

    def __init__(self, tokenizer: ModelTokenizer, calls: ToolCalls) -> None:
        self._tokenizer = tokenizer
        self._parser = calls.parser
        self._calls = calls
        self._functions = [
            _Function.at(index, calls.functions[name])
            for name, index in calls.places.items()
            if name in calls.functions
        ]
        self._schemas = [function.schema() for function in self._functions]
        self.param = self._functions[0].place.param if len(self._functions) == 1 else "tools"
        self.rules = GrammarRules(self.param)

    def body(self, asked: Grammar | None) -> str:
        """Returns the Lark text of the answer after its reasoning."""
        single = self._parser is Llama3JsonParser or self._calls.max_calls == 1
        self.rules.lines.append(f"call: {self._call()}")
        calls = "call" if single else 'call ("\\n" call)*'
        if self._calls.required:
            return calls
        if asked is not None:
            return f"{calls} | {self._answer(asked)}"
        if self._parser is Llama3JsonParser:
            # Calls have no tags, so free text is text that does not begin like a call.
            return r"call | /([^{\s](.|\n)*)?/"
        if "<tool_call>" not in self._tokenizer.added:
            raise InvalidRequest("strict is not supported with this tokenizer", param="tools")
        return "TEXT (call TEXT)?" if single else "TEXT (call TEXT)*"

    def are_plain(self, asked: Grammar | None) -> bool:
        """Returns whether the grammar's bounded strings are plain, see `plain_strings`."""
        if self._parser is Qwen3CoderParser or (
            self._parser is Llama3JsonParser and not self._calls.required
        ):
            return False
        schemas: list[object] = [_schema_of(asked)] if asked is not None else []
        return _are_plain([*schemas, *self._schemas])

    def tag(self, name: str) -> str:
        """Returns the Lark text of a tag, which the tokenizer has as a token or as plain text."""
        added = self._tokenizer.added.get(name)
        return _literal(name) if added is None else f"<[{added.token_id}]>"

    def _call(self) -> str:
        write = self._write_xml if self._parser is Qwen3CoderParser else self._write_json
        start, end = self.tag("<tool_call>"), self.tag("</tool_call>")
        functions = zip(self._functions, self._schemas, strict=True)
        alternatives = " | ".join(f"({write(*function)})" for function in functions)
        if self._parser is Llama3JsonParser:
            return alternatives
        return f'{start} "\\n" ({alternatives}) "\\n" {end}'

    def _answer(self, asked: Grammar) -> str:
        """Returns the name of the rule of an answer without a call."""
        if self._parser is Llama3JsonParser:
            # Calls have no tags, so the parser cannot tell an answer of JSON from a call.
            raise InvalidRequest(
                "not supported together with tools, because this model writes calls as bare JSON",
                param=asked.param,
            )
        return self.rules.rule(_answer(asked))

    def _write_json(self, function: _Function, schema: Schema) -> str:
        """Returns the Lark text of a call `{"name": …, "arguments": …}`, or `"parameters"`."""
        key = "parameters" if self._parser is Llama3JsonParser else "arguments"
        head = f'{{"name": {json.dumps(function.definition.name)}, "{key}": '
        arguments = self.rules.rule(json_text(schema, function.style()))
        return f'{_literal(head)} {arguments} "}}"'

    def _write_xml(self, function: _Function, schema: Schema) -> str:
        """Returns the Lark text of a call with tags: the parameters in the schema's order."""
        parameters = Parameters(schema)
        values = BareValues(parameters, self.rules, function.place, function.style())
        written: list[str] = []
        for name, (schema_, path, is_required) in _parameters(parameters, function).items():
            if ">" in name or name != name.strip():
                function.place.refuse(path, "a name that a tag cannot hold")
                continue
            opener = _literal(f"<parameter={name}>\n")
            rule = values.parameter(opener, schema_, path)
            if rule is not None:
                written.append(rule if is_required else f"{rule}?")
            elif is_required:
                function.place.refuse(path, "a required parameter without a value")
        written += _open_ended(parameters, values)
        start = _literal(f"<function={function.definition.name}>\n")
        return " ".join([start, *written, '"</function>"'])


def _open_ended(parameters: Parameters, values: BareValues) -> list[str]:
    """Returns the Lark text of parameters that the schema does not name, after those it names."""
    root = parameters.root
    known = list({**named(root, "properties"), **dict.fromkeys(_names(root, "required"))})
    schema = True if named(root, "patternProperties") else parameters.additional
    others = f" & ~{regex('|'.join(map(escaped, known)))}" if known else ""
    opener = f'"<parameter=" ({_FREE_NAME}{others}) ">\\n"'
    found = values.parameter(opener, schema, ".additionalProperties")
    if found is None:
        return []
    most = root.get("maxProperties")
    if not isinstance(most, int):
        return [f"{found}*"]
    num_more = most - len(known)
    return [f"{found}{{0,{num_more}}}"] if num_more > 0 else []


def _names(root: Schema, keyword: str) -> list[str]:
    return [name for name in listed(root, keyword) if isinstance(name, str)]


def _parameters(parameters: Parameters, function: _Function) -> dict[str, tuple[object, str, bool]]:
    """Returns the schema and path of each parameter, and whether the parameter is required."""
    root = parameters.root
    properties, required = named(root, "properties"), listed(root, "required")
    known = set(_names(root, "required"))
    for keyword in _ROOT_REFUSED:
        if keyword in root:
            function.place.refuse(f".{keyword}", f"{keyword} of parameters without quotes")
    fewest = root.get("minProperties", 0)
    if not isinstance(fewest, int) or fewest > len(required):
        function.place.refuse(".minProperties", "minProperties")
    found = {
        name: (parameters.schema_of(name), f".properties.{name}", name in known)
        for name in properties
    }
    for index, name in enumerate(required):
        if isinstance(name, str) and name not in found:
            schema = parameters.schema_of(name)
            if schema is False:
                function.place.refuse(
                    f".required[{index}]", "a parameter that is not in properties"
                )
            else:
                found[name] = (schema, f".required[{index}]", True)
    return found


def _checked(asked: Grammar) -> Grammar:
    """Returns a request's grammar with its schema simplified, after checking its length.

    Raises:
        InvalidGrammar: the grammar is too long or malformed.
    """
    if asked.kind == "json_schema" and len(asked.text) <= MAX_GRAMMAR_CHARS:
        asked = replace(asked, text=json.dumps(_held_schema(asked), ensure_ascii=False))
    try:
        check_grammar(asked.kind, asked.text)
    except InvalidGrammar as error:
        raise InvalidGrammar(error.message, param=asked.param) from None
    return asked


def _held_schema(asked: Grammar) -> object:
    place = SchemaPlace(asked.param)
    try:
        schema = msgspec.json.decode(asked.text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        raise InvalidGrammar("not a JSON schema", param=asked.param) from None
    check_nesting(schema, asked.param)
    schema = standard_schema(schema, place)
    if not Parameters(schema).types(schema):
        place.reject("", "no value fits the schema")
    return held_to(schema, place)


def _schema_of(asked: Grammar) -> object:
    """Returns the schema of an answer without a call, or None if its grammar is not a schema."""
    return json.loads(asked.text) if asked.kind == "json_schema" else None


def _are_plain(schemas: list[object]) -> bool:
    """Returns whether some strings are bounded in length, and no string is otherwise limited."""
    texts = [json.dumps(schema) for schema in schemas]
    return any(map(has_plain_bounds, texts)) and all(map(is_plain, schemas))


def _answer(asked: Grammar) -> str:
    """Returns the Lark text of an answer without a call."""
    if (schema := _schema_of(asked)) is not None:
        return json_text(schema, _ANSWER_STYLE)
    if asked.kind == "choice":
        return " | ".join(map(_literal, msgspec.json.decode(asked.text)))
    if asked.kind == "regex":
        return f"/{_SLASH.sub(_escape_slash, asked.text)}/"
    raise InvalidRequest("a grammar is not supported together with tools", param=asked.param)


def _escape_slash(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
