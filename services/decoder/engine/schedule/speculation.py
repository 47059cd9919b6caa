"""Speculation: which sequences verify drafts in the next step, and how many. Pure Python.

Drafts cost time, because each is computed like a token, and yield tokens if they are right. A
sequence's j-th draft is right with a probability of about rate ^ j. It is worth its time if a
millisecond spent on it yields at least as many tokens as a millisecond of the step without drafts:
in a step of T ms for N sequences, if rate ^ j / (ms of a token) >= N / T. So the number of drafts
follows the share of right drafts of each sequence, the size of the batch and the device. There are
no drafts in a step that computes prompts, because first tokens should not wait for them.

The host has to know a sequence's last token to find its drafts. While steps overlap, a sequence
with drafts of the lookup therefore takes part in every second step at most, and needs to expect
more tokens of each. If the model's own layer drafts, all sequences wait together, see `draft_pace`.
"""

import logging
from collections.abc import Iterable

from services.decoder.engine.messages import DraftTotals, EngineInfo
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.chunk import Chunk
from services.decoder.engine.schedule.draft_pace import DraftPace
from services.decoder.engine.schedule.drafts import FIRST_RATE, Drafts, HeadShare, Share
from services.decoder.engine.schedule.head_drafts import HeadSources
from services.decoder.engine.schedule.lookup import DraftSources, Lookups
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad

log = logging.getLogger(__name__)

# Tokens that a step with drafts has to yield if steps overlap: more than the two tokens that the
# sequence would have had meanwhile, if other sequences keep the device busy, or more than makes up
# for the time until the next launch, if there are no others.
_LEAST_AMONG_OTHERS, _LEAST_ALONE = 2.2, 1.3
# A sequence that decodes alone waits for its next token if it expects to gain at least this many
# steps. Waiting costs it the time from that token to the next launch, which is less.
_LEAST_PROSPECT = 0.15
# The most drafts of a sequence. One that decodes alone has up to `max_drafts` behind a quotation of
# `_LONG_MATCH` tokens or more, which probably goes on, and its drafts do not pause there.
_MOST_DRAFTS, _LONG_MATCH = 8, 8
# A step of few sequences mostly reads weights, so a higher price than this is an error of the cost
# model, which corrects itself only if drafts are verified. With more sequences, drafts are tried
# all the same in some steps, because the device may have been slow when the price was learned.
_FEW_DECODES, _MOST_OF_FEW = 4, 0.5
_TRIAL_PERIOD = 64
# Among sequences whose drafts of the layer pay, a draft of the others is verified in one of so many
# steps, so that their share of right drafts is known.
_HEAD_TRIAL_PERIOD = 16
# A warning is logged if so many verifications in a row yield fewer tokens each than this.
_WARNING_PERIOD, _WARNING_TOKENS = 1000, 1.2


class AcceptedLengths:
    """Warns if verifications yield few tokens, so that drafts cost more than they gain."""

    def __init__(self) -> None:
        self._num_chunks = self._num_accepted = 0

    def add(self, num_accepted: int) -> None:
        """Counts a verification, and warns at the end of each period in which the mean is low."""
        self._num_chunks += 1
        self._num_accepted += num_accepted
        if self._num_chunks < _WARNING_PERIOD:
            return
        mean = 1 + self._num_accepted / self._num_chunks
        self._num_chunks = self._num_accepted = 0
        if mean < _WARNING_TOKENS:
            log.warning(
                "the last %d verifications of drafts have yielded %.2f tokens each, so speculation "
                "hardly pays for these requests; DECODER_SPECULATION=off ends it",
                _WARNING_PERIOD,
                mean,
            )


class Speculation:
    """Owner of the decision how many drafts each sequence verifies.

    Args:
        info: the engine's limits.
        max_drafts: the most drafts of a sequence in a step. 0 if there is no speculation.
        cost: the model that predicts how long a step lasts.
        step_ms: milliseconds that a step may last, see `StepCost.bound`.
        overlap: True if a step is launched before the tokens of the step before it are read.

    Attributes:
        max_drafts: the most drafts of a sequence in a step.
        sources: maker of the sequences' sources of drafts.
        totals: totals so far. None if there is no speculation.
        pace: decides whether the model's own layer drafts.
    """

    def __init__(
        self,
        info: EngineInfo,
        max_drafts: int,
        cost: StepCost,
        *,
        step_ms: float,
        overlap: bool,
    ) -> None:
        if max_drafts and info.max_tokens_per_step > 1:
            raise ValueError("the runner yields several tokens a step by itself")
        if info.has_states and max_drafts > info.max_drafts:
            raise ValueError("the runner keeps no inputs of drafts for its recurrent states")
        self._has_states = info.has_states
        self.max_drafts = max_drafts
        self.sources: DraftSources = HeadSources() if info.has_draft_head else Lookups()
        self._num_head_drafts = min(max_drafts, info.num_head_drafts)
        self._head_share = HeadShare()
        self.totals = DraftTotals(accepted_at=[0] * max_drafts) if max_drafts else None
        self._cost, self._step_ms, self._overlap = cost, step_ms, overlap
        # A chunk with k drafts has 1 + k samples, and a step at most as many as there are rows.
        self._max_samples = info.max_num_sequences
        self._is_open = True
        self._num_dear = 0  # number of steps for which drafts were dear
        self._price = 0.0  # least probability with which a draft has to be right
        self._num_steps = 0  # number of steps that could verify drafts
        self._is_trial = False  # whether the last drafts of the layer are a trial
        self.pace = DraftPace()
        self._lengths = AcceptedLengths()

    def start(self, sequence: Sequence) -> None:
        """Gives a new sequence a source of drafts."""
        if self.max_drafts:
            source = self.sources.of(sequence.message)
            share = self._head_share.of_sequence() if self._num_head_drafts else Share(FIRST_RATE)
            sequence.drafts = Drafts(source, share=share)

    def tokens_arrived(
        self,
        sequence: Sequence,
        num_others: int,
        offered: Iterable[int] = (),
        *,
        is_alone: bool = False,
    ) -> bool:
        """Looks for drafts behind new tokens of a sequence.

        Args:
            sequence: the sequence.
            num_others: number of other sequences that are planned while their tokens are in flight.
            offered: drafts that came with the tokens, for the sequence's source.
            is_alone: True if no other sequence decodes.

        Returns:
            Whether the sequence is not to be planned before the tokens in flight have arrived,
            because its next step should verify drafts, or because these tokens may bring drafts.
        """
        drafts, num_tokens = sequence.drafts, len(sequence.token_ids)
        if drafts is None:
            return False
        drafts.source.read(sequence.token_ids)
        drafts.source.offer(offered)
        drafts.proposed.clear()
        drafts.waits = False
        if self._num_head_drafts:
            # Whether the layer drafts at all was decided when the step was planned.
            if not sequence.num_in_flight:
                most = min(self.max_drafts, sequence.max_length - num_tokens - 1)
                drafts.proposed = drafts.source.propose(most) if most > 0 else []
            return False
        is_closed = self._overlap and not self._is_open
        if is_closed or self._price > drafts.rate:
            return False
        is_long = is_alone and drafts.source.num_equal() >= _LONG_MATCH
        if drafts.pauses(num_tokens) and not is_long:
            return False
        most = self.max_drafts if is_long else min(self.max_drafts, _MOST_DRAFTS)
        most = min(most, sequence.max_length - num_tokens - 1)
        if most <= 0:
            return False
        drafts.proposed = drafts.source.propose(most)
        if not drafts.proposed:
            may_wait = self._overlap and is_alone
            drafts.waits = may_wait and drafts.source.prospect() >= _LEAST_PROSPECT
        elif not self._pays(drafts, len(drafts.proposed), num_others):
            drafts.proposed.clear()
        return drafts.waits or bool(drafts.proposed)

    @property
    def head_room(self) -> int:
        """Number of tokens behind a step's own whose keys and values the model's layer stores. Each
        draft but the first depends on the drafts before it.
        """
        return max(0, self._num_head_drafts - 1)

    def num_head_drafts(self, chunks: list[Chunk], *, is_open: bool) -> int:
        """Returns how many tokens the model should draft behind each that a step samples; see
        `Decodes.head_drafts`.
        """
        rates = [c.sequence.drafts.rate for c in chunks if c.samples and c.sequence.drafts]
        if not (self._num_head_drafts and is_open and rates):
            return 0
        # A sequence whose mask may be late stays ahead. Models with such a layer have none, because
        # they have recurrent states.
        if any([c.from_device and c.sequence.message.token_masks for c in chunks]):
            return 0
        # Drafts take rows that no sequence uses. Among few such rows, some sequences get one more.
        share, rest = divmod(max(0, self._max_samples - len(chunks)), len(chunks))
        if not share + rest:
            return 0
        tokens = len(chunks) - len(rates)
        for rate in rates:
            less, more = (self._expected_tokens(rate, share + extra) for extra in (0, 1))
            tokens += less + (more - less) * rest / len(chunks)
        if not self.pace.drafts(tokens / len(chunks)):
            return 0
        self._is_trial = self.pace.is_trial
        return self._num_head_drafts

    def choose(
        self, ready: list[Sequence], ahead: list[Sequence], blocks: BlockManager, *, is_open: bool
    ) -> None:
        """Sets `Drafts.chosen` of the sequences that can be planned now.

        Args:
            ready: sequences whose last token, and token mask if they need one, have arrived.
            ahead: sequences whose last token is in flight.
            blocks: the KV blocks. Drafts never preempt a sequence.
            is_open: False if the step may compute prompts, so that it has no drafts.
        """
        num_decodes = len(ready) + len(ahead)
        num_left = self._max_samples - num_decodes
        self._is_open = is_open and num_left > 0
        load = StepLoad(num_decodes, num_decodes)
        load.keys = sum([s.num_computed_tokens + 1 for s in ready])
        load.keys += sum([s.num_computed_tokens + 1 for s in ahead])
        step_ms = self._cost.predict(load)
        load.drafts = 1
        token_ms = self._cost.predict(load) - step_ms
        self._price = token_ms * num_decodes / step_ms if step_ms else 0.0
        self._num_steps += bool(ready)
        if self._price > _MOST_OF_FEW:
            self._num_dear += 1
            # Drafts of one step are chosen before it, so a trial takes two.
            is_trial = self._num_dear % _TRIAL_PERIOD >= _TRIAL_PERIOD - 2
            if num_decodes <= _FEW_DECODES or is_trial:
                self._price = _MOST_OF_FEW
        if token_ms > 0:
            bound_ms = self._cost.bound(self._step_ms)
            num_left = int(min(num_left, max(0.0, (bound_ms - step_ms) / token_ms)))
        drafting: list[Drafts] = []
        num_blocks = blocks.num_free - num_decodes
        for sequence in ready:
            if (drafts := sequence.drafts) is None:
                continue
            drafts.chosen = []
            wanted = self._num_worthwhile(drafts) if self._is_open else 0
            if num_decodes > 1:  # the drafts may have been found while the sequence was alone
                wanted = min(wanted, _MOST_DRAFTS)
            if sequence.message.token_masks:
                wanted = min(wanted, len(sequence.draft_masks))
            num_blocks -= -(-wanted // blocks.block_size)
            if wanted and num_blocks >= 0 and self._pays(drafts, wanted, len(ahead)):
                drafts.chosen = drafts.proposed[:wanted]
                drafting.append(drafts)
        for index, drafts in enumerate(drafting):
            share = num_left // (len(drafting) - index)
            del drafts.chosen[share:]
            num_left -= len(drafts.chosen)

    def verified(self, chunk: Chunk, num_matching: int, num_tokens: int) -> tuple[int, int] | None:
        """Notes the result of a chunk with drafts, after its tokens were appended.

        Args:
            chunk: the chunk.
            num_matching: number of leading drafts that are equal to the sampled tokens.
            num_tokens: number of tokens that the sequence got, fewer than 1 + `num_matching` if it
                has ended within them.

        Returns:
            Numbers of accepted and rejected drafts of the client's prediction. None if the drafts
            are not from the prediction.
        """
        sequence, drafts, totals = chunk.sequence, chunk.sequence.drafts, self.totals
        assert drafts is not None and totals is not None
        num_accepted, num_drafts = min(num_matching, num_tokens), len(chunk.drafts)
        totals.num_chunks += 1
        totals.num_drafts += num_drafts
        totals.num_accepted += num_accepted
        for place in range(num_accepted):
            totals.accepted_at[place] += 1
        drafts.verified(num_matching, num_drafts, len(sequence.token_ids))
        self._head_share.verified(num_matching, num_drafts)
        is_running = sequence.state is SequenceState.RUNNING
        if is_running and self._has_states:
            drafts.num_unfolded = num_tokens - 1
        if is_running and sequence.message.sampling.has_penalties:
            drafts.uncounted += sequence.token_ids[-num_tokens:]
        self._lengths.add(num_accepted)
        if not drafts.source.is_prediction:
            return None
        return num_accepted, num_drafts - num_matching

    def timed(self, chunks: list[Chunk], ms: float) -> None:
        """Learns what steps with and without drafts of the model's own layer take.

        Args:
            chunks: the chunks of a step.
            ms: milliseconds between the tokens of the step before and the step's own.
        """
        if not self._num_head_drafts:
            return
        has_drafts = any([chunk.drafts for chunk in chunks])
        if has_drafts or chunks[-1].from_device:
            load = StepLoad(len(chunks), len(chunks), keys=sum([c.start + 1 for c in chunks]))
            self.pace.timed(ms, self._cost.predict(load), has_drafts=has_drafts)

    def _num_worthwhile(self, drafts: Drafts) -> int:
        """Returns how many of a sequence's drafts are worth their time."""
        found = self._most_worthwhile(drafts.rate, len(drafts.proposed))
        is_trial = self._is_trial or self._num_steps % _HEAD_TRIAL_PERIOD == 0
        if self._num_head_drafts and is_trial:
            return max(found, min(1, len(drafts.proposed)))
        return found

    def _most_worthwhile(self, rate: float, most: int) -> int:
        """Returns how many of `most` drafts are worth their time at a share of right drafts."""
        chance = 1.0
        for count in range(most):
            chance *= rate
            if chance < self._price:
                return count
        return most

    def _expected_tokens(self, rate: float, most: int) -> float:
        """Returns the expected tokens of a step of one sequence with up to `most` drafts, of which
        it verifies as many as are worth their time.
        """
        most = min(most, self._num_head_drafts)
        return sum([rate**count for count in range(1 + self._most_worthwhile(rate, most))])

    def _pays(self, drafts: Drafts, num_drafts: int, num_others: int) -> bool:
        """Returns whether a step with drafts yields enough tokens for the steps that it delays."""
        if not self._overlap or self._num_head_drafts:
            return True
        least = _LEAST_AMONG_OTHERS if num_others else _LEAST_ALONE
        return drafts.expected_tokens(num_drafts) >= least
