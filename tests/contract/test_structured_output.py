"""Grammars from a Submit to tokens: the decoder's front and engine, a random model."""

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.common.pb import decoder_pb2 as pb
from services.common.process.channel import FrontChannel
from services.decoder.engine.messages import AddSequence
from services.decoder.masks.messages import Follow
from tests.cases import cases
from tests.decoder_service_harness import Decoder, Gateway, prompt_of, submit_of, until
from tests.tiny_tokenizer import added_ids, tokenizer_json, write_text_model_directory

# The tests share a decoder: the start of its mask processes takes longer than most of them.
pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

END = added_ids()["<|im_end|>"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "big"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "size", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_text_model_directory(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder(model):
    async with Decoder(
        model_directory=model, num_blocks=256, max_model_len=512, max_num_sequences=16
    ) as decoder:
        yield decoder


def grammar(kind: str, text: object, **fields: object) -> pb.Grammar:
    text = text if isinstance(text, str) else json.dumps(text)
    given: dict[str, Any] = {"end_token_ids": [END], **fields}
    return pb.Grammar(kind=f"KIND_{kind}", text=text, **given)


def text_of(ids: list[int]) -> str:
    return Tokenizer.from_str(tokenizer_json()).decode(ids, skip_special_tokens=False)


async def ask(gateway: Gateway, number: int, form: pb.Grammar, **sampling: object) -> None:
    fields = {"seed": number, "max_tokens": 400, "stop_token_ids": [END], **sampling}
    submit = submit_of(number, prompt_of(number), **fields)
    submit.grammar.CopyFrom(form)
    await gateway.submit(submit)


async def told(gateway: Gateway, number: int) -> tuple[list[int], Any]:
    """Tokens of an answer and its `Finished` or `Failed`."""
    end = await gateway.end(number)
    ids = gateway.tokens[number]
    return ids[:-1] if ids and ids[-1] == END else ids, end


async def answer(
    gateway: Gateway, number: int, form: pb.Grammar, **sampling: object
) -> tuple[list[int], Any]:
    await ask(gateway, number, form, **sampling)
    return await told(gateway, number)


async def test_answers_are_of_their_grammars_in_one_batch_with_free_ones(decoder):
    choices = ["red", "red circle", 'a "b"\n']
    lark = 'start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[1-9][0-9]?/'
    gbnf = 'root ::= "x" ("y" | "z")'
    forms: list[tuple[pb.Grammar, Callable[[str], Any]]] = [
        (grammar("JSON_SCHEMA", SCHEMA), lambda t: jsonschema.validate(json.loads(t), SCHEMA)),
        (grammar("REGEX", "[ab]{3}-?c{1,20}"), lambda t: re.findall(r"\A[ab]{3}-?c{1,20}\Z", t)[0]),
        (grammar("CHOICE", choices), choices.index),
        (grammar("GRAMMAR", lark), json.loads),
        (grammar("GRAMMAR", gbnf), ["xy", "xz"].index),
    ]
    async with Gateway(decoder) as gateway:
        free = [submit_of(n, prompt_of(n), max_tokens=64) for n in range(100, 104)]
        for submit in free:
            await gateway.submit(submit)
        numbered = list(enumerate(forms * 4, 1))
        for number, (form, _) in numbered:
            await ask(gateway, number, form)
        for number, (_, check) in numbered:
            ids, end = await told(gateway, number)
            assert end.reason == pb.Finished.REASON_STOP, end
            check(text_of(ids))
        for submit in free:
            assert (await gateway.end(submit.sequence_id)).reason == pb.Finished.REASON_LENGTH
    await until(decoder.is_idle)


@pytest.mark.parametrize("text", ["Re\u0301sume\u0301", "\u212b", "<think>x", "<|im_end|>1"])
async def test_a_text_is_written_as_it_is_where_the_tokenizer_reads_another(decoder, text):
    """It composes characters, and takes the name of an added token for that token."""
    schema = {"properties": {text: {"const": text}}, "required": [text]}
    form = {"type": "object", **schema, "additionalProperties": False}
    async with Gateway(decoder) as gateway:
        for number, given, read, wanted in (
            (1, grammar("CHOICE", [text]), str, text),
            (2, grammar("REGEX", re.escape(text)), str, text),
            (3, grammar("JSON_SCHEMA", form), json.loads, {text: text}),
            (4, grammar("GRAMMAR", f"start: {json.dumps(text)}"), str, text),
        ):
            ids, end = await answer(gateway, number, given)
            assert end.reason == pb.Finished.REASON_STOP, end
            assert read(text_of(ids)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        '?start: x y?\n?x: "a"\n!y: "::="\n',
        '// root ::= "b"\nstart[capture]: "a" "::="?\n',
        'root ::= "a" |\r\n  "a::="\r\n',
        '# start: "b"\nroot ::= "a" rest?\nrest ::=\n  "::="',
    ],
)
async def test_a_grammar_is_gbnf_where_a_rule_is_written_so_and_else_lark(decoder, text):
    async with Gateway(decoder) as gateway:
        ids, end = await answer(gateway, 1, grammar("GRAMMAR", text))
        assert isinstance(end, pb.Finished), end
        assert text_of(ids) in ("a", "a::=")


async def test_cut_by_max_tokens_is_a_prefix(decoder):
    async with Gateway(decoder) as gateway:
        form = grammar("JSON_SCHEMA", SCHEMA)
        whole, _ = await answer(gateway, 7, form)
        again = submit_of(8, prompt_of(7), seed=7, max_tokens=len(whole) // 2)
        again.grammar.CopyFrom(form)
        await gateway.submit(again)
        end = await gateway.end(8)
    assert end.reason == pb.Finished.REASON_LENGTH
    assert gateway.tokens[8] == whole[: len(whole) // 2]


@pytest.mark.parametrize("begins_after", [[], [5]])
async def test_continued_behind_the_tokens_of_another_decoder(decoder, begins_after):
    async with Gateway(decoder) as gateway:
        form = grammar("JSON_SCHEMA", SCHEMA, begins_after=begins_after)
        fields = {"temperature": 1.0, "min_tokens": 4, "logit_bias": {5: 8.0}}
        _, end = await answer(gateway, 7, form, **fields)
        assert isinstance(end, pb.Finished)
        ids = gateway.tokens[7]
        for number in range(8, 8 + min(len(ids) - 1, cases(3, 12))):
            submit = submit_of(
                number, prompt_of(7), seed=7, max_tokens=400, stop_token_ids=[END], **fields
            )
            submit.grammar.CopyFrom(form)
            submit.generated_token_ids = np.asarray(ids[: number - 7], "<i4").tobytes()
            await gateway.submit(submit)
            assert (await gateway.end(number)).reason == end.reason
            assert gateway.tokens[number] == ids[number - 7 :]
        wrong = submit_of(100, prompt_of(7), max_tokens=400, stop_token_ids=[END])
        wrong.grammar.CopyFrom(grammar("JSON_SCHEMA", SCHEMA))
        wrong.generated_token_ids = np.asarray([END, END], "<i4").tobytes()
        await gateway.submit(wrong)
        assert (await gateway.end(100)).code == "internal_error"
    await until(decoder.is_idle)


async def test_refused_by_name(decoder, caplog):
    """The client hears of it; in the log it is no warning."""
    cases = {
        "not": grammar("JSON_SCHEMA", {"not": {"type": "string"}}),
        "uniqueItems": grammar("JSON_SCHEMA", {"properties": {"a": {"uniqueItems": True}}}),
        "idn-email": grammar("JSON_SCHEMA", {"type": "string", "format": "idn-email"}),
        "look-around": grammar("REGEX", "a(?=b)"),
        "unknown name": grammar("GRAMMAR", "start: nothing"),
        "Expecting property name": grammar("JSON_SCHEMA", "{"),
        "[z-a]": grammar("GRAMMAR", "start: a\na: /[z-a]/\n"),
        "characters": grammar("REGEX", "a" * 300_000),
    }
    async with Gateway(decoder) as gateway:
        for number, (name, form) in enumerate(cases.items(), 1):
            _, end = await answer(gateway, number, form)
            assert end.code == "invalid_grammar" and name in end.message, (name, end)
            assert "\n" not in end.message and "1 |" not in end.message
    await until(decoder.is_idle)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_text_ends_by_the_end_token_that_the_decoder_has_read(decoder):
    """Where its files and the gateway's differ, too."""
    async with Gateway(decoder) as gateway:
        for number, end_ids in enumerate(([], [END, 1], [1]), 1):
            form = grammar("REGEX", "[ab]{3}", end_token_ids=end_ids)
            _, end = await answer(gateway, number, form, stop_token_ids=[])
            assert end.reason == pb.Finished.REASON_STOP
            assert gateway.tokens[number][-1] == END


async def test_formats_that_no_standard_knows_forbid_nothing(decoder):
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "integer", "format": "int32"},
            "kind": {"enum": ["x", "y"], "format": "color"},
        },
        "required": ["format", "kind"],
        "additionalProperties": False,
    }
    async with Gateway(decoder) as gateway:
        ids, _ = await answer(gateway, 1, grammar("JSON_SCHEMA", schema))
        found = json.loads(text_of(ids))
        jsonschema.validate(found, schema)
        assert found["kind"] in ("x", "y")


async def test_grammar_begins_after_the_reasoning(decoder):
    think = added_ids()["</think>"]
    form = grammar("CHOICE", ["yes", "no"], begins_after=[think])
    async with Gateway(decoder) as gateway:
        bias = {think: 3.0}  # of no effect on the fake; the ids come by chance
        ids, end = await answer(gateway, 3, form, max_tokens=490, logit_bias=bias)
        if end.reason == pb.Finished.REASON_LENGTH:
            assert END not in ids and think not in ids
        else:
            at = ids.index(think)
            assert text_of(ids[at + 1 :]) in ("yes", "no") and END not in ids[:at]


async def test_min_tokens_and_ignored_end_ids_do_not_break_the_form(decoder):
    async with Gateway(decoder) as gateway:
        form = grammar("REGEX", "(ab){1,40}")
        short = [(await answer(gateway, n, form))[0] for n in range(1, 9)]
        assert min(map(len, short)) < 12
        for number in range(11, 19):
            ids, end = await answer(gateway, number, form, min_tokens=12)
            assert len(ids) >= 12 and end.reason == pb.Finished.REASON_STOP
            ids, end = await answer(gateway, number + 10, form, stop_token_ids=[])
            assert text_of(ids) == "ab" * 40 and end.reason == pb.Finished.REASON_STOP
        ids, end = await answer(gateway, 50, grammar("CHOICE", ["a"]), min_tokens=12)
        assert text_of(ids) == "a" and end.reason == pb.Finished.REASON_STOP


async def test_preempted_sequences_go_on(model):
    info = {"num_blocks": 40, "block_size": 4, "max_model_len": 128, "max_num_sequences": 8}
    async with Decoder(model_directory=model, **info) as decoder, Gateway(decoder) as gateway:
        form = grammar("REGEX", "[a-z]{40,60}")
        for number in range(1, 9):
            await ask(gateway, number, form)
        for number in range(1, 9):
            ids, end = await told(gateway, number)
            assert end.reason == pb.Finished.REASON_STOP
            assert re.fullmatch("[a-z]{40,60}", text_of(ids))
        assert decoder.engine.engine.stats().num_preemptions > 0
        await until(decoder.is_idle)


async def test_cancelled_while_its_grammar_compiles(decoder):
    form = grammar("JSON_SCHEMA", SCHEMA | {"title": "of no other test, so it is not compiled"})
    async with Gateway(decoder) as gateway:
        submit = submit_of(1, prompt_of(1))
        submit.grammar.CopyFrom(form)
        await gateway.submit(submit)
        await gateway.cancel(1)
        assert (await gateway.end(1)).code == "cancelled"
        ids, _ = await answer(gateway, 2, form)
        json.loads(text_of(ids))
    await until(decoder.is_idle)


async def test_sequences_without_a_grammar_are_planned_ahead_as_before(decoder, monkeypatch):
    sent: list[Any] = []
    send = decoder.engine.send
    monkeypatch.setattr(
        decoder.engine, "send", lambda *messages: (sent.extend(messages), send(*messages))
    )
    async with Gateway(decoder) as gateway:
        await gateway.submit(submit_of(1, prompt_of(1)))
        await gateway.end(1)
    assert [type(m) for m in sent] == [AddSequence]
    assert not sent[0].token_masks


async def test_allowed_ids_and_bad_words(decoder):
    words = [[7], [300, 500], [300, 700, 850]]
    fields: dict[str, Any] = {"bad_words": [pb.TokenIds(ids=word) for word in words]}
    allowed = [7, 100, 300, 500, 700, 850]
    async with Gateway(decoder) as gateway:
        for number in range(1, 6):
            submit = submit_of(number, prompt_of(number), seed=number, max_tokens=100, **fields)
            submit.sampling.allowed_token_ids.extend(allowed)
            await gateway.submit(submit)
            assert (await gateway.end(number)).reason == pb.Finished.REASON_LENGTH
            ids = gateway.tokens[number]
            assert set(ids) <= set(allowed) - {7} and len(set(ids)) > 2
            text = " ".join(map(str, ids)) + " "
            assert "300 500 " not in text and "300 700 850 " not in text
        free = submit_of(6, prompt_of(6), seed=6, max_tokens=8)
        await gateway.submit(free)
        await gateway.end(6)
        free.sequence_id = 7
        free.sampling.bad_words.append(
            pb.TokenIds(ids=[gateway.tokens[6][2], gateway.tokens[6][3]])
        )
        await gateway.submit(free)
        await gateway.end(7)
        assert gateway.tokens[7][:3] == gateway.tokens[6][:3]
        assert gateway.tokens[7][3] != gateway.tokens[6][3]


async def test_demands_that_exclude_each_other(decoder):
    async with Gateway(decoder) as gateway:
        submit = submit_of(1, prompt_of(1))
        submit.grammar.CopyFrom(grammar("CHOICE", ["a", "b"]))
        submit.sampling.allowed_token_ids.append(END)
        await gateway.submit(submit)
        end = await gateway.end(1)
        assert end.code == "no_token_allowed" and "leave no token" in end.message
        wrong: list[dict[str, Any]] = [
            {"allowed_token_ids": [1000]},
            {"bad_words": [pb.TokenIds()]},
            {"bad_words": [pb.TokenIds(ids=[5])] * 513},
        ]
        for number, fields in enumerate(wrong, 2):
            await gateway.submit(submit_of(number, prompt_of(1), **fields))
            assert (await gateway.end(number)).code == "invalid_request"
    await until(decoder.is_idle)


async def test_a_mask_process_and_its_successor_know_whose_turn_it_is(decoder, monkeypatch):
    (process,) = decoder.masks.processes
    sent, send = [], FrontChannel.send

    def noted(channel, *messages):
        for message in messages:
            if isinstance(message, Follow):
                sent.append((message.tenant, message.background))
                if len(sent) == 1:
                    process.process.kill()
        send(channel, *messages)

    async with Gateway(decoder) as gateway:
        await answer(gateway, 1, grammar("REGEX", "a{3}"))
        monkeypatch.setattr(FrontChannel, "send", noted)
        submit = submit_of(2, prompt_of(2), stop_token_ids=[END])
        submit.grammar.CopyFrom(grammar("REGEX", "a{7}"))
        submit.tenant, submit.background = "a/batch", True
        await gateway.submit(submit)
        _, end = await told(gateway, 2)
        assert isinstance(end, pb.Finished), end
    assert sent == 2 * [("a/batch", True)]
