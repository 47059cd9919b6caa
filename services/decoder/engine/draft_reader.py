"""Looks for drafts behind the tokens of a step, if possible before the device has made them.

The device makes the drafts of the model's own layer behind the tokens of a step, while the host
postprocesses the tokens. If nothing that the host decides depends on the ids of the drafts, the
host launches the next step meanwhile. That step finds the drafts on the device, which therefore
does not wait for the host. The host reads their ids with the results of that step.

A message that has arrived by then may be a request. A step that was launched without it would
delay its first token by the whole step, so the host reads the drafts and the message first.
"""

from typing import Protocol

from services.common.clock import Clock
from services.decoder.engine.runner import PendingStep
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.step_times import StepTimes


class Inbox(Protocol):
    """Queue of the messages to the engine."""

    def has_messages(self) -> bool:
        """Returns whether a message has arrived that has not been read."""
        ...


class DraftReader:
    """Reads the drafts that come behind tokens, and tells the scheduler about them.

    Args:
        scheduler: the scheduler of the engine's sequences.
        times: the times of the engine's steps.
        clock: the engine's clock.
        ahead: True if steps may be launched before the drafts of the step before are read.

    Attributes:
        inbox: queue of the messages to the engine. Set by the engine's owner. None if no message
            arrives while a step runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes,
        clock: Clock,
        *,
        ahead: bool,
    ) -> None:
        self._scheduler, self._times, self._clock = scheduler, times, clock
        self._ahead = ahead
        self.inbox: Inbox | None = None
        # A batch that was launched before the host knew its drafts, and the step that made them.
        self._unread: tuple[Batch, PendingStep] | None = None

    def read_ids(self, batch: Batch) -> None:
        """Notes the ids of the drafts that a batch has verified, if they were unknown."""
        if self._unread is None or self._unread[0] is not batch:
            return
        drafts = self._unread[1].drafts()
        self._unread = None
        for chunk in batch.chunks:
            if chunk.group >= 0 and drafts is not None:
                ids = drafts[chunk.group, : len(chunk.drafts)].clip(min=0)
                chunk.drafts = tuple(ids.tolist())

    def look(
        self,
        batch: Batch,
        pending: PendingStep,
        now: float,
        *,
        in_flight: bool,
        is_last: bool = False,
    ) -> Batch | None:
        """Looks for drafts behind the tokens of a step, and notes the step's time.

        Args:
            batch: the plan of the step, whose tokens were appended.
            pending: the step.
            now: time at which the tokens were read, by the engine's clock.
            in_flight: True if a later step is in flight.
            is_last: True if no step may be launched now.

        Returns:
            The next batch, if it is to be launched while the device makes the drafts, else None.
        """
        times, decodes = self._times, self._scheduler.decodes
        if not self._ahead or in_flight or is_last or self._needs_ids(batch):
            if (drafts := pending.drafts()) is not None:
                times.drafted(self._clock() - now, in_flight=in_flight)
            decodes.speculation.timed(batch.chunks, times.read(batch, now, in_flight=in_flight))
            decodes.look_for_drafts(batch.chunks, drafts)
            return None
        decodes.speculation.timed(batch.chunks, times.read(batch, now, in_flight=False))
        decodes.look_for_unknown_drafts(batch.chunks, batch.num_head_drafts)
        following = self._scheduler.schedule()
        decodes.forget_unknown_drafts(batch.chunks)
        if not following.chunks:
            return None
        times.drafted(self._clock() - now, in_flight=False)
        self._unread = following, pending
        return following

    def _needs_ids(self, batch: Batch) -> bool:
        """Returns whether the host has to know the drafts before it can launch the next step.

        Drafts decide about token masks and what penalties count. A step with prompts has no drafts,
        and a message that has arrived may bring a prompt.
        """
        scheduler = self._scheduler
        if not batch.num_head_drafts or scheduler.num_masked or scheduler.prefills.has_work:
            return True
        if self.inbox is not None and self.inbox.has_messages():
            return True
        return any([chunk.sequence.message.sampling.has_penalties for chunk in batch.chunks])
