"""Messages of a `Fetch` call that come before the embedding."""

import grpc.aio

from services.common.embeddings.arena import ArenaEntry
from services.common.embeddings.fetch_wire import DTYPES
from services.common.pb import encoder_pb2 as pb


class FetchProgress:
    """Sends reports to a decoder that waits in a `Fetch` call. They say whether the image is being
    encoded; the decoder waits longer if it is.
    """

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def report(self, *, in_work: bool) -> None:
        """Writes one progress message to the call's stream."""
        waiting = pb.FetchWaiting(in_work=in_work)
        await self._context.write(pb.FetchResponse(waiting=waiting))


def header_of(entry: ArenaEntry) -> pb.FetchResponse:
    """Returns the first message about an embedding: its key, shape and dtype."""
    spec = entry.spec
    return pb.FetchResponse(
        header=pb.FetchHeader(
            image_key=entry.key,
            dtype=DTYPES[spec.dtype],
            num_features=spec.num_features,
            num_tokens=spec.num_tokens,
            hidden=spec.hidden,
        )
    )
