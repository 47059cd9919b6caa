"""The grammar of an answer, which the decoder enforces while it samples.

`read_grammar` reads the grammar from a request's `response_format` or `structured_outputs`;
`tool_grammar` writes the grammar of answers with tool calls. The decoder compiles it. If the
decoder refuses the grammar, the error (`InvalidGrammar`) names the field `param`.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET

from services.common.errors import InvalidGrammar, InvalidRequest
from services.common.grammar.grammar_bounds import MAX_GRAMMAR_CHARS
from services.common.pb import decoder_pb2 as pb
from services.gateway.forms.generation import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from services.gateway.forms.json_body import text_of
from services.gateway.forms.openai import ChatRequest

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer.

    Attributes:
        kind: language of `text`: a JSON Schema as JSON; a regular expression; a JSON array of
            strings, one of which is the answer; a grammar in llguidance's dialect of Lark or in
            GBNF. In Lark, `<[151657]>` is the token with this id and `<tool_call>` the added token
            with this name.
        text: text of the grammar, of at most `MAX_GRAMMAR_CHARS` characters.
        param: field of the request that an error names.
        begins_after: token ids, such as the id of `</think>`. The answer is free until it contains
            these tokens in a row, and follows the grammar afterwards. Empty if the grammar begins
            with the answer.
        plain_strings: true if the bounded strings of the grammar are known to be plain; see
            `services/common/grammar/plain_strings.py`.
        by_gateway: true if the gateway has written the text, and not the client.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
    param: str
    begins_after: tuple[int, ...] = ()
    plain_strings: bool = False
    by_gateway: bool = False

    def to_proto(self, end_ids: tuple[int, ...]) -> pb.Grammar:
        """Returns the grammar as a message for the decoder.

        Args:
            end_ids: ids of the model's end tokens.

        Raises:
            InvalidGrammar: the grammar is too long.
            InvalidRequest: the model has no end token.
        """
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidGrammar(f"has more than {MAX_GRAMMAR_CHARS} characters", param=self.param)
        if not end_ids:
            raise InvalidRequest("the model has no end token", param=self.param)
        return pb.Grammar(
            kind=f"KIND_{self.kind.upper()}",
            text=self.text,
            begins_after=self.begins_after,
            end_token_ids=end_ids,
            plain_strings=self.plain_strings,
            by_gateway=self.by_gateway,
        )


def read_grammar(request: ChatRequest) -> Grammar | None:
    """Returns the grammar of a request, or None if the answer is free.

    Raises:
        InvalidRequest: the request contains more than one grammar.
    """
    grammar, given = None, request.response_format
    if isinstance(given, JsonObjectFormat | JsonSchemaFormat):
        is_wrapped = isinstance(given, JsonSchemaFormat)
        param = "response_format.json_schema.schema" if is_wrapped else "response_format.schema"
        if given.schema is UNSET or bytes(given.schema) == b"null":
            grammar = _of_schema(_ANY_OBJECT, param if is_wrapped else "response_format")
        else:
            grammar = _of_schema(text_of(given.schema, param), param)
    if request.structured_outputs is None:
        return grammar
    if grammar is not None:
        raise InvalidRequest("give it or response_format, not both", param="structured_outputs")
    return _of_structured_outputs(request.structured_outputs)


def _of_structured_outputs(given: StructuredOutputs) -> Grammar:
    found: list[Grammar] = []
    if given.json is not UNSET and bytes(given.json) != b"null":
        param = "structured_outputs.json"
        text = text_of(given.json, param)
        if text.startswith('"'):  # the schema is JSON text within a JSON string
            text = msgspec.json.decode(text, type=str)
        found.append(_of_schema(text, param))
    if given.json_object:
        found.append(_of_schema(_ANY_OBJECT, "structured_outputs.json_object"))
    if given.regex is not None:
        found.append(Grammar("regex", given.regex, "structured_outputs.regex"))
    if given.choice is not None:
        text = msgspec.json.encode(given.choice).decode()
        found.append(Grammar("choice", text, "structured_outputs.choice"))
    if given.grammar is not None:
        found.append(Grammar("grammar", given.grammar, "structured_outputs.grammar"))
    if len(found) != 1:
        raise InvalidRequest(
            "give exactly one of json, json_object, regex, choice, grammar",
            param="structured_outputs",
        )
    return found[0]


def _of_schema(text: str, param: str) -> Grammar:
    if not text.lstrip().startswith("{"):
        raise InvalidGrammar("a JSON Schema is an object", param=param)
    return Grammar("json_schema", text, param)
