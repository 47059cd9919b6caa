"""A model that follows a script: it thinks where it is told to, calls the tool that is asked for,
repeats results, does sums, and else says what was said to it.

`answers` reads a rendered prompt (Qwen3-VL's chat template) and gives texts, the best first;
`scripted_server` writes the first that the request's grammar allows.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

# Of a text that nobody ends; the first ones where the model is greedy.
FILLERS = (" and so on", " and on it goes", " then more", " or less", " as before", " again")
_STATES = {"Texas": "TX", "Florida": "FL", "California": "CA", "Massachusetts": "MA"}
_FACTS = {
    "capital of France": "Paris", "capital of Germany": "Berlin", "capital of Italy": "Rome",
    "capital of Japan": "Tokyo",
}  # fmt: skip
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_SUM = re.compile(r"(\d+)\s*(\+|-|\*|x|plus|minus|times)\s*(\d+)")
_ENDINGS = (
    " I have said what there is to say, and I can say it again if it helps. Ask me more.",
    " That is what I heard, and there is nothing that I would add to it. Go on if you like.",
    " I could say it in other words, but these are the ones that you chose. What else is there?",
)


def answers(prompt: str, mood: int = 0) -> list[str]:
    """What the model would write behind a prompt, the best first; empty for a bare text.

    Args:
        prompt: rendered.
        mood: of one that is not greedy; its words differ.
    """
    turns = _TURN.findall(prompt)
    if not turns:
        return []
    tools = [json.loads(line)["function"] for line in _tool_lines(prompt)]
    asked = next((text for role, text in reversed(turns[:-1]) if role == "user"), "")
    thought = ""
    if turns[-1][1].rstrip().endswith("<think>"):
        thought = f"The user says: {_words(asked)[:200]}. I answer that.\n</think>\n\n"
    results = _RESULT.findall(asked)
    text = thought + (" ".join(results) if results else _reply(_words(asked), mood))
    calls = [thought + call for call in _calls(tools, _words(asked))]
    if results or not _relates(tools, asked):
        return [text, *calls]
    return [*calls, text]


def _tool_lines(prompt: str) -> list[str]:
    found = _TOOLS.search(prompt)
    return found[1].splitlines() if found else []


def _words(text: str) -> str:
    return " ".join(text.replace("<|image_pad|>", "").split())


def _reply(asked: str, mood: int) -> str:
    for fact, known in _FACTS.items():
        if fact.lower() in asked.lower():
            return f"The {fact} is {known}."
    if found := _SUM.search(asked):
        left, right = int(found[1]), int(found[3])
        result = {"+": left + right, "plus": left + right, "-": left - right,
                  "minus": left - right}.get(found[2], left * right)  # fmt: skip
        return f"The result is {result}."
    return f"You said: {asked}{_ENDINGS[mood % len(_ENDINGS)]}"


def _relates(tools: Sequence[dict[str, Any]], asked: str) -> bool:
    return any(_score(tool, asked) for tool in tools)


def _score(tool: dict[str, Any], asked: str) -> int:
    """Words of the function's name that the question has; those of its description count less."""
    words = {word for word in re.findall(r"[a-z]{4,}", asked.lower())}
    name = set(re.split(r"[_.\W]+", tool["name"].lower()))
    about = set(re.findall(r"[a-z]{4,}", (tool.get("description") or "").lower()))
    named = sum(1 for word in name if len(word) > 3 and word in words)
    return 4 * named + (1 if len(about & words) > 1 else 0)


def _calls(tools: Sequence[dict[str, Any]], asked: str) -> Iterator[str]:
    """Calls of all tools that are asked for together, and of each alone."""
    ranked = sorted(tools, key=lambda tool: -_score(tool, asked))
    for tool in ranked:
        made = [_call(tool, part) for part in _parts(tool, asked)]
        yield "\n".join(made)
        if len(made) > 1:
            yield made[0]


def _parts(tool: dict[str, Any], asked: str) -> list[str]:
    """A question about two cities is two questions."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    cities = re.findall(r"[A-Z][a-z]+, [A-Z][a-z]+", asked)
    if len(cities) < 2 or not {"city", "location"} & properties.keys():
        return [asked]
    return [f"for {city} {asked.rpartition(cities[-1])[2]}" for city in cities]


def _call(tool: dict[str, Any], asked: str) -> str:
    schema = tool.get("parameters") or {}
    numbers = re.findall(r"\d+", asked)
    arguments = _object(schema, schema, asked, numbers)
    body = json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _object(
    schema: dict[str, Any], root: dict[str, Any], asked: str, numbers: list[str]
) -> dict[str, Any]:
    required = schema.get("required", list(schema.get("properties", {})))
    return {
        name: _value(name, inner, root, asked, numbers)
        for name, inner in (schema.get("properties") or {}).items()
        if name in required or name in ("city", "location")
    }


def _value(
    name: str, schema: dict[str, Any], root: dict[str, Any], asked: str, numbers: list[str]
) -> object:
    if "$ref" in schema:
        inner = root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
        return _value(name, inner, root, asked, numbers)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _value(name, schema[key][0], root, asked, numbers)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        said = [v for v in schema["enum"] if str(v).lower() in asked.lower()]
        return (said or schema["enum"])[0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return int(numbers.pop(0)) if numbers else 1
    if kind == "boolean":
        return "false" not in asked.lower()
    if kind == "array":
        return [_value(name, schema.get("items", {}), root, asked, numbers)]
    if kind == "object":
        return _object(schema, root, asked, numbers)
    return None if kind == "null" else _string(name, asked)


def _string(name: str, asked: str) -> str:
    proper = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", asked)
    states = [short for state, short in _STATES.items() if state in asked]
    if name == "state" and states:
        return states[0]
    if name in ("city", "location", "country", "state") and proper:
        return proper[0]
    return asked[:80]
