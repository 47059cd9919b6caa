"""Grammars that end what compiles them: their request fails, and nothing else notices."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from benchmarks import grammar_fuzz
from benchmarks.grammar_hostile import dies
from services.common.errors import from_code
from services.common.pb import decoder_pb2 as pb
from services.common.process.channel import FrontChannel
from services.common.process.engine_watch import is_stopped
from services.common.process.work_limits import SLACK_BYTES, resident_bytes
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.grammar_memory import MAX_COMPILATION_BYTES
from services.decoder.masks.messages import LANES
from services.decoder.masks.rows import FILLING, QUICK, SLOW
from tests.cases import cases, first
from tests.compiler_process import compiler_process
from tests.contract.test_structured_output import SCHEMA, answer, ask, grammar, text_of, told
from tests.decoder_service_harness import Decoder, Gateway, prompt_of, submit_of, until
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import (
    added_ids,
    tokenizer_json,
    vocab_size,
    write_text_model_directory,
)

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"
COMPILING_BYTES = 16 << 20  # which a compilation takes for its time
CPU_S = LANES[-1].cpu_s
END = added_ids()["<|im_end|>"]
(A,) = Tokenizer.from_str(tokenizer_json()).encode("a").ids
TEXT = GrammarSource("json_schema", '{"type": "string"}')


def schema_chain(count: int, form: str) -> GrammarSource:
    """`$defs`, each of which refers to the next one."""

    def link(number: int) -> dict:
        reference = {"$ref": f"#/$defs/d{number}"}
        wrapped = {
            "properties": {"type": "object", "properties": {"a": reference}, "required": ["a"]},
            "items": {"type": "array", "items": reference},
            "allOf": {"allOf": [reference]},
            "bare": reference,
        }
        return wrapped[form]

    definitions = {f"d{n}": link(n + 1) for n in range(count)} | {f"d{count}": {"type": "null"}}
    return GrammarSource("json_schema", json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"}))


def rule_chain(count: int, first: str, assign: str) -> GrammarSource:
    rules = [f"r{n}{assign} r{n + 1}" for n in range(count)]
    return GrammarSource(
        "grammar", "\n".join([f"{first}{assign} r0", *rules, f'r{count}{assign} "a"'])
    )


def optional(count: int) -> GrammarSource:
    properties = {f"p{number}": {"type": "integer"} for number in range(count)}
    return GrammarSource("json_schema", json.dumps({"type": "object", "properties": properties}))


# An Earley parser keeps all ways in which a text may be cut into parts.
AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | t\nt: t t | "a" | "b"\n'

KILLERS = {
    "properties": schema_chain(2000, "properties"),
    "items": schema_chain(2400, "items"),
    "allOf": schema_chain(2800, "allOf"),
    "bare": schema_chain(5000, "bare"),
    "lark": rule_chain(6000, "start", ":"),
    "gbnf": rule_chain(4000, "root", " ::="),
    "optional": optional(7000),
}


def several(count: int) -> GrammarSource:
    """A grammar of schemas, as the gateway writes it for tools."""
    small = {"type": "object", "properties": {"city": {"type": "string"}}}
    large = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}
    rules = [f"r{n}: %json {json.dumps(schema)}" for n, schema in enumerate((small, large, small))]
    return GrammarSource("grammar", "\n".join(["start: r0 | r1 | r2", *rules]))


def json_schema(**schema: object) -> GrammarSource:
    return GrammarSource("json_schema", json.dumps(schema))


CPU, STACK, MEMORY = "0.5 s of CPU time", "8 MiB of stack", "64 MiB of memory"
LARGE = {
    "properties": (optional(7000), CPU, "7,000 properties"),
    "references": (schema_chain(2400, "items"), STACK, "2,401 references"),
    "rules": (rule_chain(6000, "start", ":"), STACK, "6,002 lines"),
    "multipleOf": (json_schema(type="integer", multipleOf=999_983), CPU, "multipleOf 999983"),
    "patternProperties": (
        json_schema(patternProperties={f"^a{n}_": {} for n in range(900)}), CPU,
        "900 patternProperties",
    ),
    "enumeration": (json_schema(enum=[[n] for n in range(30_000)]), CPU, "30,000 values"),
    "a regular expression": (GrammarSource("regex", r"[\w\d]é+" * 12_000), MEMORY, "96,000 char"),
    "groups": (GrammarSource("regex", "(" * 200_000), "to compile; it has 200,000 characters"),
    "one of several schemas": (several(7000), CPU, "3 schemas", '"p0", "p1"', "7,000 properties"),
    "a reference to itself": (json_schema(**{"$ref": "#"}), "no text fits it", "reference"),
    "a reference to nothing": (json_schema(**{"$ref": "#/$defs/a"}), "'/$defs/a'"),
}  # fmt: skip

# Lexemes that take all that should follow them.
GREEDY = {
    "a mask": 'start: R "x"\nR: /[^x]{3}/ "x"+',
    "the first mask": 'start: R{50,51}\nR: "z" "z"*',
    "within": 'start: %lark {\n%llguidance {"no_forcing": false}\nstart: R "x"\nR: "ab" "x"+\n}',
    "an option": '%llguidance {"no_forcing": false}\nstart: R "x"\nR: "ab" "x"+ // "',
    "GBNF": 'root ::= r1 "x"\nr1 ::= r2 "x"*\nr2 ::= [^x]{3}',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_text_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiler(model):
    with compiler_process(model, vocab_size(), (END,)) as compiler:
        yield compiler


def test_what_ends_the_compiler_is_refused_and_the_next_one_compiles(compiler):
    for name, task in KILLERS.items():
        started = time.monotonic()
        verdict = compiler.compile(task)
        assert verdict.died and verdict.error, name
        assert verdict.cpu_s < CPU_S + 0.5, (name, time.monotonic() - started)
        assert not compiler.compile(TEXT).error


@pytest.mark.parametrize("name", LARGE)
def test_the_error_of_a_large_grammar_says_what_is_large(compiler, name):
    task, *words = LARGE[name]
    error = compiler.compile(task).error
    assert all(word in error for word in words), error
    assert len(error) < 400


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text", first(2, ["(a|b)*a(a|b){500}", ".*" * 2000, "^[^X a-z]{5000}$", "(" * 9000])
)
def test_hostile_regexes_end_in_time(compiler, text):
    verdict = compiler.compile(GrammarSource("regex", text))
    assert verdict.cpu_s < CPU_S + 0.5
    assert not compiler.compile(TEXT).error


def test_the_time_of_a_grammar_is_its_own(compiler):
    """Although one process compiles many."""
    assert not compiler.compile(TEXT).error
    fork, earlier_s = compiler.pid, 0.0
    while earlier_s < 1.0:
        earlier_s += compiler.compile(optional(1000)).cpu_s
    assert compiler.pid == fork
    verdict = compiler.compile(KILLERS["optional"])
    assert verdict.died and verdict.cpu_s < CPU_S + 0.5


def test_memory_is_limited(compiler):
    compiler.memory_bytes(-SLACK_BYTES)
    assert compiler.compile(optional(1000)).error
    compiler.memory_bytes(MAX_COMPILATION_BYTES)
    assert not compiler.compile(optional(1000)).error


def test_a_fork_that_is_killed_or_hangs_is_replaced(model):
    with compiler_process(model, vocab_size(), (END,), wall_s=5.0) as compiler:
        assert not compiler.compile(TEXT).error
        os.kill(compiler.pid, signal.SIGSTOP)
        assert compiler.compile(TEXT).died
        assert not compiler.compile(TEXT).error
        os.kill(compiler.pid, signal.SIGKILL)
        compiler.compile(TEXT)  # which may find out only now
        assert not compiler.compile(TEXT).error


# The fork closes its channel, gets no CPU for a while, and ends by the signal of its CPU limit.
ENDS_LATE = """
import os, signal, time
from services.decoder.masks.compile_worker import Compiler
from services.decoder.masks.grammar import GrammarSource

class EndsLate(Compiler):
    def _serve(self, end):
        end.recv(1 << 16)
        end.close()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGPROF)

print(EndsLate(None).compile(GrammarSource("regex", "a")).error)
"""


def test_the_reason_of_a_death_is_told_however_late_the_fork_ends():
    command = [sys.executable, "-c", ENDS_LATE]
    said = subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True, text=True)
    assert "0.5 s of CPU time" in said.stdout


@pytest.fixture
async def decoder(model):
    async with Decoder(
        model_directory=model, num_blocks=512, max_model_len=512, max_num_sequences=32
    ) as decoder:
        yield decoder


async def test_killers_end_nothing_but_their_requests(decoder):
    async with Gateway(decoder) as gateway:
        free = submit_of(99, prompt_of(1), max_tokens=400)
        await gateway.submit(free)
        for number, task in enumerate(KILLERS.values(), 1):
            kind = "JSON_SCHEMA" if task.kind == "json_schema" else "GRAMMAR"
            await ask(gateway, number, grammar(kind, task.text))
        for number in range(1, len(KILLERS) + 1):
            _, end = await told(gateway, number)
            assert end.code == "invalid_grammar", end
        ids, end = await answer(gateway, 50, grammar("JSON_SCHEMA", SCHEMA))
        jsonschema.validate(json.loads(text_of(ids)), SCHEMA)
        assert (await gateway.end(99)).reason == pb.Finished.REASON_LENGTH
    await until(decoder.is_idle)


@pytest.mark.nightly
async def test_a_new_schema_waits_for_no_hostile_grammar_of_the_same_tenant(decoder):
    """Each of twelve takes all the CPU time that a compilation may take."""
    hostile = range(1, 13)
    async with Gateway(decoder) as gateway:
        await ask(gateway, 100, grammar("JSON_SCHEMA", {"type": "string", "minLength": 300}))
        await generated(decoder, 1, 2)
        for number in hostile:
            await ask(gateway, number, grammar("GRAMMAR", dies(number)))
        _, end = await answer(gateway, 50, grammar("JSON_SCHEMA", SCHEMA))
        assert isinstance(end, pb.Finished), end
        assert sum(number in gateway.ends for number in hostile) < 6
        for number in hostile:
            _, end = await told(gateway, number)
            assert end.code in ("invalid_grammar", "overloaded"), end
        (process,) = decoder.masks.processes
        assert process.link == 1, "one process ended"
        _, end = await told(gateway, 100)
        assert isinstance(end, pb.Finished), end
    await until(decoder.is_idle)


async def test_a_grammar_that_has_died_twice_is_refused_at_once(decoder):
    form = grammar("GRAMMAR", dies(0))
    async with Gateway(decoder) as gateway:
        for number in range(1, 5):
            _, end = await answer(gateway, number, form)
            assert end.code == "invalid_grammar", end
    assert decoder.metric("triptych_decoder_grammar_compile_seconds_count") == 2


async def test_a_compile_process_that_is_killed_is_replaced(decoder):
    async with Gateway(decoder) as gateway:
        _, end = await answer(gateway, 1, grammar("REGEX", "a{3}"))
        assert end.reason == pb.Finished.REASON_STOP
        process = decoder.masks.compilers.process.process
        process.kill()
        await process.wait()
        _, end = await answer(gateway, 2, grammar("REGEX", "a{4}"))
        assert isinstance(end, pb.Finished), end


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_a_grammar_whose_process_is_killed_is_tried_once_more(
    decoder, num_deaths, monkeypatch
):
    compilers, sent, send = decoder.masks.compilers, [], FrontChannel.send

    def noted(channel, *messages):
        send(channel, *messages)
        sent.extend(each for each in messages if isinstance(each, GrammarSource))

    async with Gateway(decoder) as gateway:
        await answer(gateway, 1, grammar("REGEX", "a{3}"))
        stop_lanes(compilers.process.process.pid)
        monkeypatch.setattr(FrontChannel, "send", noted)
        await ask(gateway, 2, grammar("REGEX", "a{5}"))
        decoder.launcher.num_stopped = num_deaths - 1  # no other but the last compiles it
        for number in range(num_deaths):
            # A process that ends before it is sent the grammar is not counted.
            await until(lambda number=number: len(sent) == number + 1)
            killed = compilers.process.process
            killed.kill()
            await until(lambda killed=killed: compilers.process.process is not killed)
        _, end = await told(gateway, 2)
        assert isinstance(end, pb.Finished) if num_deaths == 1 else end.code == "process_lost"
        _, end = await answer(gateway, 3, grammar("REGEX", "a{6}"))
        assert isinstance(end, pb.Finished), end


@pytest.mark.parametrize("of", ["compilers", "masks"])
async def test_a_process_that_cannot_be_started_is_started_later(decoder, of):
    """As while the machine has no memory or file descriptors left."""
    (process,) = decoder.masks.processes
    async with Gateway(decoder) as gateway:
        await answer(gateway, 1, grammar("REGEX", "a{3}"))
        decoder.launcher.num_refusals = 1
        compilers = decoder.masks.compilers.process
        killed = compilers.process if of == "compilers" else process.process
        killed.kill()
        await killed.wait()
        await answer(gateway, 2, grammar("REGEX", "a{4}"))  # may be lost with its process
        _, end = await answer(gateway, 3, grammar("REGEX", "a{5}"))
        assert end.reason == pb.Finished.REASON_STOP
    assert len(decoder.launcher.refused) == 1


def stop_lanes(pid: int) -> None:
    """Stops a compile process and its lanes, which are its children."""
    children_of = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for number in (pid, *map(int, children_of)):
        os.kill(number, signal.SIGSTOP)


async def generated(decoder: Decoder, count: int, least: int) -> None:
    """Waits until as many sequences run with more than `least` tokens each. A client learns of
    them late: when it has read those, a sequence may be over. The engine begins once all are
    known to their mask processes and goes slowly, or one would be over before the last begins.
    """
    running = decoder.engine.running

    def numbers() -> list[int]:
        processes = decoder.masks.processes
        return [len(each.generated) for p in processes for each in p.sequences.values()]

    running.clear()
    await until(lambda: len(numbers()) == count)
    decoder.runner.on_execute = lambda _: running.clear()
    async with asyncio.timeout(PATIENCE_S):
        while min(numbers()) <= least:
            running.set()
            await asyncio.sleep(0.02)
    decoder.runner.on_execute = None
    running.set()


async def stop_in_work(process, sequence: int) -> None:
    process.process.send_signal(signal.SIGSTOP)
    await until(lambda: is_stopped(process.process.pid))
    process.marks.set(FILLING, sequence)
    process.marks.set(QUICK, 0)
    process.marks.set(SLOW, 0)


async def test_a_grammar_whose_process_is_killed_where_no_other_can_be_started(decoder):
    compilers = decoder.masks.compilers
    async with Gateway(decoder) as gateway:
        await answer(gateway, 1, grammar("REGEX", "a{3}"))
        stop_lanes(compilers.process.process.pid)
        await ask(gateway, 2, grammar("REGEX", "a{5}"))
        await until(lambda: compilers.num_in_work == 1)
        with decoder.launcher.refusing():
            compilers.process.process.kill()
            _, end = await told(gateway, 2)
        assert end.code == "process_lost" and from_code(end.code, "").retryable
        _, end = await answer(gateway, 3, grammar("REGEX", "a{5}"))
        assert isinstance(end, pb.Finished), end


async def test_where_no_mask_process_can_be_started_another_decoder_is_tried(decoder):
    decoder.launcher.retry_s = 0.01
    (process,) = decoder.masks.processes
    async with Gateway(decoder) as gateway:
        await ask(gateway, 1, grammar("JSON_SCHEMA", {"type": "string", "minLength": 300}))
        await generated(decoder, 1, 2)
        with decoder.launcher.refusing():
            process.process.kill()
            _, end = await told(gateway, 1)
        assert end.code == "unavailable" and from_code(end.code, "").retryable
        _, end = await answer(gateway, 2, grammar("REGEX", "a{5}"))
        assert isinstance(end, pb.Finished), end


async def test_where_one_mask_process_cannot_be_started_the_others_get_what_comes(model):
    async with Decoder(
        model_directory=model, num_blocks=512, max_model_len=512, num_processes=2
    ) as decoder, Gateway(decoder) as gateway:  # fmt: skip
        ended, other = decoder.masks.processes
        await until(lambda: ended.is_ready and other.is_ready)
        with decoder.launcher.refusing():
            ended.process.kill()
            await until(lambda: ended.num_failed_starts)
            for number in range(1, 4):
                _, end = await answer(gateway, number, grammar("REGEX", "a{5}"))
                assert isinstance(end, pb.Finished), end
        await until(lambda: ended.is_ready)
        assert not ended.num_failed_starts


async def test_sequences_of_a_mask_process_that_cannot_be_started_go_on_in_another(model):
    schema = {"type": "string", "minLength": 300, "maxLength": 320}
    async with Decoder(
        model_directory=model, num_blocks=512, max_model_len=512, num_processes=2
    ) as decoder, Gateway(decoder) as gateway:  # fmt: skip
        decoder.launcher.retry_s = 0.01
        await until(lambda: all(process.is_ready for process in decoder.masks.processes))
        numbers = range(1, 5)
        for number in numbers:
            await ask(gateway, number, grammar("JSON_SCHEMA", schema), temperature=1.0)
        await generated(decoder, 4, 2)
        ended, other = decoder.masks.processes
        assert len(ended.sequences) == len(other.sequences) == 2
        with decoder.launcher.refusing():
            ended.process.kill()
            for number in numbers:
                ids, end = await told(gateway, number)
                assert isinstance(end, pb.Finished), end
                jsonschema.validate(json.loads(text_of(ids)), schema)
        assert ended.num_failed_starts >= 3 and not ended.sequences


async def test_sixteen_sequences_outlive_their_mask_process(decoder):
    """Killed three times, wherever it happens to be: at most the one in work twice may fail."""
    schema = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
    (process,) = decoder.masks.processes
    async with Gateway(decoder) as gateway:
        numbers = range(1, 17)
        for number in numbers:
            await ask(gateway, number, grammar("JSON_SCHEMA", schema), temperature=1.0)
        for least in (1, 12, 24):
            await gateway.until(
                lambda least=least: (
                    sum(len(gateway.tokens.get(n, ())) for n in numbers) >= 16 * least
                )
            )
            while process.channel is None:  # noqa: ASYNC110 - it is being started
                await asyncio.sleep(0.01)
            process.process.kill()
        failed = 0
        for number in numbers:
            ids, end = await told(gateway, number)
            if isinstance(end, pb.Failed):
                assert end.code == "invalid_grammar", end
                failed += 1
            elif end.reason == pb.Finished.REASON_STOP:
                jsonschema.validate(json.loads(text_of(ids)), schema)
        assert failed <= 1
    await until(decoder.is_idle)


async def test_a_sequence_in_work_at_two_deaths_fails_alone(decoder):
    (process,) = decoder.masks.processes
    form = grammar("JSON_SCHEMA", {"type": "string", "minLength": 300})
    async with Gateway(decoder) as gateway:
        for number in (1, 2, 3):
            await ask(gateway, number, form)
        for least in (1, 40):
            await until(lambda: process.is_ready)
            await generated(decoder, 3, least)
            await stop_in_work(process, min(process.sequences))  # the first submission
            link = process.link
            process.process.kill()
            await until(lambda link=link: process.link != link)
        _, end = await told(gateway, 1)
        assert isinstance(end, pb.Failed) and end.code == "invalid_grammar"
        for number in (2, 3):
            _, end = await told(gateway, number)
            assert isinstance(end, pb.Finished)


async def test_a_mask_process_that_hangs_is_replaced(decoder):
    decoder.masks.hang_s = 3.0
    (process,) = decoder.masks.processes
    async with Gateway(decoder) as gateway:
        await ask(gateway, 1, grammar("JSON_SCHEMA", SCHEMA))
        await generated(decoder, 1, 2)
        process.process.send_signal(signal.SIGSTOP)
        ids, end = await told(gateway, 1)
        assert end.reason == pb.Finished.REASON_STOP
        jsonschema.validate(json.loads(text_of(ids)), SCHEMA)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting(model):
    """A decoder for the tests that end none of its processes."""
    async with Decoder(model_directory=model, num_blocks=512, max_model_len=512) as decoder:
        yield decoder


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", GREEDY)
async def test_a_lexeme_that_takes_what_should_follow_it_ends_nothing(lasting, name):
    """It is never complete, so that its text goes on."""
    (process,) = lasting.masks.processes
    async with Gateway(lasting) as gateway:
        ids, end = await answer(gateway, 1, grammar("GRAMMAR", GREEDY[name]), max_tokens=24)
    assert isinstance(end, pb.Finished) and end.reason == pb.Finished.REASON_LENGTH, end
    assert len(ids) == 24
    assert process.link == 1, "one process ended"


async def test_no_mask_process_is_ended_over_one_grammar(model):
    """Its thread is taken: the others' masks go on there, what waits goes on in its successor."""
    long = grammar("JSON_SCHEMA", {"type": "string", "minLength": 3000})
    taking = grammar("GRAMMAR", AMBIGUOUS)
    async with Decoder(
        model_directory=model, num_blocks=2048, max_model_len=2048, max_work_s=0.1
    ) as decoder, Gateway(decoder) as gateway:  # fmt: skip
        (process,) = decoder.masks.processes
        for number in (1, 2):
            await ask(gateway, number, long, max_tokens=1200)
        await generated(decoder, 2, 1)
        submit = submit_of(3, prompt_of(3), max_tokens=400, stop_token_ids=[END])
        submit.grammar.CopyFrom(taking)
        submit.generated_token_ids = 160 * np.int32(A).tobytes()  # takes seconds to read again
        await gateway.submit(submit)
        _, end = await told(gateway, 3)
        assert isinstance(end, pb.Failed) and end.code == "invalid_grammar", end
        assert decoder.masks.processes != [process]
        for number in (1, 2):
            _, end = await told(gateway, number)
            assert isinstance(end, pb.Finished), end
        await until(lambda: process.process.returncode is not None)  # with its last sequence
        assert process.link == 1, "it was started again"
        _, end = await answer(gateway, 4, taking)
        assert isinstance(end, pb.Failed) and end.code == "invalid_grammar"
        _, end = await answer(gateway, 5, grammar("REGEX", "a{5}"))
        assert isinstance(end, pb.Finished), end
        (successor,) = decoder.masks.processes
        assert successor.link == 2, "the grammar was tried again"
    await until(decoder.is_idle)


def substrings(number: int) -> str:
    """A grammar of 3.5 MiB that compiles in 0.02 s; each number's is another one."""
    words = " ".join(f"word{number}{n}" for n in range(2000))[:12_000]
    return f'start: (S "."){{300}}\nS: %regex {json.dumps({"substring_chars": words})}'


def goes_first(pid: int) -> bool:
    """Whether the kernel ends it before the decoder's other processes when memory ends."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 900


@pytest.mark.nightly
async def test_the_grammars_of_all_sequences_are_bounded(model):
    """Those that find no memory wait, or are an overload."""
    most, count = 32 << 20, 48
    async with Decoder(
        model_directory=model, num_blocks=4096, max_model_len=512, max_num_sequences=48,
        grammar_bytes=most,
    ) as decoder, Gateway(decoder) as gateway:  # fmt: skip
        await answer(gateway, 100, grammar("REGEX", "a{5}"))
        (process,) = decoder.masks.processes
        assert goes_first(process.process.pid)
        first, sizes = resident_bytes(process.process.pid), list[int]()

        async def watch():
            while True:
                sizes.append(resident_bytes(process.process.pid) - first)
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        for number in range(count):
            await ask(gateway, number, grammar("GRAMMAR", substrings(number)))
        ends = [(await told(gateway, number))[1] for number in range(count)]
        watching.cancel()
        assert process.link == 1, "one process ended"
        assert most // 2 < max(sizes) < most + COMPILING_BYTES, [n >> 20 for n in sizes[::20]]
        finished = [end for end in ends if isinstance(end, pb.Finished)]
        assert {end.code for end in ends if end not in finished} <= {"overloaded"}
        assert len(finished) >= 6
    await until(decoder.is_idle)


@pytest.mark.thorough
def test_random_grammars_end_no_mask_process():
    """Without any bound on their texts: what the compile process lets through can be followed."""
    count = cases(28, 60)
    found = grammar_fuzz.run(DEMO_MODEL, count, 1, bypass=True)
    assert not found["deaths"], found
    assert sum(found["counts"].values()) == count
    assert sum(n for name, n in found["counts"].items() if name.startswith("accepted")) > count // 4
    assert found["most"]["again_s"][0] < 4 * CPU_S and found["most"]["mask_s"][0] < 4 * CPU_S, found
