"""The order of prompts of a model for search: requests share the device, and none waits forever."""

import itertools
from collections import Counter

import numpy as np
import pytest

from services.common.pb import decoder_pb2 as pb
from services.decoder.engine.schedule.chunk import Chunk
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.front.submission import read_submit
from tests.fake_runner import add_message, runner_info
from tests.integrity import check_scheduler
from tests.unit.decoder.test_scheduler import scheduler_of

BUDGET = 960  # tokens of a step


class Search:
    """A scheduler of a model for search, whose prompts have random tokens."""

    def __init__(self, task: str = "embed", rows: int = 256) -> None:
        self.scheduler: Scheduler = scheduler_of(
            blocks=8000, rows=rows, budget=BUDGET, length=8192, task=task
        )
        self.rng = np.random.default_rng(0)
        self.steps = 0
        self.done: dict[int, int] = {}  # step of the end of each sequence, by its number
        self.tokens = Counter[str]()  # computed tokens by request
        self.number = 0
        self.chunks: list[Chunk] = []  # of the last step

    def ask(self, request: str, *lengths: int, priority: int = 0, tenant: str = "") -> list[int]:
        """Adds the prompts of a request, and returns their numbers."""
        numbers: list[int] = []
        for length in lengths:
            self.number += 1
            ids = self.rng.integers(0, 97, length).tolist()
            message = add_message(
                self.number, ids, max_tokens=1, priority=priority, tenant=tenant, request=request
            )
            self.scheduler.add(Sequence(message))
            numbers.append(self.number)
        return numbers

    def step(self) -> int:
        """Runs a step whose results come back at once, and returns its number of tokens."""
        batch = self.scheduler.schedule()
        self.chunks = batch.chunks
        self.steps += 1
        for chunk in batch.chunks:
            sequence = chunk.sequence
            self.tokens[sequence.message.request] += chunk.length
            self.scheduler.blocks.register(sequence)
            if chunk.samples:
                sequence.num_in_flight -= 1
                self.done[sequence.sequence_id] = self.steps
                self.scheduler.finish(sequence)
        if self.steps % 10 == 0:
            check_scheduler(self.scheduler)
        return batch.num_tokens

    def wait(self, number: int, at_most: int = 10_000) -> int:
        """Runs steps until a sequence is done, and returns how many it took."""
        began = self.steps
        while number not in self.done:
            assert self.steps < began + at_most
            self.step()
        return self.done[number] - began


def test_a_single_query_does_not_wait_for_the_inputs_of_long_requests() -> None:
    search = Search()
    for request in range(8):
        search.ask(f"batch {request}", *[500] * 16)
    for _ in range(20):
        assert search.step() == BUDGET  # other requests use the whole step
        (query,) = search.ask("query", 30)
        assert search.wait(query) == 1
    assert len([number for number in search.done if number <= 128]) > 30


def test_a_single_query_does_not_wait_for_the_last_requests_of_a_crowd() -> None:
    """Clients that ask for more as soon as they have an answer, until all of them stop."""
    search = Search()
    waiting = {n: search.ask(f"batch {n}", *[500] * 16) for n in range(8)}
    asked, query, longest = 8, 0, 0
    while waiting:
        search.step()
        if query in search.done and search.steps % 2:
            query = 0
        if not query:
            (query,) = search.ask(f"query {search.steps}", 30)
            longest = max(longest, search.wait(query))
        for request in [n for n, each in waiting.items() if set(each) <= search.done.keys()]:
            del waiting[request]
            if asked < 30:
                waiting[asked] = search.ask(f"batch {asked}", *[500] * 16)
                asked += 1
    assert longest == 1


@pytest.mark.parametrize("length", [100, 500, 3000])
def test_a_long_request_delays_no_query_and_gets_an_even_share(length: int) -> None:
    """Beside clients that ask for more as soon as they have an answer, and fill every step."""
    search, tokens = Search(), 48_000
    giant = search.ask("giant", *[length] * (tokens // length))
    waiting = {n: search.ask(f"batch {n}", *[500] * 8) for n in range(8)}
    asked, asked_at, query = 8, 0, 0
    while not set(giant) <= search.done.keys():
        assert search.steps < 700
        if search.steps % 4 == 0:
            (query,) = search.ask(f"query {search.steps}", 30)
            asked_at = search.steps
        assert search.step() == BUDGET
        assert search.done[query] == asked_at + 1
        for request in [n for n, each in waiting.items() if set(each) <= search.done.keys()]:
            del waiting[request]
            waiting[asked] = search.ask(f"batch {asked}", *[500] * 8)
            asked += 1
    # Nine requests and some queries share the device until the share of the long one is due. Then
    # it has half of each step.
    assert search.steps <= (10 + 2) * tokens / BUDGET


def test_an_overdue_prompt_has_one_chunk_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunk ends before the prompt does if recurrent states are saved there."""
    search = Search()
    states = search.scheduler.blocks.states
    monkeypatch.setattr(
        states, "plan", lambda _, start, end, admitted: (end - (end - start) // 2, ())
    )
    search.ask("long", *[200] * 40)
    found, num_overdue = Counter[int](), 0
    for step in range(60):
        search.ask(f"short {step}", 100, 100, 100, 100)
        num_overdue += search.scheduler.prefills.waiting.has_overdue
        search.step()
        found.update(Counter(c.sequence.sequence_id for c in search.chunks).values())
    assert num_overdue > 10 and set(found) == {1}


def test_requests_that_were_aborted_do_not_count() -> None:
    """The device does not compute their tokens, so virtual time does not wait for these."""
    search = Search()
    aborted = [search.ask(f"aborted {n}", *[500] * 16) for n in range(8)]
    search.step()
    running = {s.sequence_id: s for s in [*search.scheduler.running()]}
    running |= {s.sequence_id: s for s in search.scheduler.prefills.waiting}
    first = search.ask("first", *[500] * 16)
    for number in running.keys() & set(itertools.chain(*aborted)):
        search.scheduler.finish(running[number])
    for _ in range(4):
        search.step()
    second = search.ask("second", *[500] * 9)
    search.wait(first[-1])
    assert len(set(second) & search.done.keys()) <= 1  # what the last step had room for


def test_with_a_chat_model_prompts_are_computed_in_the_order_of_arrival() -> None:
    search = Search("generate")
    for request in range(8):
        search.ask(f"batch {request}", *[500] * 16)
    search.step()
    (query,) = search.ask("query", 30)
    assert search.wait(query) > 60


def test_equal_requests_are_complete_in_the_order_of_arrival() -> None:
    """Requests that advanced at once would all be complete late, and at the same time."""
    search = Search()
    requests = [search.ask(f"{request}", *[500] * 16) for request in range(4)]
    ends: list[int] = []
    for numbers in requests:
        search.wait(numbers[-1])
        ends.append(max(search.done[number] for number in numbers))
    each = 16 * 500 / BUDGET
    assert all(abs(end - each * (place + 1)) <= 2 for place, end in enumerate(ends))


def test_a_request_with_few_prompts_passes_long_ones() -> None:
    search = Search()
    search.ask("many", *[500] * 64)
    for _ in range(5):
        search.step()
    few = search.ask("few", *[500] * 4)
    assert search.wait(few[-1]) <= 4
    assert search.tokens["many"] > 0


def test_no_request_is_complete_later_than_if_all_shared_evenly() -> None:
    search = Search()
    lengths = {f"{request}": [200 + 100 * request] * (4 + 3 * request) for request in range(8)}
    numbers = {request: search.ask(request, *each) for request, each in lengths.items()}
    while search.scheduler.has_work:
        search.step()
    totals = {request: sum(each) for request, each in lengths.items()}
    for request, total in totals.items():
        shared = sum(min(total, other) for other in totals.values())
        end = max(search.done[number] for number in numbers[request])
        assert end <= shared / BUDGET + 2


def test_no_prompt_waits_forever_for_short_ones() -> None:
    """Short requests alone fill every step, and a long one still gets its share."""
    search = Search()
    (long,) = search.ask("long", 4000)
    for index in range(200):
        for part in range(32):
            search.ask(f"short {index} {part}", 30)
        search.step()
        if long in search.done:
            break
    # First the others compute as much as if each of 33 requests had 4,000 tokens, then it gets half
    # of each step.
    assert 100 < search.done[long] <= 33 * 4000 / BUDGET + 2 * 4000 / BUDGET + 2


def test_a_query_passes_long_documents_that_were_begun() -> None:
    search = Search()
    search.ask("documents", *[6000] * 4)
    search.step()
    search.step()
    (query,) = search.ask("query", 30)
    assert search.wait(query) == 1


def test_priority_comes_first() -> None:
    search = Search()
    search.ask("batch", *[500] * 64)
    search.step()
    lengths = [900] * 4
    numbers = search.ask("urgent", *lengths, priority=-1)
    assert search.wait(numbers[-1]) <= -(-sum(lengths) // BUDGET) + 1


@pytest.mark.parametrize("rows", [4, 256])
def test_tenants_still_share_by_rows(rows: int) -> None:
    search = Search(rows=rows)
    search.ask("flood", *[300] * 200, tenant="flood")
    for _ in range(5):
        search.step()
    (query,) = search.ask("query", 300, tenant="quiet")
    assert search.wait(query) <= 2


def test_cached_tokens_count_as_computed() -> None:
    """The tokens that a request's prompts have in common are cheap. Virtual time still advances by
    all of them, so that a request that comes later does not pass an equal one.
    """
    search = Search()
    shared = search.rng.integers(0, 97, 400).tolist()

    def pairs(request: str) -> list[int]:
        numbers: list[int] = []
        for _ in range(100):
            search.number += 1
            ids = shared + search.rng.integers(0, 97, 40).tolist()
            message = add_message(search.number, ids, max_tokens=1, request=request)
            search.scheduler.add(Sequence(message))
            numbers.append(search.number)
        return numbers

    early = pairs("early")
    search.step()
    search.step()
    late = pairs("late")
    search.wait(early[-1])
    assert sum(number in search.done for number in late) <= 25


@pytest.mark.parametrize(("task", "request_id"), [("rank", "req-1"), ("generate", "")])
def test_the_prompts_of_a_search_belong_to_the_clients_request(task: str, request_id: str) -> None:
    submit = pb.Submit(
        sequence_id=5, request_id="req-1",
        prompt_token_ids=np.arange(4, dtype="<i4").tobytes(),
        sampling=pb.SamplingParams(top_p=1.0, repetition_penalty=1.0, max_tokens=1),
    )  # fmt: skip
    message, _, _ = read_submit(submit, 7, runner_info(task=task), ())
    assert message.request == request_id


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    search = Search(rows=4)
    search.ask("done", *[50] * 8)
    numbers = search.ask("aborted", *[50] * 8)
    search.step()
    fair_queue = search.scheduler.prefills.waiting._fair_queue
    assert fair_queue is not None and len(fair_queue._flows) == 2
    prefills = search.scheduler.prefills
    for sequence in [*search.scheduler.running(), *prefills.waiting]:
        if sequence.sequence_id in numbers:
            search.scheduler.finish(sequence)
    while search.scheduler.has_work:
        search.step()
    assert not fair_queue._flows
