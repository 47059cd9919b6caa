"""Which decoder a prompt goes to: what each probably has of it in its prefix cache, and what each
has to do. Pure Python.

A decoder finds the KV blocks of a prompt's beginning under a chain of hashes. The gateway makes a
chain of its own from the same facts (token ids, image keys, the tenant's salt) and remembers, for
each pod, what it has sent there. What other gateways send it does not know; what a decoder has
given up it learns from the hits that the decoder reports. A wrong guess costs time, never an
answer.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeVar

from blake3 import blake3

from services.common.geometry import Int32s
from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.pods import Loaded, host_of, rank, within_bound

# Tokens of a link: short ones for what many prompts share, long ones behind.
_SHORT, _LONG, _NUM_SHORT = 64, 512, 64
_MAX_TOKENS = 1 << 20  # that are remembered of a pod, in some 16,000 links
# What a sequence costs those beside it, in tokens of a prompt: its row, and its context, which is
# read in each step. By `benchmarks.prefix_choice`: with less, a common beginning spreads late; with
# more, conversations leave the pod that has them.
ROW_COST, CONTEXT_COST = 32, 0.05
# Of a prompt, the share that the first pod in its key's order is taken to have: other gateways send
# what they do not know there, too.
_HOME = 0.5


class PromptChain:
    """Hashes of a prompt's beginnings.

    Args:
        token_ids: int32 [num_tokens], contiguous, placeholders expanded.
        images: in order of offset.
        salt: separates tenants.

    Attributes:
        links: (hash, tokens up to its end) of each beginning. The last token is in none of them: it
            is computed in any case.
    """

    def __init__(self, token_ids: Int32s, images: Sequence[pb.ImageRef], salt: bytes) -> None:
        self.num_tokens = len(token_ids)
        self.images = images
        self.links: list[tuple[bytes, int]] = []
        data, following = token_ids.data.cast("B"), iter(images)
        hashed = blake3(salt)
        image, start = next(following, None), 0
        while (end := start + _size(start)) < self.num_tokens:
            hashed.update(data[4 * start : 4 * end])
            while image is not None and image.offset < end:
                hashed.update(b"image%d:%s" % (image.offset, image.image_key))
                image = next(following, None)
            self.links.append((hashed.digest(16), end))
            start = end


def _size(index: int) -> int:
    """Tokens of the link that has a prompt's token of that index."""
    return _SHORT if index < _NUM_SHORT * _SHORT else _LONG


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that a pod was sent.

    Attributes:
        number: of the prompt, ascending.
        found: (number of the prompt that used it last, tokens up to its end) of each link that the
            pod had computed before.
        last: the last link that the pod was sent before; empty: none.
    """

    number: int
    num_tokens: int
    found: Sequence[tuple[int, int]]
    last: bytes


class SentPrompts:
    """What one pod was sent, and has not ended or may have kept.

    Args:
        num_tokens: that the pod's cache holds.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._room = min(num_tokens, _MAX_TOKENS)
        # Link -> (the prompt that used it last, its tokens); least recently used first.
        self._links: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._num_tokens = 0
        self._number = 0
        self._waiting: dict[int, int] = {}  # prompt that has not started -> tokens to compute
        self._num_waiting_tokens = 0
        self._num_running = 0
        self._num_running_tokens = 0
        self._num_running_from: Counter[bytes] = Counter()  # by `Sent.last`

    @property
    def work(self) -> float:
        """What the pod has to do before, or beside, a prompt that is sent now: in tokens of a
        prompt, as far as this gateway knows.
        """
        running = ROW_COST * self._num_running + CONTEXT_COST * self._num_running_tokens
        return self._num_waiting_tokens + running

    def num_found(self, chain: PromptChain) -> int:
        """Tokens of the prompt's beginning that the pod probably has."""
        return self._last_found(chain)[1]

    def num_sharing(self, chain: PromptChain) -> int:
        """Prompts that run there and of which it had the same beginning as of this one."""
        return self._num_running_from[self._last_found(chain)[0]]

    def _last_found(self, chain: PromptChain) -> tuple[bytes, int]:
        last = b"", 0
        for link in chain.links:
            if link[0] not in self._links:
                break
            last = link
        return last

    def send(self, chain: PromptChain, uses_cache: bool = True) -> Sent:
        """The pod is sent a prompt. Call `started` when it has its first token, then `ended`.

        Args:
            uses_cache: the decoder will look for the prompt in its cache.
        """
        oldest_waiting = next(iter(self._waiting), self._number + 1)
        before = ((self._links.get(link, (oldest_waiting, 0))[0], end) for link, end in chain.links)
        computed = list(takewhile(lambda found: found[0] < oldest_waiting, before))
        self._number += 1
        last, found = self._last_found(chain) if uses_cache else (b"", 0)
        sent = Sent(self._number, chain.num_tokens, computed if uses_cache else (), last)
        new = chain.num_tokens - found
        if last:
            self._num_running_from[last] += 1
        self._waiting[sent.number] = new
        self._num_waiting_tokens += new
        self._num_running += 1
        self._num_running_tokens += chain.num_tokens
        # The end of a prompt first, so that it is also forgotten first, as decoders do.
        for link, end in reversed(chain.links):
            size = _size(end - 1)
            if self._links.pop(link, None) is None:
                self._num_tokens += size
            self._links[link] = sent.number, size
        while self._num_tokens > self._room:
            self._forget(next(iter(self._links)))
        return sent

    def started(self, sent: Sent, num_cached: int) -> None:
        """The pod has computed a prompt, of which it had `num_cached` tokens in its cache.

        If that is less than half of what it had computed before, the cache has given up the rest,
        and all that was used less recently. (A model with recurrent states keeps some ends alone.)
        """
        self._num_waiting_tokens -= self._waiting.pop(sent.number, 0)
        if not sent.found or 2 * num_cached >= sent.found[-1][1]:
            return
        given_up = next(number for number, end in sent.found if end > num_cached)
        while self._links:
            link, (number, _) = next(iter(self._links.items()))
            if number > given_up:
                return
            self._forget(link)

    def ended(self, sent: Sent) -> None:
        """A prompt's sequence has ended, started or not."""
        self._num_waiting_tokens -= self._waiting.pop(sent.number, 0)
        self._num_running -= 1
        self._num_running_tokens -= sent.num_tokens
        if sent.last:
            self._num_running_from[sent.last] -= 1
            self._num_running_from += Counter()  # keeps positive counts

    def _forget(self, link: bytes) -> None:
        _, size = self._links.pop(link, (0, 0))
        self._num_tokens -= size


class Candidate(Loaded, Protocol):
    """A pod to choose."""

    @property
    def prompts(self) -> SentPrompts:
        """That it was sent."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def choose(pods: Sequence[CandidateT], chain: PromptChain, key: bytes) -> CandidateT:
    """The pod that has the least to do for the prompt.

    Counted in tokens: those of the prompt that the pod has to compute, those of images behind them
    whose embeddings come from another host, and the pod's other work. What another pod has of the
    prompt counts less the more prompts run there that share it: they would share it here, too, so
    that a common beginning spreads. Of equal pods it is the first in the key's order (`rank`). No
    pod gets more sequences than `within_bound` allows.
    """
    if len(pods) == 1:
        return pods[0]
    hosts = {host_of(pod.address) for pod in pods}
    ranks = {pod.address: rank(pod.address, key) for pod in pods}
    home = min(ranks, key=lambda address: ranks[address])
    found = {pod.address: pod.prompts.num_found(chain) for pod in pods}
    most = max(pods, key=lambda pod: found[pod.address])
    num_sharing = most.prompts.num_sharing(chain)

    def cost(pod: CandidateT) -> tuple[float, tuple[bytes, bytes]]:
        host, known = host_of(pod.address), float(found[pod.address])
        if pod.address == home:
            known = max(known, _HOME * chain.num_tokens)
        elsewhere = max(0, found[most.address] - known)
        moved = sum(
            image.num_tokens
            for image in chain.images
            if image.offset >= known and host_of(image.encoder_address) in hosts - {host}
        )
        new = chain.num_tokens - known - elsewhere + elsewhere / (1 + num_sharing)
        return new + moved + pod.prompts.work, ranks[pod.address]

    return min(within_bound(pods), key=cost)
