"""The interface between `service_process`, which both GPU services share, and a service's front.

The encoder and the decoder each implement `FrontProcess` in their `__main__`, and describe
themselves by a `GpuService`, which is the argument of `service_process.run_service`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from services.common.embeddings.arena import Arena
from services.common.model_spec import ModelSpec
from services.common.process.engine_process import EngineProcess
from services.common.security.credentials import Credentials
from services.common.settings import EngineServiceSettings
from services.common.transport.rpc import Server, Servicer

SettingsT = TypeVar("SettingsT", bound=EngineServiceSettings)


class FrontProcess(ABC, Generic[SettingsT]):
    """The objects of a service's front process, which exist once the engine is ready.

    Attributes:
        registry: the service's metrics.
        servicer: the service's gRPC methods.
    """

    registry: CollectorRegistry
    servicer: Servicer

    @staticmethod
    @abstractmethod
    def arena_bytes(settings: SettingsT, spec: ModelSpec) -> int:
        """Returns the size of the embedding arena for this model, before the engine is started.

        Raises:
            ModelSpecError: the service cannot serve this model.
        """

    @classmethod
    @abstractmethod
    async def create(
        cls,
        settings: SettingsT,
        ready: Any,  # noqa: ANN401 - each service has its own message
        engine: EngineProcess,
        arena: Arena,
        credentials: Credentials,
    ) -> Self:
        """Creates the front's objects and connects to Redis.

        Args:
            ready: the engine's first message, which describes what it has loaded.
            credentials: credentials that the service's own calls show.
        """

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Returns whether the engine has work."""

    @property
    def is_loading(self) -> bool:
        """Returns whether the engine loads files between two steps, which may take minutes."""
        return False

    @abstractmethod
    async def run(self) -> None:
        """Handles the engine's messages until the engine process has ended."""

    @abstractmethod
    async def drain(self, server: Server, grace_s: float) -> None:
        """Lets running requests end, stops the server, and cancels the requests that are left.

        Args:
            grace_s: seconds that requests may take; 0 if the engine process has ended.
        """

    @abstractmethod
    async def close(self) -> None:
        """Releases everything, after `run` has been cancelled."""


@dataclass(frozen=True, slots=True)
class GpuService(Generic[SettingsT]):
    """The differences between the encoder and the decoder, as `run_service` needs them.

    Attributes:
        name: name of the service in logs, traces and metrics.
        engine_module: module that is run as the engine process.
        engine_message: union of the messages that the engine sends, its ready message included.
        shutdown_message: message that ends the engine's loop.
        callers: names of the services whose certificates may call this service.
        settings: class of the service's settings.
        front: class of the service's front process.
        num_links: number of socket pairs between the engine and processes that the front starts.
    """

    name: str
    engine_module: str
    engine_message: Any  # a type form
    shutdown_message: msgspec.Struct
    callers: tuple[str, ...]
    settings: type[SettingsT]
    front: type[FrontProcess[SettingsT]]
    num_links: int = 0
