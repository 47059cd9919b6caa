"""After its budget an answer's reasoning is closed, and the answer goes on behind it."""

import json

import numpy as np
import pytest

from tests.gateway_stack import GatewayStack
from tests.unit.gateway.test_answers import encode

THOUGHT = "<think>\nOne two three four five six seven eight."
CLOSED = "</think>\n\n"
BUDGET = 11
LEG = BUDGET + 1  # with the tag that opens the reasoning


@pytest.fixture
def reply(thinking):
    """What the decoder says, unless a budget puts more into it."""
    found = encode(thinking.tokenizer, THOUGHT + "\n" + CLOSED + "Done, at last.")
    thinking.decoder.reply = found
    return found


def closing(stack):
    return [*encode(stack.tokenizer, "</think>"), *encode(stack.tokenizer, "\n\n")]


def text_of(stack, ids):
    return b"".join(map(stack.tokenizer.token_bytes, ids)).decode()


def generated(submit):
    return np.frombuffer(submit.generated_token_ids, "<i4").tolist()


def asked(stack, **fields):
    response = stack.chat(**{"max_tokens": 200, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("tokens_per_event", [1, 5, 100])
def test_reasoning_ends_at_the_budget_and_the_answer_goes_on(thinking, reply, tokens_per_event):
    thinking.decoder.tokens_per_event = tokens_per_event
    answer = asked(thinking, thinking_token_budget=BUDGET, min_tokens=20, seed=7)
    first, second = thinking.decoder.submits
    assert (first.sampling.max_tokens, first.sampling.min_tokens) == (LEG, LEG)
    assert (second.sampling.max_tokens, second.sampling.min_tokens) == (200, 20)
    assert first.sampling.seed == second.sampling.seed == 7
    begin = reply[:LEG] + closing(thinking)
    assert generated(first) == [] and generated(second) == begin
    (choice,) = answer["choices"]
    ids = begin + reply[len(begin) :]
    assert choice["token_ids"][:-1] == ids
    assert choice["finish_reason"] == "stop"
    reasoning = text_of(thinking, reply[:LEG]).removeprefix("<think>\n")
    assert choice["message"]["reasoning_content"] == reasoning
    assert choice["message"]["content"] == text_of(thinking, reply[len(begin) :]).lstrip("\n")
    assert answer["usage"]["completion_tokens"] == len(ids) + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": LEG + 1}


def test_a_stream_has_the_same(thinking, reply):
    whole = asked(thinking, thinking_token_budget=BUDGET)["choices"][0]
    response = thinking.chat(max_tokens=200, thinking_token_budget=BUDGET, stream=True)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n") if "{" in line]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("content", "reasoning_content"):
        assert "".join(d.get(name, "") for d in deltas) == whole["message"][name]


def test_who_has_stopped_thinking_goes_on_undisturbed(thinking, reply):
    budget = len(reply) - 3
    answer = asked(thinking, thinking_token_budget=budget)["choices"][0]
    assert answer["token_ids"][:-1] == reply
    assert [generated(submit) for submit in thinking.decoder.submits] == [[], reply[: budget + 1]]


@pytest.mark.parametrize("budget", [-1, 150, 200, 1000])
def test_a_budget_that_is_not_reached_costs_nothing(thinking, reply, budget):
    answer = asked(thinking, thinking_token_budget=budget)["choices"][0]
    assert answer["token_ids"][:-1] == reply
    assert len(thinking.decoder.submits) == 1


def test_every_choice_has_it(thinking, reply):
    answer = asked(thinking, thinking_token_budget=BUDGET, n=3, seed=1)
    begin = reply[:LEG] + closing(thinking)
    assert len(thinking.decoder.submits) == 6
    for choice in answer["choices"]:
        assert choice["token_ids"][: len(begin)] == begin
        assert choice["finish_reason"] == "stop"
    assert sorted(s.sampling.seed for s in thinking.decoder.submits) == [1, 1, 2, 2, 3, 3]


def test_without_a_budget_for_thoughts_there_are_none(thinking, reply):
    answer = asked(thinking, thinking_token_budget=0)["choices"][0]
    (submit,) = thinking.decoder.submits
    assert text_of(thinking, generated(submit)) == "<think>\n\n</think>\n\n"
    assert "reasoning_content" not in answer["message"]
    assert answer["message"]["content"]


def test_what_closes_it_may_use_up_the_answer(thinking, reply):
    for more in (0, 1):
        thinking.decoder.submits.clear()
        answer = asked(thinking, thinking_token_budget=BUDGET, max_tokens=LEG + 1 + more)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == LEG + 1 + more
        assert choice["message"]["content"] is None
        assert len(thinking.decoder.submits) == 1


def test_a_stop_string_at_the_budget_ends_the_answer(thinking):
    thinking.decoder.reply = encode(thinking.tokenizer, "<think>\nx\n</think>\n\nA stop B")
    stops = len(encode(thinking.tokenizer, "<think>\nx\n</think>\n\nA stop"))
    answer = asked(thinking, thinking_token_budget=stops - 1, stop="stop")["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", "A ")
    assert len(thinking.decoder.submits) == 1


def test_a_lost_decoder_changes_nothing(loop_thread, tmp_path):
    stack = GatewayStack(
        loop_thread, tmp_path, text_only=True, num_encoders=0, num_decoders=2, log_level="ERROR"
    )
    try:
        reply = encode(stack.tokenizer, THOUGHT + "\n" + CLOSED + "Done, at last.")
        for decoder in stack.decoders:
            decoder.reply = reply
        whole = asked(stack, thinking_token_budget=BUDGET, seed=1)["choices"]
        used = next(decoder for decoder in stack.decoders if decoder.submits)
        for after in (4, LEG + 4):  # before the budget, behind it
            used.die_after = after
            before = stack.metric("triptych_gateway_handovers_total")
            assert asked(stack, thinking_token_budget=BUDGET, seed=1)["choices"] == whole
            assert stack.metric("triptych_gateway_handovers_total") == before + 1
            used.die_after = None
            stack.wait(stack.all_healthy)
    finally:
        stack.close()


def test_a_grammar_begins_behind_it(thinking, reply):
    asked(thinking, thinking_token_budget=BUDGET, response_format={"type": "json_object"})
    for submit in thinking.decoder.submits:
        assert submit.HasField("grammar")
    # JSON has no empty line before it.
    close = encode(thinking.tokenizer, "</think>")
    assert generated(thinking.decoder.submits[1]) == reply[:LEG] + close


def test_models_that_do_not_think_name_it(stack):
    response = stack.chat(thinking_token_budget=5)
    assert response.headers["x-triptych-ignored"] == "thinking_token_budget"
    refused = stack.chat(thinking_token_budget=0, prompt_logprobs=1)
    assert refused.json()["error"]["param"] == "thinking_token_budget"
