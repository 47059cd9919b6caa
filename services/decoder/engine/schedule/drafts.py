"""The drafts of one sequence: their source, how often they were right, and the next ones."""

from dataclasses import dataclass, field

from services.decoder.engine.schedule.lookup import DraftSource

# Stands for a draft that the device still makes, so that the host does not know its id yet.
UNKNOWN_DRAFT = 2**31 - 1
# The share of right drafts that is assumed before any was verified, and that of the model's own
# layer, of whose first drafts 0.80 to 0.86 were right where somebody has published it.
FIRST_RATE, FIRST_HEAD_RATE = 0.6, 0.75
# Weight of a draft in the estimated share of right drafts. The layer drafts for each token, so its
# share is learned as a mean at first, in which the assumed share counts for one draft, and later
# over the last 16 or so.
_WEIGHT, _FIRST_HEAD_WEIGHT, _LEAST_HEAD_WEIGHT = 0.15, 1 / 2, 1 / 16
# The share of right drafts of the layer's is assumed to be at least this before a sequence has
# verified any, whatever other sequences have found.
_LEAST_FIRST_RATE = 0.4
# After a step whose first draft was wrong, drafts pause for so many tokens. Each further such step
# doubles the pause, up to the limit.
_PAUSE, _MAX_PAUSE = 3, 96


class Share:
    """Estimated share of right drafts.

    Args:
        rate: the share before any draft was verified.
        weight: weight of the first draft that is verified.
        least_weight: weight of a draft after many.

    Attributes:
        rate: the estimated share.
    """

    __slots__ = ("_least_weight", "_weight", "rate")

    def __init__(self, rate: float, weight: float = _WEIGHT, least_weight: float = _WEIGHT) -> None:
        self.rate, self._weight, self._least_weight = rate, weight, least_weight

    def verified(self, num_accepted: int, num_drafts: int) -> None:
        """Learns from a step in which so many of a sequence's drafts were accepted."""
        for place in range(min(num_accepted + 1, num_drafts)):
            self.rate += self._weight * ((place < num_accepted) - self.rate)
            self._weight = max(self._least_weight, self._weight / (1 + self._weight))


class HeadShare(Share):
    """Estimated share of right drafts of the model's own layer, over all sequences."""

    def __init__(self) -> None:
        super().__init__(FIRST_HEAD_RATE, _LEAST_HEAD_WEIGHT, _LEAST_HEAD_WEIGHT)

    def of_sequence(self) -> Share:
        """Returns the share that is assumed of a new sequence."""
        rate = max(self.rate, _LEAST_FIRST_RATE)
        return Share(rate, _FIRST_HEAD_WEIGHT, _LEAST_HEAD_WEIGHT)


@dataclass(slots=True, eq=False)
class Drafts:
    """The drafts of one sequence.

    Attributes:
        source: the source of the drafts.
        proposed: drafts behind the sequence's known tokens. Empty if there are none.
        chosen: the first of these drafts, which the next step verifies.
        share: estimated share of right drafts, among those up to the first wrong one.
        uncounted: ids of the sequence's last tokens that the penalties of its row have not counted.
        num_unfolded: number of accepted drafts that the row's recurrent state lacks, because it
            has only seen the token before them. 0 if the model has no recurrent states.
        waits: True if the sequence is not planned ahead although there are no drafts, because the
            token in flight is expected to bring some.
        group: row of the drafts that the model's layer makes behind the last step.
    """

    source: DraftSource
    proposed: list[int] = field(default_factory=list[int])
    chosen: list[int] = field(default_factory=list[int])
    share: Share = field(default_factory=lambda: Share(FIRST_RATE))
    uncounted: list[int] = field(default_factory=list[int])
    num_unfolded: int = 0
    waits: bool = False
    group: int = 0
    _resumes_at: int = 0
    _pause: int = 0

    @property
    def rate(self) -> float:
        """Estimated share of right drafts."""
        return self.share.rate

    def leave_row(self) -> None:
        """Forgets what is meant for the row that the sequence loses."""
        self.chosen, self.uncounted, self.num_unfolded, self.waits = [], [], 0, False

    def take(self) -> tuple[int, ...]:
        """Returns the chosen drafts, which are then no longer chosen."""
        chosen, self.chosen = self.chosen, []
        return tuple(chosen)

    def verified(self, num_accepted: int, num_drafts: int, num_tokens: int) -> None:
        """Learns from a step.

        Args:
            num_accepted: number of accepted drafts.
            num_drafts: number of drafts that the step has verified.
            num_tokens: number of the sequence's tokens after the step.
        """
        self.share.verified(num_accepted, num_drafts)
        if num_accepted:
            self._pause = 0
        else:
            self._pause = min(max(_PAUSE, 2 * self._pause), _MAX_PAUSE)
            self._resumes_at = num_tokens + self._pause

    def pauses(self, num_tokens: int) -> bool:
        """Returns whether a sequence of `num_tokens` tokens should verify no drafts."""
        return num_tokens < self._resumes_at

    def expected_tokens(self, num_drafts: int) -> float:
        """Returns the expected number of tokens of a step that verifies so many drafts."""
        return sum([self.rate**count for count in range(num_drafts + 1)])
