"""Clients of the services, made from the descriptors of their calls."""

from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from services.common.pb import decoder_pb2, encoder_pb2

_ONE_OR_MANY = "unary", "stream"


class _Stub:
    """A service's calls, by their names."""

    service: ServiceDescriptor

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for method in self.service.methods:
            many = method.client_streaming, method.server_streaming
            make = getattr(channel, "_".join(_ONE_OR_MANY[each] for each in many))
            request, answer = map(GetMessageClass, (method.input_type, method.output_type))
            path = f"/{self.service.full_name}/{method.name}"
            setattr(self, method.name, make(path, request.SerializeToString, answer.FromString))

    def __getattr__(self, name: str) -> Any: ...


class EncoderStub(_Stub):
    service = encoder_pb2.DESCRIPTOR.services_by_name["Encoder"]


class DecoderStub(_Stub):
    service = decoder_pb2.DESCRIPTOR.services_by_name["Decoder"]
