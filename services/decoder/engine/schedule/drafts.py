"""The drafts of one sequence: their source, how often they were right, and the next ones."""

from dataclasses import dataclass, field

from services.decoder.engine.schedule.lookup import DraftSource

# The share of right drafts that is assumed before any was verified, and that of the model's own
# layer, of whose first drafts 0.80 to 0.86 were right where somebody has published it. With three
# drafts, a batch of which all sequences are planned ahead would never try the lower share.
FIRST_RATE, FIRST_HEAD_RATE = 0.6, 0.75
# Weight of a draft in the estimated share of right drafts.
_WEIGHT = 0.15
# After a step whose first draft was wrong, drafts pause for so many tokens. Each further such step
# doubles the pause, up to the limit.
_PAUSE, _MAX_PAUSE = 3, 96


@dataclass(slots=True, eq=False)
class Drafts:
    """The drafts of one sequence.

    Attributes:
        source: the source of the drafts.
        proposed: drafts behind the sequence's known tokens. Empty if there are none.
        chosen: the first of these drafts, which the next step verifies.
        rate: estimated share of right drafts, among those up to the first wrong one.
        uncounted: ids of the sequence's last tokens that the penalties of its row have not counted.
        num_unfolded: number of accepted drafts that the row's recurrent state lacks, because it
            has only seen the token before them. 0 if the model has no recurrent states.
    """

    source: DraftSource
    proposed: list[int] = field(default_factory=list[int])
    chosen: list[int] = field(default_factory=list[int])
    rate: float = FIRST_RATE
    uncounted: list[int] = field(default_factory=list[int])
    num_unfolded: int = 0
    _resumes_at: int = 0
    _pause: int = 0

    def leave_row(self) -> None:
        """Forgets what is meant for the row that the sequence loses."""
        self.chosen, self.uncounted, self.num_unfolded = [], [], 0

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
        for _ in range(num_accepted):
            self.rate += _WEIGHT * (1.0 - self.rate)
        if num_accepted < num_drafts:
            self.rate -= _WEIGHT * self.rate
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
