"""A budget of the reasoning that is reached within the head of a tool call: the call stays whole,
and what is no call is closed.
"""

import json
from pathlib import Path

import pytest

from services.gateway.answers.thinking_budget import ThinkingBudget
from tests.cases import cases, first
from tests.gateway_stack import GatewayStack
from tests.tiny_tokenizer import TEXT_CHAT_TEMPLATE
from tests.unit.gateway.test_answers import encode

THOUGHT = "I should look it up.\n"
ARGUMENTS = {"p": "alpha beta"}
CODER_TEMPLATE = Path("tests/fixtures/qwen3_5_chat_template.jinja")
# The template, the beginning of an answer, and a call as the model writes it.
FORMS = {
    "hermes": (
        TEXT_CHAT_TEMPLATE,
        "<think>\n",
        '<tool_call>\n{"name": "f", "arguments": {"p": "alpha beta"}}\n</tool_call>',
    ),
    "qwen3_coder": (
        CODER_TEMPLATE,
        "",
        "<tool_call>\n<function=f>\n<parameter=p>\nalpha beta\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module", params=FORMS)
def form(request, loop_thread, tmp_path_factory):
    """A stack whose model calls in the form, the beginning of its answers, and a call."""
    template, opener, call = FORMS[request.param]
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("calls"), text_only=True, num_encoders=0,
        num_decoders=2, files={"chat_template.jinja": template.read_text()}, log_level="ERROR",
    )  # fmt: skip
    yield stack, opener, call
    stack.close()


def budget_at_tag(stack, opener):
    """The budget that is reached once a call's tag has been written; an opening tag is free."""
    return len(encode(stack.tokenizer, opener + THOUGHT)) + 1 - bool(opener)


def reply(stack, text, tokens_per_event=1):
    stack.reset()
    ids = encode(stack.tokenizer, text)
    for decoder in stack.decoders:
        decoder.reply, decoder.tokens_per_event = ids, tokens_per_event
    return ids


def submits(stack):
    return [submit for decoder in stack.decoders for submit in decoder.submits]


def ask(stack, budget, **fields):
    body = {"max_tokens": 400, "tools": TOOLS, "thinking_token_budget": budget} | fields
    response = stack.chat(**body)
    assert response.status_code == 200, response.text
    return response


def calls_of(choice):
    calls = choice["message"].get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def streamed_call(response):
    """The name and the arguments of the one call of a stream."""
    name, arguments = "", ""
    for line in response.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    return name, json.loads(arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("tokens_per_event", first(1, [7, 1]))
def test_a_call_that_has_begun_stays_whole_at_each_budget(form, tokens_per_event):
    stack, opener, call = form
    ids = reply(stack, opener + THOUGHT + call, tokens_per_event)
    begins = budget_at_tag(stack, opener)
    ends = begins + len(encode(stack.tokenizer, call)) - 1
    for budget in range(begins, ends):
        (choice,) = ask(stack, budget, return_token_ids=True).json()["choices"]
        assert calls_of(choice) == [("f", ARGUMENTS)], budget
        assert choice["message"]["reasoning_content"] == THOUGHT.strip()
        assert choice["message"]["content"] is None
        assert choice["token_ids"][: len(ids)] == ids  # nothing was put between them
        assert choice["finish_reason"] == "tool_calls"
    for budget in range(begins, ends, 5):
        assert streamed_call(ask(stack, budget, stream=True)) == ("f", ARGUMENTS), budget


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mention",
    [
        "<tool_call> is the tag of a call, of which I only think, and so on.",
        "<tool_call>\n<functions=f> is no call, nor is any text that follows it.",
        '<tool_call>\n{"nam": "f"} is no call, nor is any text that follows it.',
        "<tool_call>\n<function=f>text without a parameter, and more of it.",
        "<tool_call>\n\n\n" + "\n " * 200,
        "</thin" + "g> is no tag, nor is any text that follows it.",
    ],
)
def test_a_head_that_becomes_no_call_is_closed_soon(form, mention):
    stack, opener, _ = form
    ids = reply(stack, opener + THOUGHT + mention + " More thoughts." * 60)
    begins = budget_at_tag(stack, opener)
    close = encode(stack.tokenizer, "</think>")[0]
    first = int(bool(opener))  # the opening tag
    for budget in range(begins, begins + 14, cases(7, 3)):
        (choice,) = ask(stack, budget, return_token_ids=True, max_tokens=300).json()["choices"]
        at = choice["token_ids"].index(close)
        assert first + budget <= at <= first + budget + 128
        assert choice["token_ids"][:at] == ids[:at]
        assert calls_of(choice) == []
        reasoning = choice["message"]["reasoning_content"]
        assert reasoning.startswith(THOUGHT.rstrip()) and "</think>" not in reasoning
        assert choice["message"]["content"]


def test_few_submissions_continue_a_head(form):
    stack, opener, call = form
    ids = reply(stack, opener + THOUGHT + call)
    begins = budget_at_tag(stack, opener)
    ask(stack, begins)
    lengths = [submit.sampling.max_tokens for submit in submits(stack)]
    assert lengths == sorted(lengths) and len(lengths) <= 8
    assert lengths[-1] == 400 and lengths[-2] < len(ids) + 64


def test_the_answer_may_end_within_the_head(form):
    stack, opener, call = form
    ids = reply(stack, opener + THOUGHT + call)
    begins = budget_at_tag(stack, opener)
    first = int(bool(opener))  # the opening tag
    for more in (1, 2, 3, 5):
        answer = ask(stack, begins, max_tokens=first + begins + more, return_token_ids=True)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == ids[: first + begins + more]


def test_every_choice_has_its_own_head(form):
    stack, opener, call = form
    reply(stack, opener + THOUGHT + call)
    begins = budget_at_tag(stack, opener) + 1
    answer = ask(stack, begins, n=3)
    for choice in answer.json()["choices"]:
        assert calls_of(choice) == [("f", ARGUMENTS)]


def test_a_decoder_that_dies_within_the_head_changes_nothing(form):
    stack, opener, call = form
    reply(stack, opener + THOUGHT + call)
    begins = budget_at_tag(stack, opener)
    ask(stack, begins)
    used = next(decoder for decoder in stack.decoders if decoder.submits)
    for after in range(begins, begins + 6):
        used.die_after = after
        (choice,) = ask(stack, begins).json()["choices"]
        assert calls_of(choice) == [("f", ARGUMENTS)]
        used.die_after = None
        stack.wait(stack.all_healthy)


class _Choice:
    """A choice of an answer whose text ends in the head of a call."""

    thinking, in_head, num_tokens = True, True, 9


def test_a_head_is_continued_for_a_bounded_number_of_tokens():
    budget = ThinkingBudget(10, False, [_Choice()], None)  # pyright: ignore
    num_tokens, num_turns = 10, 0
    while more := budget.more_tokens(0, num_tokens):
        num_tokens, num_turns = num_tokens + more, num_turns + 1
    assert (num_tokens, num_turns) == (10 + 64, 7)
