"""The two engines of a pod, as far as time is concerned, and the GPU that they may share.

An engine has at most one piece of GPU work in progress, measured in seconds that it would take
alone. Two busy engines on one GPU halve each other's rate. The decoder's scheduler is the real one
in short: a step holds every decoding row and prompt chunks up to a budget of tokens and of time, a
prompt longer than the budget leaves half of it to those behind, and rows need KV; what is simpler:
no prefix cache, no tenants, and a prompt starts when all its images are there. As long as no row
ends and nothing arrives, decode steps are computed in one leap.
"""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from benchmarks.simulation.events import Clock
from benchmarks.simulation.requests import Request
from benchmarks.simulation.stages import StageCosts, linear_table

Finished = Callable[[Request], None]
_WATERMARK = 0.01  # of the KV, left free by admissions
_LOOK_AHEAD = 64  # queued images that may fill a batch
# As in services/decoder/engine: of a step's error, what the next prediction corrects; how much
# longer a step may last for the only prompt there is.
_LEARNED = 0.1
_ALONE = 4


class Gpu:
    """One GPU and the engines on it."""

    def __init__(self, sharing: float) -> None:
        self._sharing = sharing
        self._busy: list[Engine] = []

    def begin(self, engine: "Engine") -> float:
        """An engine starts work; returns its rate."""
        self._busy.append(engine)
        return self._divide(engine)

    def end(self, engine: "Engine") -> None:
        """An engine stops working."""
        self._busy.remove(engine)
        self._divide(engine)

    def _divide(self, by: "Engine") -> float:
        rate = 1.0 if len(self._busy) == 1 else self._sharing / max(1, len(self._busy))
        for engine in self._busy:
            if engine is not by:
                engine.set_rate(rate)
        return rate


class Engine:
    """Work in progress on a GPU.

    Attributes:
        busy_s: seconds with work in progress, up to the last change.
    """

    def __init__(self, clock: Clock, gpu: Gpu | None) -> None:
        self.clock = clock
        self.gpu = gpu
        self.is_busy = False
        self._left = 0.0
        self._rate = 1.0
        self._since = 0.0
        self._version = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    def busy_seconds(self) -> float:
        """Seconds with work in progress since the start."""
        return self._busy_s + (self.clock.now - self._busy_since if self.is_busy else 0.0)

    def set_rate(self, rate: float) -> None:
        """The other engine on the GPU began or ended."""
        now = self.clock.now
        self._left -= (now - self._since) * self._rate
        self._since, self._rate = now, rate
        self._reschedule()

    def _work(self, seconds: float) -> None:
        """Begins `seconds` of work."""
        if not self.is_busy:
            self.is_busy = True
            self._busy_since = self.clock.now
            if self.gpu is not None:
                self._rate = self.gpu.begin(self)
        self._left, self._since = seconds, self.clock.now
        self._reschedule()

    def _work_left(self) -> float:
        return self._left - (self.clock.now - self._since) * self._rate

    def _shorten(self, seconds: float) -> None:
        """Takes seconds off the work in progress."""
        self._left -= seconds
        self._reschedule()

    def _rest(self) -> None:
        self.is_busy = False
        self._busy_s += self.clock.now - self._busy_since
        if self.gpu is not None:
            self.gpu.end(self)

    def _reschedule(self) -> None:
        self._version += 1
        at = self._since + self._left / self._rate
        now = self.clock.now
        self.clock.at(at if at > now else now, self._fire, self._version)

    def _fire(self, version: int) -> None:
        if version == self._version:
            self._done()

    def _done(self) -> None:
        raise NotImplementedError


class Encoder(Engine):
    """The vision tower and its queue.

    Args:
        encoded: called with a request when one of its images has been encoded.
    """

    def __init__(
        self, clock: Clock, costs: StageCosts, encoded: Callable[[Request, int], None],
        gpu: Gpu | None = None,
    ) -> None:  # fmt: skip
        super().__init__(clock, gpu)
        self._costs = costs
        self._encoded = encoded
        self._queue: deque[tuple[Request, int]] = deque()
        self._batch: list[tuple[Request, int]] = []
        self.num_patches = 0  # queued or being encoded
        self.backlog_s = 0.0  # the tower's time for them
        self.batched_patches = 0

    @property
    def num_images(self) -> int:
        """Queued or being encoded."""
        return len(self._queue) + len(self._batch)

    def is_full(self, patches: int) -> bool:
        """Whether an image would be refused."""
        return self.num_patches + patches > self._costs.max_queued_patches

    def accept(self, request: Request, patches: int) -> None:
        """Counts an image that is being decoded on the CPU."""
        self.num_patches += patches
        self.backlog_s += self._costs.image_seconds(patches)

    def decoded(self, image: tuple[Request, int]) -> None:
        """An image is ready for the tower."""
        self._queue.append(image)
        if not self.is_busy:
            self._next_batch()

    def _next_batch(self) -> None:
        room, queue = self._costs.max_batch_patches, self._queue
        batch: list[tuple[Request, int]] = []
        passed: list[tuple[Request, int]] = []
        while queue and room > 0 and len(passed) < _LOOK_AHEAD:
            image = queue.popleft()
            if image[1] <= room or not batch:
                batch.append(image)
                room -= image[1]
            else:
                passed.append(image)
        queue.extendleft(reversed(passed))
        self._batch = batch
        seconds = self._costs.encode_fixed
        for _, patches in batch:
            seconds += self._costs.image_seconds(patches)
        self._work(seconds)

    def _done(self) -> None:
        batch, self._batch = self._batch, []
        for request, patches in batch:
            self.num_patches -= patches
            self.batched_patches += patches
            self.backlog_s -= self._costs.image_seconds(patches)
            self._encoded(request, patches)
        if self._queue:
            self._next_batch()
        else:
            self.backlog_s = 0.0  # without what rounding left
            self._rest()


class Decoder(Engine):
    """The language model: rows, prompts, KV and steps.

    Args:
        kv_tokens: room in the KV pool.
        finished: called with each request when its last token is there.
    """

    def __init__(
        self, clock: Clock, costs: StageCosts, kv_tokens: int, finished: Finished,
        gpu: Gpu | None = None,
    ) -> None:  # fmt: skip
        super().__init__(clock, gpu)
        self._costs = costs
        self._linear = linear_table(costs)
        self._kv_tokens = kv_tokens
        self._finished = finished
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._chunks: list[tuple[Request, int]] = []  # of the step in progress
        self._finishes: list[tuple[int, int, Request]] = []
        self._steps = 0  # of the leap in progress
        self._leap_s = 0.0
        self._step = 0
        self._began = 0.0  # the step in progress
        self._slow = 1.0  # steps last so many times longer than alone on the GPU, as measured
        self._admissions = 0
        self._context = 0  # cached tokens that the decoding rows attend to
        self.num_rows = 0  # decoding ones
        self.kv_used = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0  # accepted

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return self.num_rows + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the engine."""
        return len(self._waiting)

    @property
    def row_usage(self) -> float:
        """The share of the rows in use."""
        return self.num_running / self._costs.max_rows

    @property
    def kv_usage(self) -> float:
        """The share of the KV pool in use."""
        return self.kv_used / self._kv_tokens

    def submit(self, request: Request) -> None:
        """Queues a request whose images are all there."""
        self._waiting.append(request)
        self.prompt_tokens += request.prompt_tokens
        if not self.is_busy:
            self._next()
        elif self._steps > 1 and self._fits(request):
            self._end_leap()

    def _fits(self, request: Request) -> bool:
        room = self._kv_tokens * (1 - _WATERMARK) - self.kv_used
        return self.num_running < self._costs.max_rows and (
            request.prompt_tokens <= room or not self.num_running
        )

    def _leap_seconds(self, steps: int) -> float:
        """Seconds of decode steps: attention grows by a token for each row and step."""
        rows = self.num_rows
        tokens = steps * self._context + rows * steps * (steps - 1) // 2
        return steps * self._linear[rows] + tokens * self._costs.per_kv_token

    def _leap_length(self) -> int:
        """Steps until a row ends or KV runs out, at least one."""
        room = (self._kv_tokens - self.kv_used) // self.num_rows
        return max(1, min(self._first_finish() - self._step, room))

    def _end_leap(self) -> None:
        """Ends the leap in progress with the step in progress."""
        done = self._leap_s - self._work_left()
        base = self._leap_seconds(1)
        growth = self.num_rows * self._costs.per_kv_token / 2  # T(k) = k base + k (k - 1) growth
        linear = base - growth
        steps = (math.sqrt(linear * linear + 4 * growth * done) - linear) / (2 * growth)
        whole = max(1, math.ceil(steps - 1e-9))
        if whole < self._steps:
            seconds = self._leap_seconds(whole)
            self._shorten(self._leap_s - seconds)
            self._steps, self._leap_s = whole, seconds

    def _next(self) -> None:
        """Plans the next step, or a leap of decode steps."""
        while self.num_rows and self.kv_used + self.num_rows > self._kv_tokens:
            self._preempt()
        self._chunks = []
        if self._waiting or self._prefilling:
            self._fill(self._budget())
        if self._chunks:
            tokens = self.num_rows
            seconds = self._context * self._costs.per_kv_token
            for request, length in self._chunks:
                tokens += length
                seconds += length * (request.computed + length / 2) * self._costs.per_pair
            self._steps = 1
            self._leap_s = seconds + self._linear[tokens]
        elif self.num_rows:
            self._steps = self._leap_length()
            self._leap_s = self._leap_seconds(self._steps)
        else:
            if self.is_busy:
                self._rest()
            return
        self._began = self.clock.now
        self._work(self._leap_s)

    def _budget(self) -> int:
        """Tokens of prompts that the next step has room for."""
        costs, rows = self._costs, self.num_rows
        most = costs.max_step_tokens - rows
        if costs.step_s == math.inf:
            return most
        alone = _ALONE if len(self._waiting) + len(self._prefilling) == 1 else 1
        left = alone * costs.step_s / self._slow - self._context * costs.per_kv_token
        found = bisect_right(self._linear, left) - 1 - rows
        return min(most, max(found, alone * costs.least_chunk))

    def _fill(self, budget: int) -> None:
        limit, position = self._costs.max_step_tokens, 0
        while budget > 0:
            if position == len(self._prefilling):
                if not (self._waiting and self._fits(self._waiting[0])):
                    return
                self._admit(self._waiting.popleft())
            request = self._prefilling[position]
            remaining = request.prompt_tokens - request.computed
            others = position + 1 < len(self._prefilling) or bool(self._waiting)
            share = budget // 2 if remaining > limit and others else budget
            length = min(remaining, share)
            if length:
                self._chunks.append((request, length))
            budget -= length
            position += 1

    def _admit(self, request: Request) -> None:
        self._admissions += 1
        request.admission = self._admissions
        request.computed = 0
        self.kv_used += request.prompt_tokens
        self._prefilling.append(request)

    def _first_finish(self) -> int:
        finishes = self._finishes
        while finishes[0][2].finish_step != finishes[0][0]:
            heapq.heappop(finishes)  # it was preempted
        return finishes[0][0]

    def _preempt(self) -> None:
        """Takes the row that was admitted last; it computes all of its tokens again."""
        rows = [r for step, _, r in self._finishes if r.finish_step == step]
        victim = max(rows, key=lambda request: request.admission)
        made = victim.output_tokens - 1 - (victim.finish_step - self._step)
        self._leave(victim, victim.prompt_tokens + made - victim.generated)
        victim.prompt_tokens += made - victim.generated
        victim.generated = made
        self._waiting.appendleft(victim)
        self.num_preemptions += 1

    def _leave(self, request: Request, context: int) -> None:
        request.finish_step = -1
        self.num_rows -= 1
        self._context -= context
        self.kv_used -= context

    def _done(self) -> None:
        steps, rows = self._steps, self.num_rows
        slow = (self.clock.now - self._began) / self._leap_s
        self._slow += min(1.0, _LEARNED * steps) * (slow - self._slow)
        self._step += steps
        self._context += steps * rows
        self.kv_used += steps * rows
        if rows and self._first_finish() <= self._step:
            self._finish_rows()
        if self._chunks:
            self._finish_chunks()
        self._next()

    def _finish_rows(self) -> None:
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._step:
            step, _, request = heapq.heappop(finishes)
            if request.finish_step == step:
                length = request.prompt_tokens + request.output_tokens - 1 - request.generated
                self._leave(request, length)
                self._end(request)

    def _finish_chunks(self) -> None:
        now = self.clock.now
        for request, length in self._chunks:
            request.computed += length
            if request.computed < request.prompt_tokens:
                continue
            self._prefilling.remove(request)
            if not request.first_token:
                request.first_token = now + self._costs.request_out
            left = request.output_tokens - 1 - request.generated
            if left <= 0:
                self.kv_used -= request.prompt_tokens
                self._end(request)
                continue
            request.finish_step = self._step + left
            heapq.heappush(self._finishes, (request.finish_step, request.admission, request))
            self.num_rows += 1
            self._context += request.prompt_tokens

    def _end(self, request: Request) -> None:
        request.last_token = self.clock.now + self._costs.request_out
        self._finished(request)
