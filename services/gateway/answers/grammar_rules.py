"""Rules and terminals of one Lark grammar, each of which is written once."""

import json
from collections.abc import Mapping
from typing import Any, cast

from services.common.errors import InvalidGrammar
from services.common.grammar.grammar_bounds import MAX_GRAMMAR_CHARS


class GrammarRules:
    """Named rules and terminals of a grammar.

    Args:
        param: field of the request that an error names.

    Attributes:
        lines: definitions in Lark, one rule or terminal each.
    """

    def __init__(self, param: str) -> None:
        self.lines: list[str] = []
        self._param = param
        self._names: dict[str, str] = {}  # name of each rule and terminal, by its text
        self._num_chars = 0

    def rule(self, text: str) -> str:
        """Adds a rule with this text unless there is one, and returns its name.

        Raises:
            InvalidGrammar: the grammar is too long.
        """
        return self._name("r", text)

    def terminal(self, text: str) -> str:
        """Adds a terminal with this text unless there is one, and returns its name.

        Raises:
            InvalidGrammar: the grammar is too long.
        """
        return self._name("T", text)

    def _name(self, letter: str, text: str) -> str:
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = f"{letter}{len(self.lines)}"
            self.lines.append(f"{name}: {text}")
            # The length is checked with each rule, since each parameter has its own copy of the
            # definitions to which it refers.
            self._num_chars += len(text)
            if self._num_chars > MAX_GRAMMAR_CHARS:
                raise InvalidGrammar(
                    f"the grammar of the tools has more than {MAX_GRAMMAR_CHARS} characters",
                    param=self._param,
                )
        return name


def json_text(schema: object, style: Mapping[str, object]) -> str:
    """Returns the Lark text of a JSON value that fits a schema.

    Args:
        schema: JSON schema.
        style: llguidance's options, such as the separators of the JSON text.
    """
    if isinstance(schema, dict):
        schema = {**cast("dict[str, Any]", schema), "x-guidance": style}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
