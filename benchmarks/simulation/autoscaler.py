"""Horizontal pod autoscaling as Kubernetes and KEDA do it.

Each sync a trigger's query gives one number, the sum over all pods (`AverageValue`); the wanted
number of pods is that over the threshold, rounded up, unless the two are within the tolerance. The
largest trigger wins. Then come the stabilization windows, the policies (pods per period) and the
bounds, in the order of Kubernetes' horizontal controller. KEDA hands the query through: without
`useCachedMetrics` its polling interval decides only about scaling from and to zero.

A query without series fails (`ignoreNullValues: "false"`). Its trigger then wants as many pods as
there are, and at least the fallback's: KEDA answers so for it after some failures, and before them
Kubernetes takes no pod away while one of several metrics is unknown.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 0.1
SYNC_S = 15.0


@dataclass(frozen=True, slots=True)
class Trigger:
    """One query and its threshold.

    Attributes:
        metric: of a pod: `Signals` has them.
        function: `sum`; `avg` over the window; `rate` over the window.
        threshold: per pod.
        window_s: of `avg` and `rate`.
        absent: the query's value without series; None: it fails.
    """

    metric: str
    function: str
    threshold: float
    window_s: float = 0.0
    absent: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """`behavior.scaleUp` or `.scaleDown`: at most `pods` within `period_s`."""

    stabilization_s: float
    pods: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Policy:
    """A ScaledObject, as far as it decides."""

    triggers: tuple[Trigger, ...]
    up: Rule
    down: Rule
    min_replicas: int = 1
    max_replicas: int = 1000
    tolerance: float = TOLERANCE
    fallback_replicas: int = 1


Query = Callable[[Trigger], float | None]


class Autoscaler:
    """The controller of one Deployment."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._wanted: deque[tuple[float, int]] = deque()  # recommendations, oldest first
        self._added: deque[tuple[float, int]] = deque()
        self._removed: deque[tuple[float, int]] = deque()

    def sync(self, now: float, replicas: int, query: Query) -> int:
        """The number of pods from now on."""
        policy = self.policy
        wanted = max(self._wanted_by(trigger, replicas, query) for trigger in policy.triggers)
        wanted = min(max(wanted, policy.min_replicas), policy.max_replicas)
        stable = self._stabilized(now, replicas, wanted)
        if stable > replicas:
            limit = replicas - _within(self._added, now, policy.up.period_s) + policy.up.pods
            result = max(replicas, min(stable, limit))
            if result > replicas:
                self._added.append((now, result - replicas))
        else:
            limit = replicas + _within(self._removed, now, policy.down.period_s) - policy.down.pods
            result = min(replicas, max(stable, limit))
            if result < replicas:
                self._removed.append((now, replicas - result))
        return result

    def _wanted_by(self, trigger: Trigger, replicas: int, query: Query) -> int:
        value = query(trigger)
        value = trigger.absent if value is None else value
        if value is None:
            return max(replicas, self.policy.fallback_replicas)
        if replicas and abs(value / (trigger.threshold * replicas) - 1) <= self.policy.tolerance:
            return replicas
        return math.ceil(value / trigger.threshold - 1e-9)

    def _stabilized(self, now: float, replicas: int, wanted: int) -> int:
        up_s, down_s = self.policy.up.stabilization_s, self.policy.down.stabilization_s
        while self._wanted and self._wanted[0][0] <= now - max(up_s, down_s):
            self._wanted.popleft()
        self._wanted.append((now, wanted))
        least = min(n for at, n in self._wanted if at == now or at > now - up_s)
        most = max(n for at, n in self._wanted if at == now or at > now - down_s)
        return least if replicas < least else most if replicas > most else replicas


def _within(changes: deque[tuple[float, int]], now: float, period_s: float) -> int:
    """Pods added or removed within the last period."""
    while changes and changes[0][0] <= now - period_s:
        changes.popleft()
    return sum(pods for _, pods in changes)
