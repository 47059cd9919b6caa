"""The clients of the decoder pods, and the choice among them.

The gateway has one gRPC stream to each decoder, which carries the commands (submit, cancel) and the
events of all its sequences. `Attempts` chooses a pod with `DecoderPool.choose` and submits a
sequence with `DecoderPod.submit`. The pod passes each event of the sequence to its receiver, which
is the `Attempts`, as a `TokenEvent`: new tokens of the choice, or its end. If the stream
ends, each of its sequences gets a last event with an error: `ProcessLost` if the stream has broken,
and `Unavailable` if the decoder has closed it.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import grpc.aio

from services.common.errors import (
    EmbeddingUnavailable,
    ProcessLost,
    TriptychError,
    Unavailable,
    from_code,
)
from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import error_from_rpc
from services.gateway.clients.commands import Commands
from services.gateway.clients.lost_adapters import LostAdapters
from services.gateway.clients.pods import Pod, PodDialer, PodState, Pool
from services.gateway.clients.sent_prompts import PromptChain, Sent, SentPrompts, choose
from services.gateway.clients.served_model import ServedModel
from services.gateway.clients.token_event import EmbeddingLost, EventReceiver, TokenEvent

log = logging.getLogger(__name__)


class DecoderPod(Pod):
    """A decoder pod and its stream.

    Attributes:
        description: the model that the decoder serves. None until the pod is connected.
        load: load of the decoder at the last health check. None if the decoder did not report it.
        adapters: adapters that the decoder reported with its load.
        reported_at: monotonic time of the last report.
        prompts: prompts that this gateway has sent to the decoder.
    """

    service = "decoder"
    description: pb.DescribeDecoderResponse | None = None
    load: pb.LoadResponse | None = None
    adapters: Sequence[pb.Adapter] = ()
    reported_at: float = -math.inf

    def __init__(self, address: str, served: ServedModel, dialer: PodDialer) -> None:
        super().__init__(address, served, dialer)
        self._describe = self.unary(
            "Describe", pb.DescribeDecoderRequest, pb.DescribeDecoderResponse
        )
        self._ask_load = self.unary("Load", pb.LoadRequest, pb.LoadResponse)
        self.reset = self.unary(
            "ResetPrefixCache", pb.ResetPrefixCacheRequest, pb.ResetPrefixCacheResponse
        )
        self.load_adapter = self.unary("LoadAdapter", pb.LoadAdapterRequest, pb.LoadAdapterResponse)
        self.unload_adapter = self.unary(
            "UnloadAdapter", pb.UnloadAdapterRequest, pb.LoadAdapterResponse
        )
        self._generate = self.channel.stream_stream(
            "/triptych.v1.Decoder/Generate",
            request_serializer=pb.GenerateCommand.SerializeToString,
            response_deserializer=pb.GenerateEvents.FromString,
        )
        self._ids = itertools.count(1)
        self._num_streams = 0
        # For each running sequence, by id: index of its choice in the request, receiver of its
        # events, and entry of its prompt in `prompts`.
        self._sequences: dict[int, tuple[int, EventReceiver, Sent]] = {}
        self.prompts = SentPrompts()
        self._commands = Commands()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def misfit(self) -> str:
        """Reason why the decoder cannot serve the gateway's model. Empty if it can."""
        return self.served.misfit_of_decoder(self.description) if self.description else ""

    @property
    def connected(self) -> bool:
        return bool(self._tasks)

    @property
    def session(self) -> str:
        """Name of the current stream: the address and the number of the connection. A pod that has
        restarted at the same address has a new session.
        """
        return f"{self.address} (stream {self._num_streams})"

    async def check(self) -> PodState:
        state = await super().check()
        load = None
        if state is PodState.SERVING:
            with suppress(TriptychError):
                load = await self.ask(self._ask_load, pb.LoadRequest())
                self.adapters, self.reported_at = load.adapters, time.monotonic()
        self.load = load
        return state

    async def connect(self) -> None:
        self.description = await self.ask(self._describe, pb.DescribeDecoderRequest())
        self._commands = Commands(batches=self.description.takes_batches)
        self.prompts = SentPrompts(self.description.num_blocks * self.description.block_size)
        self._num_streams += 1
        call = self._generate()
        self._tasks = [
            asyncio.create_task(self._write(call, self._commands)),
            asyncio.create_task(self._read(call)),
        ]

    async def disconnect(self, reason: str) -> None:
        tasks, self._tasks = self._tasks, []
        # The sequences fail here, before `_read` ends and fails them with another error.
        self._fail_all(ProcessLost(f"the decoder was lost: {reason}"))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def submit(
        self, submit: pb.Submit, choice: int, receiver: EventReceiver, chain: PromptChain
    ) -> int:
        """Sends a sequence to the decoder. `receiver` gets all events of the sequence, also the
        event that ends it.

        Args:
            submit: message to the decoder. This method sets the sequence id and sends a copy, so
                the caller may change the message for the next sequence.
            choice: index of the sequence's choice in the request, which its events carry.
            receiver: receiver of the sequence's events.
            chain: hash chain of the prompt, which has a hash for each prefix. `prompts` remembers
                it, because the decoder will soon have these prefixes in its cache.

        Returns:
            The sequence's id, for `cancel`.
        """
        submit.sequence_id = sequence_id = next(self._ids)
        if not self.connected:
            # The stream broke after the pod was chosen. The error is not `ProcessLost`, because the
            # sequence cannot have killed a decoder that it was never sent to.
            receiver.receive(TokenEvent(choice, error=Unavailable("the decoder was lost")))
            return sequence_id
        # If the logprobs of the prompt are wanted, the decoder computes the whole prompt and does
        # not look into its prefix cache.
        uses_cache = not submit.sampling.HasField("prompt_logprobs")
        self._sequences[sequence_id] = choice, receiver, self.prompts.send(chain, uses_cache)
        self.num_in_flight = len(self._sequences)
        self._commands.submit(submit)
        return sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Cancels a sequence if it still runs. No more events of the sequence follow."""
        if sequence_id in self._sequences:
            self._forget(sequence_id)
            self._commands.cancel(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        _, _, sent = self._sequences.pop(sequence_id)
        self.prompts.ended(sent)
        self.num_in_flight = len(self._sequences)

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall[pb.GenerateCommand, pb.GenerateEvents]",
        commands: Commands,
    ) -> None:
        # The errors of a broken stream are ignored here, because `_read` reports them.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # Most events are one token id and nothing else. With `bare_tokens`, the decoder sends
            # them as two lists, `sequence_ids` and `token_ids`, instead of one message each.
            await call.write(pb.GenerateCommand(accept=pb.Accept(bare_tokens=True)))
            while True:
                await call.write(await commands.next())

    async def _read(
        self, call: "grpc.aio.StreamStreamCall[pb.GenerateCommand, pb.GenerateEvents]"
    ) -> None:
        # If the decoder ends the stream without an error, it has not died, so the error is not
        # `ProcessLost`.
        error: TriptychError = Unavailable("the decoder ended its stream")
        try:
            async for message in call:
                # Events with a sequence's first token go first, because somebody waits for it, and
                # handling all other events of a step takes some milliseconds.
                following: list[pb.SequenceEvent] = []
                for event in message.events:
                    if event.HasField("started"):
                        self._dispatch(event, event.started)
                    else:
                        following.append(event)
                if message.token_ids:
                    self._dispatch_tokens(message.sequence_ids, message.token_ids)
                for event in following:
                    self._dispatch(event, None)
        except grpc.aio.AioRpcError as failure:
            error = ProcessLost(error_from_rpc(failure, "the decoder").message)
        finally:
            call.cancel()
            # If `disconnect` has ended this task, it has also emptied `_tasks`. Otherwise the
            # stream has broken, and this task ends the writing task and marks the pod as unhealthy.
            # It cannot call `disconnect` for this, because `disconnect` would wait for this task.
            if self._tasks and self._tasks[1] is asyncio.current_task():
                self._tasks[0].cancel()
                self._tasks = []
                self.healthy = False
                log.warning("%s: %s", self.address, error.message)
            self._fail_all(error)

    def _dispatch_tokens(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        sequences = self._sequences
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            entry = sequences.get(sequence_id)
            if entry is not None:
                choice, receiver, _ = entry
                receiver.receive(TokenEvent(choice, (token_id,)))

    def _dispatch(self, event: pb.SequenceEvent, started: pb.Started | None) -> None:
        entry = self._sequences.get(event.sequence_id)
        if entry is None:
            return  # The sequence was cancelled.
        choice, receiver, sent = entry
        if started is not None:
            self.prompts.started(sent, started.num_cached_tokens)
        finish_reason = error = None
        end = event.WhichOneof("end")
        if end == "finished":
            stopped = event.finished.reason == pb.Finished.REASON_STOP
            finish_reason = "stop" if stopped else "length"
        elif end == "failed":
            failed = event.failed
            error = from_code(failed.code, failed.message)
            if failed.code == EmbeddingUnavailable.code:
                error = EmbeddingLost(failed.message, failed.encoder_address)
        if finish_reason or error:
            self._forget(event.sequence_id)
        token_ids = list(event.token_ids)
        # Reading the field costs time. Prompt logprobs come in an event without tokens or with the
        # first token, so the field of other events is not read.
        scores = event.prompt_logprobs if started is not None or not token_ids else ()
        predicted = None
        if event.accepted_tokens or event.rejected_tokens:
            predicted = event.accepted_tokens, event.rejected_tokens
        receiver.receive(
            TokenEvent(
                choice,
                token_ids,
                event.logprobs,
                started,
                finish_reason,
                error,
                scores,
                decoder_drains=event.leaving,
                vector=event.vector,
                predicted=predicted,
            )
        )

    def _fail_all(self, error: TriptychError) -> None:
        sequences, self._sequences = self._sequences, {}
        self.prompts, self.num_in_flight = SentPrompts(), 0
        for choice, receiver, _ in sequences.values():
            receiver.receive(TokenEvent(choice, error=error))


class DecoderPool(Pool[DecoderPod]):
    """All decoders.

    Attributes:
        lost_adapters: adapters of decoders that were lost.
    """

    pod = DecoderPod

    def __init__(self, addresses: Sequence[str], served: ServedModel, dialer: PodDialer) -> None:
        super().__init__(addresses, served, dialer)
        self.lost_adapters = LostAdapters(self, dialer)

    def _candidates(self) -> list[DecoderPod]:
        """Returns the decoders that accept work and serve the gateway's model.

        If the gateway's model directory has no weights, the gateway does not know the fingerprint
        of its model. It then adopts the fingerprint of the decoders that it finds. When all
        decoders with this fingerprint are gone, for example after a roll-out, it adopts the
        fingerprint of the decoders that are there then.
        """
        fitting = self.fitting()
        pods = [pod for pod in fitting if pod.healthy]
        if not pods or not self._served.fingerprint:
            self._served.adopt(_descriptions(self.serving()))
            fitting = self.fitting()
            pods = [pod for pod in fitting if pod.healthy]
        # The gateway's context length is the shortest of all decoders that serve its model. Those
        # that are unhealthy count, too, because they may soon be healthy again.
        self._served.follow_context(_descriptions(fitting))
        return pods

    def description(self) -> pb.DescribeDecoderResponse | None:
        """Returns the description of the healthy decoder with the shortest context. None if no
        decoder is healthy.
        """
        found = _descriptions(self._candidates())
        return min(found, key=lambda d: d.max_model_len) if found else None

    def loads(self) -> list[pb.LoadResponse]:
        """Returns the loads of the healthy decoders that report their load."""
        return [pod.load for pod in self.healthy() if pod.load is not None]

    async def _remove(self, address: str) -> None:
        self.lost_adapters.removed(self._pods[address][0])
        await super()._remove(address)

    async def reset_prefix_caches(self) -> int:
        """Empties the prefix caches of all healthy decoders.

        Returns:
            The number of decoders.

        Raises:
            TriptychError: a decoder fails or does not answer.
        """
        pods = self.healthy()
        request = pb.ResetPrefixCacheRequest()
        await asyncio.gather(*(pod.ask(pod.reset, request) for pod in pods))
        return len(pods)

    def choose(
        self, chain: PromptChain, key: bytes, exclude: Collection[str], num_tokens: int = 0
    ) -> DecoderPod:
        """Chooses the decoder with the least work for a prompt. Prompt tokens that are cached there
        count as no work. `sent_prompts.choose` has the formula.

        Args:
            chain: hash chain of the prompt.
            key: affinity key of the prompt. If decoders have equal work, prompts with equal keys go
                to the same decoder.
            exclude: sessions of decoders that must not be chosen.
            num_tokens: number of tokens of prompt and completion. Only decoders with a context of
                at least this length are chosen.

        Raises:
            Unavailable: no decoder is left.
        """
        pods = [
            pod
            for pod in self._candidates()
            if pod.session not in exclude
            and pod.description is not None
            and pod.description.max_model_len >= num_tokens
            and chain.adapter in (b"", *(each.digest for each in pod.adapters))
        ]
        if not pods:
            raise Unavailable("no decoder is available")
        return choose(pods, chain, key)


def _descriptions(pods: Sequence[DecoderPod]) -> list[pb.DescribeDecoderResponse]:
    return [found for pod in pods if (found := pod.description)]
