"""The decoder's gRPC methods that load and unload adapters."""

import grpc.aio

from services.common.errors import TriptychError
from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import Servicer, abort
from services.decoder.front.adapter_table import AdapterTable


class AdapterCalls(Servicer):
    """Implements `LoadAdapter` and `UnloadAdapter` of proto/decoder.proto.

    Attributes:
        adapters: adapters of the engine.
    """

    adapters: AdapterTable

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        try:
            await self.adapters.load(
                request.name, request.directory, load_inplace=request.load_inplace
            )
        except TriptychError as error:
            await abort(context, error)
        return pb.LoadAdapterResponse(adapters=self.adapters.described())

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        try:
            await self.adapters.unload(request.name)
        except TriptychError as error:
            await abort(context, error)
        return pb.LoadAdapterResponse(adapters=self.adapters.described())
