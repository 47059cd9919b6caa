"""The cluster: pods that come and go, the gateways that choose among them, and the autoscalers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.simulation.autoscaler import SYNC_S, Autoscaler, Policy
from benchmarks.simulation.engines import Decoder, Encoder, Gpu
from benchmarks.simulation.events import Clock
from benchmarks.simulation.requests import Request
from benchmarks.simulation.signals import SCRAPE_S, Signals
from benchmarks.simulation.stages import StageCosts
from services.gateway.clients.sent_prompts import CONTEXT_COST, ROW_COST

# As in services/gateway/clients/pods.py.
_SLACK = 1.25
_HEADROOM = 8
_TRIES = 8
_HOME = 500  # tokens: half of a usual prompt, which the first decoder in its order is taken to have


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One Deployment.

    Attributes:
        stages: `encoder`, `decoder`, or both in one pod, which share its GPU.
        replicas: at the start, ready.
        policy: None: the number stays.
        start_s: from a pod's creation until gateways send it work.
    """

    stages: tuple[str, ...]
    replicas: int
    policy: Policy | None = None
    start_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster.

    Attributes:
        gateways: each knows its own requests only when it picks a pod.
        unscraped: from one second to another, Prometheus gets no samples of
        num_unscraped: the oldest pods of each fleet; None: of all.
        one_host: embeddings pass through shared memory, and gateways choose decoders by their work
            (in fleets of a day, which take longer to simulate, by the number of requests).
        shared_cards: the fleets' pods of equal numbers share a GPU.
        by_number: encoders are chosen by the number of images in flight, not by seconds.
    """

    fleets: tuple[FleetPlan, ...]
    gateways: int = 4
    unscraped: tuple[float, float] = (0.0, 0.0)
    num_unscraped: int | None = None
    one_host: bool = False
    shared_cards: bool = False
    by_number: bool = False

    def with_replicas(self, *replicas: int) -> "Plan":
        """The same fleets with other numbers at the start."""
        fleets = [
            replace(fleet, replicas=n) for fleet, n in zip(self.fleets, replicas, strict=True)
        ]
        return replace(self, fleets=tuple(fleets))


class Pod:
    """A pod with one GPU, the engines on it, and what each gateway has in flight there."""

    def __init__(self, fleet: "Fleet", number: int, created: float) -> None:
        self.fleet = fleet
        self.number = number
        self.created = created
        self.ended = -1.0
        self.is_leaving = False
        self.num_images = 0
        self.num_requests = 0
        self.in_flight = [0] * fleet.cluster.plan.gateways  # images of an encoder, else requests
        self.encode_s = [0.0 for _ in self.in_flight]  # the tower's time for images in flight
        self.sent: list[set[Request]] = [set() for _ in self.in_flight]  # and not answered yet
        self.encoder: Encoder | None = None
        self.decoder: Decoder | None = None
        fleet.cluster.equip(self)

    def work(self, gateway: int) -> float:
        """What a gateway knows that the decoder has to do, in tokens."""
        return sum(
            (ROW_COST + CONTEXT_COST * r.prompt_tokens) + (0 if r.first_token else r.prompt_tokens)
            for r in self.sent[gateway]
        )

    @property
    def is_idle(self) -> bool:
        """Nothing in flight: a pod that leaves may end."""
        return not self.num_images and not self.num_requests


class Fleet:
    """The pods of one Deployment."""

    def __init__(self, cluster: "Cluster", plan: FleetPlan) -> None:
        self.cluster = cluster
        self.plan = plan
        self.pods: list[Pod] = []  # all that hold a GPU, oldest first
        self.ready: list[Pod] = []
        self.in_flight = [0] * cluster.plan.gateways
        self.gpu_s = 0.0
        self.replicas = plan.replicas
        self.autoscaler = Autoscaler(plan.policy) if plan.policy else None
        self._num_created = 0
        for _ in range(plan.replicas):
            self._started(self._create())

    def scale(self, replicas: int) -> None:
        """Creates pods, or lets the newest go: first those that start, then ready ones."""
        while self.replicas < replicas:
            self.replicas += 1
            clock = self.cluster.clock
            clock.at(clock.now + self.plan.start_s, self._started, self._create())
        while self.replicas > replicas:
            self.replicas -= 1
            staying = [pod for pod in self.pods if not pod.is_leaving]
            pod = next((p for p in reversed(staying) if p not in self.ready), staying[-1])
            pod.is_leaving = True
            if pod in self.ready:
                self.ready.remove(pod)
            self.end_if_idle(pod)

    def end_if_idle(self, pod: Pod) -> None:
        """Ends a leaving pod that has nothing in flight."""
        if pod.is_leaving and pod.is_idle and pod.ended < 0:
            pod.ended = self.cluster.clock.now
            self.gpu_s += pod.ended - pod.created
            self.pods.remove(pod)

    def gpu_seconds(self) -> float:
        """Of all pods so far, from creation on."""
        return self.gpu_s + sum(self.cluster.clock.now - pod.created for pod in self.pods)

    def pick(self, gateway: int, is_full: Callable[[Pod], bool]) -> Pod | None:
        """A pod as rendezvous hashing with bounded loads picks it for a new key: one by chance
        among those that are not far above the mean; None: all are full.
        """
        pods, random = self.ready, self.cluster.random
        if not pods:
            return None
        bound = self.in_flight[gateway] / len(pods) * _SLACK + _HEADROOM
        for _ in range(_TRIES):
            pod = pods[int(random() * len(pods))]
            if pod.in_flight[gateway] <= bound and not is_full(pod):
                return pod
        for pod in sorted(pods, key=lambda pod: pod.in_flight[gateway]):
            if not is_full(pod):
                return pod
        return None

    def by_shares(
        self, gateway: int, images: Sequence[int], is_full: Callable[[Pod, int], bool]
    ) -> list[tuple[Pod, int]] | None:
        """Encoders of a request's images, as services/gateway/clients/encoder_work.py divides them,
        each with its patches; None: all are full. The order of an image's key is a random one.
        """
        pods, cost = self.ready, self.cluster.costs.image_seconds
        loads = {pod: pod.encode_s[gateway] for pod in pods}
        chosen: list[tuple[Pod, int]] = []
        new_s = sum(map(cost, images))
        for patches in sorted(images, reverse=True):
            left = [pod for pod in pods if not is_full(pod, patches)]
            if not left:
                return None
            share_s = (sum(pod.encode_s[gateway] for pod in pods) + new_s) / len(pods)
            fitting = [pod for pod in left if loads[pod] < share_s]
            if fitting:
                pod = fitting[int(self.cluster.random() * len(fitting))]
            else:
                pod = min(left, key=lambda pod: loads[pod])
            loads[pod] += cost(patches)
            chosen.append((pod, patches))
        return chosen

    def by_number(
        self, gateway: int, images: Sequence[int], is_full: Callable[[Pod, int], bool]
    ) -> list[tuple[Pod, int]] | None:
        """The same by the number of images in flight, each image alone: the rule before."""
        chosen: list[tuple[Pod, int]] = []
        for patches in images:
            pod = self.pick(gateway, lambda pod, p=patches: is_full(pod, p))
            if pod is None:
                return None
            chosen.append((pod, patches))
        return chosen

    def least_work(self, gateway: int, is_full: Callable[[Pod], bool]) -> Pod | None:
        """A decoder as services/gateway/clients/sent_prompts.py chooses it for a new prompt."""
        pods = [pod for pod in self.ready if not is_full(pod)]
        if not pods:
            return None
        home = pods[int(self.cluster.random() * len(pods))]
        return min(pods, key=lambda pod: pod.work(gateway) - (_HOME if pod is home else 0))

    def _create(self) -> Pod:
        self._num_created += 1
        pod = Pod(self, self._num_created, self.cluster.clock.now)
        self.pods.append(pod)
        return pod

    def _started(self, pod: Pod) -> None:
        if not pod.is_leaving:
            self.ready.append(pod)


class Cluster:
    """All fleets, driven by a clock.

    Args:
        finished: called with each request that has ended, refused ones included.
    """

    def __init__(
        self, plan: Plan, costs: StageCosts, finished: Callable[[Request], None], seed: int = 0
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.clock = Clock()
        self.random = Random(seed).random
        self.signals = Signals()
        self._finished = finished
        self._gateway = 0
        self._decoder_of: dict[Request, Pod] = {}
        self._encoders_of: dict[Request, list[Pod]] = {}
        self._gpus: dict[int, Gpu] = {}
        self.fleets = [Fleet(self, fleet) for fleet in plan.fleets]
        self._encoders, self._decoders = (
            next((f for f in self.fleets if stage in f.plan.stages), None)
            for stage in ("encoder", "decoder")
        )
        self._per_patch_out = (
            costs.per_patch_shared_memory
            if self._encoders is self._decoders or plan.one_host
            else costs.per_patch_network
        )
        if any(fleet.autoscaler for fleet in self.fleets):
            self.clock.at(SCRAPE_S * 0.4, self._scrape)
            self.clock.at(SYNC_S, self._sync)

    def equip(self, pod: Pod) -> None:
        """Gives a pod its engines."""
        stages, costs = pod.fleet.plan.stages, self.costs
        both = len(stages) > 1 or self.plan.shared_cards
        gpu = self._gpu(pod) if both else None
        if "encoder" in stages:
            pod.encoder = Encoder(self.clock, costs, lambda r, p: self._encoded(pod, r, p), gpu)
        if "decoder" in stages:
            room = costs.kv_tokens_shared if both else costs.kv_tokens
            pod.decoder = Decoder(self.clock, costs, room, self._answered, gpu)

    def _gpu(self, pod: Pod) -> Gpu:
        if not self.plan.shared_cards:
            return Gpu(self.costs.sharing)
        return self._gpus.setdefault(pod.number, Gpu(self.costs.sharing))

    def submit(self, request: Request) -> None:
        """A request arrives at a gateway."""
        gateway = request.gateway = self._gateway
        self._gateway = (gateway + 1) % self.plan.gateways
        assert self._decoders is not None
        max_live = self.costs.max_waiting
        is_full = lambda pod: pod.num_requests >= max_live
        fleet = self._decoders
        pod = (fleet.least_work if self.plan.one_host else fleet.pick)(gateway, is_full)
        if pod is None or not self._encode(request, pod):
            request.refused = True
            self._finished(request)
            return
        self._decoder_of[request] = pod
        if self.plan.one_host:
            pod.sent[gateway].add(request)
        pod.num_requests += 1
        pod.in_flight[gateway] += 1
        pod.fleet.in_flight[gateway] += 1
        if not request.images:
            self.clock.at(self.clock.now + self.costs.request_in, self._prompt_ready, request)

    def _encode(self, request: Request, decoder: Pod) -> bool:
        """Sends each image to an encoder; False: one of them finds none."""
        if not request.images:
            return True
        assert self._encoders is not None
        gateway, now, costs = request.gateway, self.clock.now, self.costs
        chosen: list[tuple[Pod, Encoder, int]] = []
        if self._encoders is self._decoders:
            is_any_full = any(_is_full(decoder, patches) for patches in request.images)
            places = None if is_any_full else [(decoder, patches) for patches in request.images]
        else:
            fleet = self._encoders
            divide = fleet.by_number if self.plan.by_number else fleet.by_shares
            places = divide(gateway, request.images, _is_full)
        for pod, patches in places or ():
            assert pod.encoder is not None
            chosen.append((pod, pod.encoder, patches))
        if not chosen:
            return False
        for pod, encoder, patches in chosen:
            pod.num_images += 1
            if pod is not decoder:
                pod.in_flight[gateway] += 1
                pod.fleet.in_flight[gateway] += 1
                pod.encode_s[gateway] += costs.image_seconds(patches)
            encoder.accept(request, patches)
            at = now + costs.request_in + patches * costs.per_patch_in
            self.clock.at(at, encoder.decoded, (request, patches))
        return True

    def _encoded(self, pod: Pod, request: Request, patches: int) -> None:
        pod.num_images -= 1
        if pod.decoder is None:
            pod.in_flight[request.gateway] -= 1
            pod.fleet.in_flight[request.gateway] -= 1
            pod.encode_s[request.gateway] -= self.costs.image_seconds(patches)
            if pod.is_leaving:
                pod.fleet.end_if_idle(pod)
        request.pending_images -= 1
        if not request.pending_images:
            at = self.clock.now + patches * self._per_patch_out
            self.clock.at(at, self._prompt_ready, request)

    def _prompt_ready(self, request: Request) -> None:
        decoder = self._decoder_of[request].decoder
        assert decoder is not None
        decoder.submit(request)

    def _answered(self, request: Request) -> None:
        pod = self._decoder_of.pop(request)
        pod.num_requests -= 1
        pod.sent[request.gateway].discard(request)
        pod.in_flight[request.gateway] -= 1
        pod.fleet.in_flight[request.gateway] -= 1
        if pod.is_leaving:
            pod.fleet.end_if_idle(pod)
        self._finished(request)

    def _scrape(self, _: None) -> None:
        now, (start, end) = self.clock.now, self.plan.unscraped
        num_silent = self.plan.num_unscraped if start <= now < end else 0
        silent = {pod for fleet in self.fleets for pod in fleet.pods[:num_silent]}
        for metric, value in _METRICS.items():
            kind = metric.split("_")[1]  # after `triptych_`
            engines: dict[Hashable, object] = {
                pod: engine
                for fleet in self.fleets
                for pod in fleet.pods
                if (engine := getattr(pod, kind))
            }
            values = {pod: value(e) for pod, e in engines.items() if pod not in silent}
            self.signals.scrape(now, metric, values, engines.keys() & silent)
        self.clock.at(now + SCRAPE_S, self._scrape)

    def _sync(self, _: None) -> None:
        now = self.clock.now
        for fleet in self.fleets:
            if fleet.autoscaler:
                query = lambda trigger: self.signals.query(now, trigger)
                fleet.scale(fleet.autoscaler.sync(now, fleet.replicas, query))
        self.clock.at(now + SYNC_S, self._sync)


def _is_full(pod: Pod, patches: int) -> bool:
    return pod.encoder is None or pod.encoder.is_full(patches)


_METRICS: dict[str, Callable[..., float]] = {
    "triptych_encoder_queue_patches": lambda encoder: encoder.num_patches,
    "triptych_encoder_backlog_seconds": lambda encoder: encoder.backlog_s,
    "triptych_encoder_busy_seconds_total": lambda encoder: encoder.busy_seconds(),
    "triptych_decoder_sequences_running": lambda decoder: decoder.num_running,
    "triptych_decoder_row_usage_ratio": lambda decoder: decoder.row_usage,
    'triptych_decoder_sequences_waiting{for="engine"}': lambda decoder: decoder.num_waiting,
    "triptych_decoder_kv_usage_ratio": lambda decoder: decoder.kv_usage,
    "triptych_decoder_prompt_tokens_total": lambda decoder: decoder.prompt_tokens,
    "triptych_decoder_busy_seconds_total": lambda decoder: decoder.busy_seconds(),
}
METRICS = frozenset(_METRICS)
