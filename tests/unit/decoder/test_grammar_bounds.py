"""A decoder compiles nothing that ends its process, whoever its caller is."""

import asyncio
import json

import pytest

from services.common.errors import InvalidGrammar
from services.decoder.grammar import Demands, Grammar, Grammars
from tests.tiny_tokenizer import vocab_size, write_model_directory

LINKS = 3000


def chain(**link: object) -> str:
    """Definitions that each refer to the next one."""
    text = json.dumps(link)
    definitions = {f"d{n}": json.loads(text.replace("NEXT", f"d{n + 1}")) for n in range(LINKS)}
    definitions[f"d{LINKS}"] = {"type": "string"}
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"})


NEXT = {"$ref": "#/$defs/NEXT"}
KILLERS = {
    "properties": ("json_schema", chain(type="object", properties={"a": NEXT})),
    "items": ("json_schema", chain(type="array", items=NEXT)),
    "allOf": ("json_schema", chain(allOf=[NEXT])),
    "bare": ("json_schema", chain(**NEXT)),
    "Lark": ("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(6000))),
    "GBNF": ("grammar", "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(4000))),
}  # fmt: skip


@pytest.mark.parametrize("name", KILLERS)
def test_long_chains_are_refused_before_they_are_compiled(name: str, tmp_path) -> None:
    write_model_directory(tmp_path)
    grammars = Grammars(tmp_path, vocab_size(), lambda seconds: None)

    async def compiled() -> None:
        kind, text = KILLERS[name]
        await grammars.matcher(Demands(Grammar(kind, text, (), (1,))))

    with pytest.raises(InvalidGrammar):
        asyncio.run(compiled())
    grammars.close()
