"""Fields of vLLM's requests that no probe of `tests/contract/field_rows.py` sends."""

import ast
from pathlib import Path

from tests.contract.field_rows import CHAT, MESSAGES, RESPONSES, ROWS, TEXT

_ENTRYPOINTS = "vllm/entrypoints"
# path -> the file and the class of vLLM's
REFERENCES = {
    CHAT: ("openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    TEXT: ("openai/completion/protocol.py", "CompletionRequest"),
    RESPONSES: ("openai/responses/protocol.py", "ResponsesRequest"),
    MESSAGES: ("anthropic/protocol.py", "AnthropicMessagesRequest"),
}


def unprobed(source: Path) -> dict[str, list[str]]:
    """By path; `source` is an unpacked vLLM."""
    found: dict[str, list[str]] = {}
    for path, (file, name) in REFERENCES.items():
        probed = {"model"} | {field for row in ROWS if row.path == path for field in row.fields}
        if missing := sorted(_fields(source / _ENTRYPOINTS / file, name) - probed):
            found[path] = missing
    return found


def _fields(file: Path, name: str) -> set[str]:
    """Public ones of a class."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            names = (
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            )
            return {field for field in names if not field.startswith("_")}
    raise LookupError(f"{file} has no {name}")
