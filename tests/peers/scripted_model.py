"""A model that follows a script: it thinks where it is told to, calls the tool that is asked for,
repeats results, does sums, fills in schemas, and else says what was said to it.

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
_FINISH = re.compile(r"Finish the answer with (\w+)")
_TIMES = re.compile(r"Multiply the result by (\d+)")
_NAME = re.compile(r"name is (?!not\b)([A-Z]\w+)")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_SUM = re.compile(r"(\d+)\s*(\+|-|\*|x|plus|minus|times)\s*(\d+)")
_ENDINGS = (
    " I have said what there is to say, and I can say it again if it helps. Ask me more.",
    " That is what I heard, and there is nothing that I would add to it. Go on if you like.",
    " I could say it in other words, but these are the ones that you chose. What else is there?",
)


def answers(prompt: str, mood: int = 0, schema: dict[str, Any] | None = None) -> list[str]:
    """What the model would write behind a prompt, the best first; empty for a bare text.

    Args:
        prompt: rendered.
        mood: of one that is not greedy; its words differ.
        schema: of the JSON that the answer has to be; None: it is text, or calls.
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
    said = [_words(text) for role, text in turns if role in ("user", "assistant")][:-1]
    number = sum(role == "assistant" for role, _ in turns) - 1
    if schema is not None:  # no line break before it
        thought = thought.rstrip("\n")
        return [thought + _json(schema, _words(asked), number)]
    ending = _FINISH.search(turns[0][1]) if turns[0][0] == "system" else None
    reply = _reply(said, mood) + (f" {ending[1]}." if ending else "")
    text = thought + (" ".join(results) if results else reply)
    calls = [thought + call for call in _calls(tools, _words(asked), number)]
    if results or not _relates(tools, asked):
        return [text, *calls]
    return [*calls, text]


def _tool_lines(prompt: str) -> list[str]:
    found = _TOOLS.search(prompt)
    return found[1].splitlines() if found else []


def _words(text: str) -> str:
    return " ".join(text.replace("<|image_pad|>", "").split())


def _reply(said: Sequence[str], mood: int) -> str:
    """An answer to the last of what was said."""
    asked = said[-1] if said else ""
    for fact, known in _FACTS.items():
        if fact.lower() in asked.lower():
            return f"The {fact} is {known}."
    if found := re.search("Repeat after me: (.+)", asked):
        return found[1]
    if (result := _result(asked)) is not None:
        return str(result) if "without any other text" in asked else f"The result is {result}."
    if found := _TIMES.search(asked):
        numbers = re.findall(r"\d+", " ".join(said[:-1]))
        return f"The result is {int(numbers[-1]) * int(found[1])}." if numbers else "Of what?"
    names = [name for text in said[:-1] for name in _NAME.findall(text)]
    if names and "my name" in asked.replace("real name", "name"):
        return names[-1]
    return f"You said: {asked}{_ENDINGS[mood % len(_ENDINGS)]}"


def _result(asked: str) -> int | None:
    """Of the sum that is asked for."""
    if not (found := _SUM.search(asked)):
        return None
    left, right = int(found[1]), int(found[3])
    return {"+": left + right, "plus": left + right, "-": left - right,
            "minus": left - right}.get(found[2], left * right)  # fmt: skip


def _json(schema: dict[str, Any], asked: str, number: int) -> str:
    """A value of a schema; the one that the question shows, if it is free."""
    shown = re.search(r"\{.*\}", asked)
    if shown and not schema.get("properties"):
        return shown[0]
    numbers = [str(n) for n in (_result(asked),) if n is not None] or re.findall(r"\d+", asked)
    if "schema" in asked:  # which the question shows; its numbers are bounds
        numbers = []
    return json.dumps(_value("", schema, schema, asked, numbers, number), ensure_ascii=False)


def _relates(tools: Sequence[dict[str, Any]], asked: str) -> bool:
    return any(_score(tool, asked) for tool in tools)


def _score(tool: dict[str, Any], asked: str) -> int:
    """Returns how many words of the function's name the question has; words of its description and
    values of its arguments count less, and so does a sum for a function of two numbers.
    """
    words = {word for word in re.findall(r"[a-z]{4,}", asked.lower())}
    name = set(re.split(r"[_.\W]+", tool["name"].lower()))
    about = set(re.findall(r"[a-z]{4,}", (tool.get("description") or "").lower()))
    named = sum(1 for word in name if len(word) > 3 and word in words)
    arguments = [
        each
        for each in ((tool.get("parameters") or {}).get("properties") or {}).values()
        if isinstance(each, dict)
    ]
    values = {str(value) for each in arguments for value in each.get("enum") or ()}
    numbers = sum(each.get("type") in ("integer", "number") for each in arguments)
    less = (len(about & words) > 1, values & words, numbers > 1 and _SUM.search(asked))
    return 4 * named + sum(map(bool, less))


def _calls(tools: Sequence[dict[str, Any]], asked: str, number: int) -> Iterator[str]:
    """Calls of all tools that are asked for together, and of each alone."""
    named = [tool for tool in tools if tool["name"] in asked]
    if len(named) > 1:
        yield "\n".join(_call(tool, asked.partition(tool["name"])[2], number) for tool in named)
    ranked = sorted(tools, key=lambda tool: -_score(tool, asked))
    for tool in ranked:
        made = [_call(tool, part, number) for part in _parts(tool, asked)]
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


def _call(tool: dict[str, Any], asked: str, number: int) -> str:
    schema = tool.get("parameters") or {}
    numbers = [] if "schema" in asked else re.findall(r"\d+", asked)
    arguments = _object(schema, schema, asked, numbers, number)
    body = json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _object(
    schema: dict[str, Any], root: dict[str, Any], asked: str, numbers: list[str], number: int
) -> dict[str, Any]:
    required = schema.get("required", list(schema.get("properties", {})))
    return {
        name: _value(name, inner, root, asked, numbers, number)
        for name, inner in (schema.get("properties") or {}).items()
        if name in required or name in ("city", "location")
    }


def _value(
    name: str,
    schema: dict[str, Any],
    root: dict[str, Any],
    asked: str,
    numbers: list[str],
    number: int,
) -> object:
    """A value of a schema, out of the question where it has one.

    Args:
        name: of the property.
        root: that references are to.
        numbers: of the question that are not used yet.
        number: of the answers before, so that another one differs.
    """
    if "$ref" in schema:
        inner = root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
        return _value(name, inner, root, asked, numbers, number)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _value(name, schema[key][0], root, asked, numbers, number)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        said = [v for v in schema["enum"] if str(v).lower() in asked.lower()]
        return (said or schema["enum"])[0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return int(numbers.pop(0)) if numbers else schema.get("minimum", 1) + number
    if kind == "boolean":
        return "false" not in asked.lower()
    if kind == "array":
        inner = schema.get("items", {})
        if inner.get("type") == "string" and (people := _people(asked)):
            return people[: schema.get("maxItems", len(people))]
        count = max(1, schema.get("minItems", 1))
        return [_value(name, inner, root, asked, numbers, number) for _ in range(count)]
    if kind == "object":
        return _object(schema, root, asked, numbers, number)
    return None if kind == "null" else _string(name, asked, number)[: schema.get("maxLength")]


def _people(asked: str) -> list[str]:
    found = re.search(r"^([A-Z][a-z]+)((?:, [A-Z][a-z]+)*) and ([A-Z][a-z]+)", asked)
    return [found[1], *re.findall(r"\w+", found[2]), found[3]] if found else []


def _string(name: str, asked: str, number: int) -> str:
    proper = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", asked)
    states = [short for state, short in _STATES.items() if state in asked]
    days = [day for day in _DAYS if day in asked]
    event = re.search(r"going to an? ([a-z ]+?)(?: on |\.)", asked)
    if name == "date" and days:
        return days[0]
    if name == "event_name" and event:
        return event[1]
    if name == "state" and states:
        return states[0]
    if name in ("city", "location", "country", "state") and proper:
        return proper[0]
    return f"another {number}" if number and "another" in asked else asked[:80]
