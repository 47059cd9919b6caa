"""An encoder and a decoder with the real protocol and no computation.

Each is a real gRPC server; tests set what it does. Kept in step with proto/*.proto.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import grpc.aio
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.errors import (
    InvalidRequest,
    InvalidVideo,
    NotFound,
    TriptychError,
    VideoNotHeld,
    WrongImageKey,
)
from services.common.frame_pairs import Clip
from services.common.geometry import Unit
from services.common.images.image_key import (
    adapted_salt,
    embedding_key,
    frames_key,
    image_key,
    still_digest,
)
from services.common.pb import decoder_pb2, encoder_pb2
from services.common.spans import TRACEPARENT
from services.common.transport import rpc
from tests.noise import PATIENCE_S


def raising(error: TriptychError) -> Callable[[object], Awaitable[None]]:
    """A `before` of a fake, which fails."""

    async def before(_: object) -> None:
        raise error

    return before


def once(condition: Callable[[], object]) -> Callable[[object], Awaitable[None]]:
    """A `before` of a fake, which waits until `condition` holds."""

    async def before(_: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - of fakes, which have no event
                await asyncio.sleep(0.005)

    return before


async def forever(_: object) -> None:
    """A `before` of a fake, which hangs."""
    await asyncio.Event().wait()


class _Health(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """The standard service, which can also stop answering."""

    silent = False

    async def Check(self, request, context):
        if self.silent:
            await asyncio.sleep(60)
        return await super().Check(request, context)


class _FakeServer(rpc.Servicer):
    """Start, stop, kill and health of a fake."""

    server: grpc.aio.Server | None = None
    address = ""

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listens; returns host:port."""
        self.server = rpc.create_server()
        self.health = _Health()
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.register(self.server)
        port = self.server.add_insecure_port(address)
        await self.server.start()
        self.address = f"127.0.0.1:{port}"
        return self.address

    async def drain(self) -> None:
        """Reports NOT_SERVING and continues."""
        await self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self) -> None:
        """Stops at once; running calls fail."""
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)


def clip_file(
    num_frames: int, rate: float, height: int = 64, width: int = 96, tag: str = ""
) -> bytes:
    """What fake encoders take for a video of that many frames."""
    return f"clip {num_frames} {rate} {height} {width} {tag}".encode()


def read_clip(data: bytes) -> Clip | None:
    """What `clip_file` was given."""
    kind, *fields = data.decode(errors="replace").split(" ")
    if kind != "clip":
        return None
    num_frames, rate, height, width = fields[:4]
    return Clip(int(num_frames), float(rate), (int(height), int(width)))


def frame_digests(data: bytes, num_frames: int) -> bytes:
    """Equal for equal frames of clips with one tag, whatever their length."""
    tag = data.split(b" ")[-1]
    return b"".join(still_digest(tag + b"%d" % i)[:16] for i in range(num_frames))


class FakeEncoder(_FakeServer):
    """Refuses an image key that is not the image's, as a real encoder does.

    Attributes:
        before: awaited before each answer; may sleep, or raise a TriptychError to be sent.
        requests: all requests so far.
        num_cancelled: calls that the caller cancelled.
        key_frames: frames behind the first with which decoding of any video may start.
    """

    SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["Encoder"]

    def __init__(self, **description: object) -> None:
        self.description = encoder_pb2.DescribeEncoderResponse(
            **{
                "model_name": "fake", "key_prefix": b"prefix".ljust(32, b"."),
                "dtype": encoder_pb2.DTYPE_FLOAT32, "num_features": 3, "hidden": 32,
                "max_image_patches": 16384, "protocol": rpc.PROTOCOL, **description,
            }
        )  # fmt: skip
        self.reset()

    def reset(self) -> None:
        self.before: Callable[[encoder_pb2.EncodeRequest], Awaitable[None]] | None = None
        self.requests: list[encoder_pb2.EncodeRequest] = []
        self.request_ids: list[str] = []
        self.traceparents: list[str] = []
        self.asked: set[tuple[str, bytes]] = set()  # request id, image key
        self.known: set[bytes] = set()
        self.files: dict[bytes, Clip] = {}  # by digest
        self.any_clip: Clip | None = None  # what every file is, if it is set
        self.probes: list[bytes] = []
        self.probe_shares: list[tuple[str, float]] = []  # tenants and weights of `probes`
        self.uploads: dict[tuple[str, bytes], bytes] = {}  # by tenant and digest
        self.download_error: TriptychError | None = None
        self.before_probe: Callable[[bytes], Awaitable[None]] | None = None
        self.num_tokens_error = 0
        self.num_cancelled = 0
        self.key_frames: Sequence[int] = ()

    async def Describe(self, request, context):
        return self.description

    async def Probe(self, request, context):
        self.probes.append(request.video)
        self.probe_shares.append((request.tenant, request.tenant_weight))
        try:
            if self.before_probe is not None:
                await self.before_probe(request.video)
            if not (found := self.any_clip or read_clip(request.video)):
                raise InvalidVideo("not a video")
        except TriptychError as error:
            await rpc.abort(context, error)
        digest = still_digest(request.video)
        self.files[digest] = found
        return encoder_pb2.ProbeResponse(
            video_digest=digest, num_frames=found.num_frames, rate=found.rate,
            height=found.size[0], width=found.size[1],
            duration_s=found.num_frames / found.rate if found.rate else 0.0,
            frame_digests=frame_digests(request.video, found.num_frames),
            key_frames=np.array(self.key_frames, "<i4").tobytes(),
        )  # fmt: skip

    async def Upload(self, request, context):
        digest = still_digest(request.file)
        self.uploads[request.tenant, digest] = request.file
        return encoder_pb2.UploadResponse(digest=digest, kept_s=3600)

    async def Download(self, request, context):
        place = request.tenant, request.digest
        if self.download_error is not None:
            await rpc.abort(context, self.download_error)
        if place not in self.uploads:
            await rpc.abort(context, NotFound("no such file is stored"))
        file = self.uploads.pop(place) if request.forget else self.uploads[place]
        return encoder_pb2.DownloadResponse(file=b"" if request.forget else file)

    def _key(self, request, unit):
        prefix = self.description.key_prefix
        salt = adapted_salt(request.cache_salt, request.adapter)
        if request.is_embedding:
            return embedding_key(prefix, request.image, unit=unit, salt=salt)
        if not request.HasField("frames"):
            return image_key(prefix, request.image, unit=unit, salt=salt)
        pair = (request.frames.first, request.frames.second)
        if not request.video_digest:
            stills = (request.image, request.second_image or request.image)
            digests = [still_digest(stills[i]) for i in pair]
            return frames_key(prefix, *digests, grid=unit.grid, salt=salt)
        if request.video_digest not in self.files:
            raise VideoNotHeld("the video is not held")
        data = next(v for v in self.probes if still_digest(v) == request.video_digest)
        every = frame_digests(data, self.files[request.video_digest].num_frames)
        digests = [every[16 * i : 16 * i + 16] for i in pair]
        return frames_key(prefix, *digests, grid=unit.grid, salt=salt)

    async def Encode(self, request, context):
        self.requests.append(request)
        metadata = dict(context.invocation_metadata())
        self.request_ids.append(metadata.get(rpc.REQUEST_ID, ""))
        self.traceparents.append(metadata.get(TRACEPARENT, ""))
        self.asked.add((self.request_ids[-1], request.image_key))
        try:
            if self.before is not None:
                await self.before(request)
        except TriptychError as error:
            await rpc.abort(context, error)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        grid = request.grid
        unit = Unit((grid.t, grid.h, grid.w))
        try:
            key = self._key(request, unit)
        except TriptychError as error:
            await rpc.abort(context, error)
        if key != request.image_key:
            await rpc.abort(context, WrongImageKey("the image key is not that of this image"))
        source = "MEMORY" if request.image_key in self.known else "COMPUTED"
        self.known.add(request.image_key)
        return encoder_pb2.EncodeResponse(
            source=f"SOURCE_{source}",
            num_tokens=unit.num_patches // 4 + self.num_tokens_error,
        )


class FakeDecoder(_FakeServer):
    """Answers every prompt with `reply`.

    Attributes:
        reply: token ids; a `stop` end is sent after them unless `max_tokens` comes first.
        end_token: sampled at a `stop` end.
        encoders: those that could give it embeddings. Like a real decoder, which has to wait for
            them, it never overtakes the call to the encoder.
        tokens_per_event, delay_s: the pace.
        before: awaited before a sequence's first event; may raise a TriptychError to be sent.
        before_tokens: awaited after logprobs of the prompt and before the first token; likewise.
        die_after: break the stream after as many tokens of a sequence.
        leave_after: after as many, say that another decoder should continue it.
        adapters: loaded adapters by name.
        refuses_adapters: error with which it refuses to load one; empty: it loads all.
        vector_of: what a decoder of a model for search makes of a prompt's token ids: a vector, or
            one for each token.
        predicted: numbers of accepted and rejected tokens of the prediction, with each event.
        submits: all that came; `running` are those not ended; `cancelled` were by the gateway.
    """

    SERVICE = decoder_pb2.DESCRIPTOR.services_by_name["Decoder"]

    def __init__(self, **description: object) -> None:
        self.description = decoder_pb2.DescribeDecoderResponse(
            **{
                "model_name": "fake", "dtype": encoder_pb2.DTYPE_FLOAT32, "num_features": 3,
                "hidden": 32, "vocab_size": 1000, "max_model_len": 4096, "block_size": 16,
                "num_blocks": 1024, "max_num_sequences": 256, "protocol": rpc.PROTOCOL,
                **description,
            }
        )  # fmt: skip
        self.default_end_token = 0
        self.default_reply: list[int] = [40, 41, 42]
        self.encoders: Sequence[FakeEncoder] = ()
        self.vector_of: Callable[[np.ndarray], np.ndarray] | None = None
        self.reset()

    def reset(self) -> None:
        self.reply = list(self.default_reply)
        self.end_token = self.default_end_token
        self.load: decoder_pb2.LoadResponse | None = decoder_pb2.LoadResponse(num_blocks=1024)
        self.adapters: dict[str, decoder_pb2.Adapter] = {}
        self.refuses_adapters = ""
        self.tokens_per_event = 1
        self.delay_s = 0.0
        self.predicted = 0, 0
        self.before: Callable[[decoder_pb2.Submit], Awaitable[None]] | None = None
        self.before_tokens: Callable[[decoder_pb2.Submit], Awaitable[None]] | None = None
        self.fail_encoder_address = ""
        self.fail_after: tuple[int, str] | None = None
        self.die_after: int | None = None
        self.leave_after: int | None = None
        self.submits: list[decoder_pb2.Submit] = []
        self.cancelled: list[int] = []
        self.num_resets = 0
        self.running: dict[int, asyncio.Task[None]] = {}

    async def Describe(self, request, context):
        return self.description

    async def Load(self, request, context):
        if self.load is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "silent")
            raise AssertionError("abort never returns")
        load = decoder_pb2.LoadResponse()
        load.CopyFrom(self.load)
        load.adapters.extend(self.adapters.values())
        return load

    async def LoadAdapter(self, request, context):
        if self.refuses_adapters:
            await rpc.abort(context, InvalidRequest(self.refuses_adapters))
        digest = request.name.encode().ljust(32)
        self.adapters[request.name] = decoder_pb2.Adapter(
            name=request.name, digest=digest, root=request.directory
        )
        return decoder_pb2.LoadAdapterResponse(adapters=self.adapters.values())

    async def UnloadAdapter(self, request, context):
        self.adapters.pop(request.name)
        return decoder_pb2.LoadAdapterResponse(adapters=self.adapters.values())

    async def ResetPrefixCache(self, request, context):
        self.num_resets += 1
        return decoder_pb2.ResetPrefixCacheResponse()

    async def Generate(self, request_iterator, context):
        # No sequence is far ahead of what the gateway reads: what a cancelled one had written would
        # delay all others of the stream, on a busy machine by minutes.
        events: asyncio.Queue[decoder_pb2.SequenceEvent | None] = asyncio.Queue(64)
        running: dict[int, asyncio.Task[None]] = {}
        accepted = decoder_pb2.Accept()
        reader = asyncio.create_task(self._read(request_iterator, events, running, accepted))
        try:
            while (event := await events.get()) is not None:
                bare = decoder_pb2.GenerateEvents(
                    sequence_ids=[event.sequence_id], token_ids=event.token_ids
                )
                as_event = decoder_pb2.GenerateEvents(events=[event])
                fields = {field.name for field, _ in event.ListFields()}
                is_bare = len(event.token_ids) == 1 and fields == {"sequence_id", "token_ids"}
                await context.write(bare if is_bare and accepted.bare_tokens else as_event)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        finally:
            for task in (reader, *running.values()):
                task.cancel()
            for sequence_id in running:
                self.running.pop(sequence_id, None)

    async def _read(self, commands, events, running, accepted) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for command in commands:
                if command.HasField("accept"):
                    accepted.CopyFrom(command.accept)
                elif command.HasField("submit"):
                    submit = command.submit
                    self.submits.append(submit)
                    task = asyncio.create_task(self._run(submit, events))
                    running[submit.sequence_id] = self.running[submit.sequence_id] = task
                    task.add_done_callback(
                        lambda _, i=submit.sequence_id: self.running.pop(i, None)
                    )
                elif command.cancel.sequence_id in running:
                    self.cancelled.append(command.cancel.sequence_id)
                    running[command.cancel.sequence_id].cancel()

    async def _run(self, submit, events) -> None:
        sequence_id, sampling = submit.sequence_id, submit.sampling
        try:
            await self._until_asked(submit)
            if self.before is not None:
                await self.before(submit)
            await self._score_prompt(submit, events)
            if self.before_tokens is not None:
                await self.before_tokens(submit)
            reply = self.reply[: sampling.max_tokens]
            stops = len(self.reply) < sampling.max_tokens
            if stops:
                reply = [*reply, self.end_token]
            begin = len(submit.generated_token_ids) // 4
            for start in range(begin, len(reply), self.tokens_per_event):
                if self.die_after is not None and start >= self.die_after:
                    await events.put(None)
                    return
                if self.leave_after == start:
                    leaving = decoder_pb2.SequenceEvent(sequence_id=sequence_id, leaving=True)
                    await events.put(leaving)
                if self.fail_after is not None and start >= self.fail_after[0]:
                    raise _Fail(self.fail_after[1])
                ids = reply[start : start + self.tokens_per_event]
                logprobs = [self._logprobs(i, sampling) for i in ids]
                event = decoder_pb2.SequenceEvent(
                    sequence_id=sequence_id,
                    token_ids=ids,
                    logprobs=logprobs if sampling.HasField("top_logprobs") else [],
                    accepted_tokens=self.predicted[0],
                    rejected_tokens=self.predicted[1],
                )
                if (vector_of := self.vector_of) is not None:
                    found = vector_of(np.frombuffer(submit.prompt_token_ids, "<i4"))
                    last = found if found.ndim == 1 else found[-1]
                    event.vector = last.astype("<f4").tobytes()
                if start == begin:
                    event.started.CopyFrom(
                        decoder_pb2.Started(
                            num_cached_tokens=7, queue_s=0.001, transfer_s=0.002, prefill_s=0.003
                        )
                    )
                if start + self.tokens_per_event >= len(reply):
                    event.finished.CopyFrom(
                        decoder_pb2.Finished(reason="REASON_STOP" if stops else "REASON_LENGTH")
                    )
                await events.put(event)
                await asyncio.sleep(self.delay_s)
        except _Fail as failure:
            await self._fail(events, sequence_id, failure.code, "made to fail")
        except TriptychError as error:
            await self._fail(events, sequence_id, error.code, error.message)
        except asyncio.CancelledError:
            await self._fail(events, sequence_id, "cancelled", "cancelled")
            raise

    async def _score_prompt(self, submit, events) -> None:
        """Logprobs of the prompt in two parts: -i of token i, and those of ids after it."""
        if not submit.sampling.HasField("prompt_logprobs"):
            return
        ids, most = np.frombuffer(submit.prompt_token_ids, "<i4"), submit.sampling.prompt_logprobs
        for places in np.array_split(np.arange(1, len(ids), dtype="<i4"), 2):
            if not len(places):
                continue
            top = ids[places][:, None] + np.arange(most, dtype="<i4")
            values = -top / 1000 if self.vector_of is None else self.vector_of(ids)[places - 1]
            part = decoder_pb2.PromptLogprobs(
                start=int(places[0]), logprobs=(-places).astype("<f4").tobytes(),
                ranks=np.full(len(places), 3, "<i4").tobytes(),
                top_token_ids=top.tobytes(), top_logprobs=values.astype("<f4").tobytes(),
            )  # fmt: skip
            sequence_id = submit.sequence_id
            await events.put(
                decoder_pb2.SequenceEvent(sequence_id=sequence_id, prompt_logprobs=[part])
            )
            await asyncio.sleep(0)

    async def _until_asked(self, submit) -> None:
        wanted = {(submit.request_id, image.image_key) for image in submit.images}

        def all_asked() -> bool:
            return wanted <= {asked for encoder in self.encoders for asked in encoder.asked}

        while self.encoders and not all_asked():  # noqa: ASYNC110 - state without an event
            await asyncio.sleep(0.001)

    async def _fail(self, events, sequence_id: int, code: str, message: str) -> None:
        failed = decoder_pb2.Failed(
            code=code, message=message, encoder_address=self.fail_encoder_address
        )
        await events.put(decoder_pb2.SequenceEvent(sequence_id=sequence_id, failed=failed))

    def _logprobs(self, token_id: int, sampling):
        count, named = sampling.top_logprobs, sampling.logprob_token_ids
        likely = [float("-inf") if i == 2 else -0.5 - i for i in range(count)]
        return decoder_pb2.TokenLogprobs(
            logprob=-0.5,
            top_token_ids=[*(token_id + i for i in range(count)), *named],
            top_logprobs=[*likely, *(-7.0 for _ in named)],
        )


class _Fail(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code
