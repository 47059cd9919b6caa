"""The choice of the decoder for a prompt, by the decoders' prefix caches and their load.

A decoder finds the KV blocks of a prompt's prefix under a chain of hashes. The gateway makes a
chain of its own from the same facts (token ids, image keys, the tenant's salt), and remembers the
chains of the prompts that it has sent to each pod. It does not know the prompts of other gateways.
The cache hits that a decoder reports show which prefixes the decoder has evicted. A wrong guess
costs time and never an answer.
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

# Tokens of a link: short links at the beginning, which many prompts share, and long links behind.
_SHORT, _LONG, _NUM_SHORT = 64, 512, 64
_MAX_TOKENS = 1 << 20  # most tokens that are remembered of a pod, in some 16,000 links
# Costs of a running sequence for other sequences, in prompt tokens: its row, and each token of its
# context, which is read in each step. Measured with `benchmarks.prefix_choice`: with lower costs, a
# common prefix spreads to other pods too late; with higher costs, conversations change their pod.
ROW_COST, CONTEXT_COST = 32, 0.05
# Part of a prompt that the first pod in its key's order is assumed to have cached, because other
# gateways send unknown prompts to that pod, too.
_HOME = 0.5


@dataclass(slots=True)
class Coming:
    """The tokens of a prompt whose embeddings no encoder has yet.

    Attributes:
        num_tokens: number of the tokens. The owner of the encode calls changes it.
    """

    num_tokens: int = 0


class PromptChain:
    """Hashes of the prefixes of a prompt.

    Args:
        token_ids: int32 [num_tokens], contiguous, token ids with expanded placeholders.
        images: references to the prompt's images, in order of their offsets.
        salt: salt that separates the prefixes of tenants.
        adapter: digest of the adapter that answers, which separates prefixes, too. Empty for none.
        coming: tokens whose embeddings are still to come. None if there are none.

    Attributes:
        num_tokens: number of tokens of the prompt.
        adapter: the same; only decoders that have the adapter can be chosen.
        links: hash of each prefix, and the prefix's number of tokens. No prefix contains the last
            token, which is always computed.
    """

    def __init__(
        self,
        token_ids: Int32s,
        images: Sequence[pb.ImageRef],
        salt: bytes,
        adapter: bytes = b"",
        coming: Coming | None = None,
    ) -> None:
        self.num_tokens = len(token_ids)
        self.images = images
        self.coming = coming or Coming()
        self.links: list[tuple[bytes, int]] = []
        data, following = token_ids.data.cast("B"), iter(images)
        self.adapter = adapter
        hashed = blake3(salt + adapter)
        image, start = next(following, None), 0
        while (end := start + _size(start)) < self.num_tokens:
            hashed.update(data[4 * start : 4 * end])
            while image is not None and image.offset < end:
                hashed.update(b"image%d:%s" % (image.offset, image.image_key))
                image = next(following, None)
            self.links.append((hashed.digest(16), end))
            start = end


def _size(index: int) -> int:
    """Returns the number of tokens of the link that contains the token at an index."""
    return _SHORT if index < _NUM_SHORT * _SHORT else _LONG


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that was sent to a pod.

    Attributes:
        number: serial number of the prompt.
        num_tokens: number of tokens of the prompt.
        found: entry of each link that the pod had computed before: number of the prompt that used
            the link last, and number of tokens of the link's prefix.
        last: hash of the longest prefix that was sent to the pod before. Empty if there is none.
    """

    number: int
    num_tokens: int
    found: Sequence[tuple[int, int]]
    last: bytes


class SentPrompts:
    """The prompts that were sent to one pod. They still run, or may still be cached.

    Args:
        num_tokens: number of tokens that the pod's prefix cache holds.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._max_tokens = min(num_tokens, _MAX_TOKENS)
        # Link -> number of the prompt that used it last, and its number of tokens. The least
        # recently used link is first.
        self._links: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._num_tokens = 0
        self._number = 0
        self._waiting: dict[int, int] = {}  # number of a waiting prompt -> tokens to compute
        self._num_waiting_tokens = 0
        self._coming: dict[int, Coming] = {}  # of waiting prompts with embeddings to come
        self._num_running = 0
        self._num_running_tokens = 0
        self._num_running_from: Counter[bytes] = Counter()  # running prompts by `Sent.last`

    def work(self, *, waits: bool = False) -> float:
        """Returns the work of the pod before or beside a prompt that is sent now, in prompt tokens.
        Work of other gateways is not known.

        Tokens whose embeddings are still to come are work only for a prompt that waits for
        embeddings, too. A prompt that can begin at once is computed before them.

        Args:
            waits: True if embeddings of the prompt are still to come.
        """
        running = ROW_COST * self._num_running + CONTEXT_COST * self._num_running_tokens
        if waits:
            return self._num_waiting_tokens + running
        for number in [n for n, coming in self._coming.items() if not coming.num_tokens]:
            del self._coming[number]
        coming = sum(min(each.num_tokens, self._waiting[n]) for n, each in self._coming.items())
        return self._num_waiting_tokens - coming + running

    def num_found(self, chain: PromptChain) -> int:
        """Returns the number of tokens of the prompt's prefix that the pod has probably cached."""
        return self._last_found(chain)[1]

    def num_sharing(self, chain: PromptChain) -> int:
        """Returns the number of prompts on the pod that share this prompt's cached prefix."""
        return self._num_running_from[self._last_found(chain)[0]]

    def _last_found(self, chain: PromptChain) -> tuple[bytes, int]:
        last = b"", 0
        for link in chain.links:
            if link[0] not in self._links:
                break
            last = link
        return last

    def send(self, chain: PromptChain, uses_cache: bool = True) -> Sent:
        """Records that a prompt is sent to the pod. Call `started` when the prompt has its first
        token, and `ended` when its sequence has ended.

        Args:
            uses_cache: True if the decoder looks for the prompt in its prefix cache.
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
        if chain.coming.num_tokens:
            self._coming[sent.number] = chain.coming
        self._num_waiting_tokens += new
        self._num_running += 1
        self._num_running_tokens += chain.num_tokens
        # The last link comes first, so that it is also forgotten first, as in a decoder.
        for link, end in reversed(chain.links):
            size = _size(end - 1)
            if self._links.pop(link, None) is None:
                self._num_tokens += size
            self._links[link] = sent.number, size
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._links)))
        return sent

    def started(self, sent: Sent, num_cached: int) -> None:
        """Records that the pod has computed a prompt, with `num_cached` tokens from its cache.

        If `num_cached` is less than half of the tokens that the pod had computed before, the cache
        has evicted the rest, and all links that were used less recently. The threshold is a half,
        because a model with recurrent states caches only some prefixes.
        """
        self._end_waiting(sent)
        if not sent.found or 2 * num_cached >= sent.found[-1][1]:
            return
        given_up = next(number for number, end in sent.found if end > num_cached)
        while self._links:
            link, (number, _) = next(iter(self._links.items()))
            if number > given_up:
                return
            self._forget(link)

    def ended(self, sent: Sent) -> None:
        """Records that a prompt's sequence has ended, even before its first token."""
        self._end_waiting(sent)
        self._num_running -= 1
        self._num_running_tokens -= sent.num_tokens
        if sent.last:
            self._num_running_from[sent.last] -= 1
            self._num_running_from += Counter()  # This drops counts that are 0.

    def _end_waiting(self, sent: Sent) -> None:
        self._num_waiting_tokens -= self._waiting.pop(sent.number, 0)
        self._coming.pop(sent.number, None)

    def _forget(self, link: bytes) -> None:
        _, size = self._links.pop(link, (0, 0))
        self._num_tokens -= size


class Candidate(Loaded, Protocol):
    """A pod that can be chosen for a prompt."""

    @property
    def prompts(self) -> SentPrompts:
        """Prompts that were sent to the pod."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def choose(pods: Sequence[CandidateT], chain: PromptChain, key: bytes) -> CandidateT:
    """Returns the pod with the least cost for the prompt.

    The cost is a number of tokens. It counts the prompt tokens that the pod has to compute, the
    tokens of uncached images whose embeddings come from another host, and the pod's other work,
    where prompts that can be computed and prompts whose embeddings are still to come count apart.
    Tokens that only another pod has cached cost less if many prompts on that pod share the tokens,
    because such prompts could share the tokens here, too. So a common prefix spreads to several
    pods. Of pods with equal costs, the first in the key's order is chosen (`rank`). No pod
    gets more sequences than `within_bound` allows.
    """
    if len(pods) == 1:
        return pods[0]
    hosts = {host_of(pod.address) for pod in pods}
    ranks = {pod.address: rank(pod.address, key) for pod in pods}
    home = min(ranks, key=lambda address: ranks[address])
    found = {pod.address: pod.prompts.num_found(chain) for pod in pods}
    most = max(pods, key=lambda pod: found[pod.address])
    num_sharing = most.prompts.num_sharing(chain)
    waits = chain.coming.num_tokens > 0

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
        return new + moved + pod.prompts.work(waits=waits), ranks[pod.address]

    return min(within_bound(pods), key=cost)
