"""The adapters that requests may call by name, which the decoders report with their load.

A gateway has no setting for adapters: an adapter is served while a healthy decoder has it. A tenant
sees all adapters unless its entry in the key file lists some.
"""

import asyncio

from services.common.adapter_config import already_loaded
from services.common.errors import InvalidRequest, ModelNotFound, Unavailable
from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.decoders import DecoderPod, DecoderPool
from services.gateway.tenancy.tenants import bound_tenant

# Time in which a decoder reads an adapter's files, twice, and copies its weights to the device.
LOAD_TIMEOUT_S = 120.0


def served_adapters(decoders: DecoderPool) -> dict[str, pb.Adapter]:
    """Returns the adapters that the caller's tenant may use, by name.

    If decoders have different adapters of one name, as during a roll-out, the first is served.
    """
    allowed = bound_tenant().limits.adapters
    found: dict[str, pb.Adapter] = {}
    for pod in decoders.healthy():
        for adapter in pod.adapters:
            if allowed is None or adapter.name in allowed:
                found.setdefault(adapter.name, adapter)
    return found


async def load_adapter(
    decoders: DecoderPool, name: str, directory: str, *, load_inplace: bool
) -> None:
    """Loads an adapter on all healthy decoders.

    Args:
        decoders: the decoders.
        name: name by which requests call the adapter.
        directory: absolute directory of the adapter, on the decoders' file system.
        load_inplace: True if the adapter takes the place of one that is loaded under the name.

    Raises:
        InvalidRequest: a decoder cannot serve the adapter, which then no decoder serves. A decoder
            that has refused to replace an adapter keeps the former one.
        ModelNotFound: a decoder has no such directory. The same holds.
        Unavailable, DeadlineExceeded: no decoder is healthy, or one does not answer.
    """
    pods = decoders.healthy()
    if not pods:
        raise Unavailable("no decoder is available", retry_after_s=1)
    is_loaded = any(adapter.name == name for pod in pods for adapter in pod.adapters)
    if is_loaded and not load_inplace:
        raise InvalidRequest(already_loaded(name), param="lora_name")
    request = pb.LoadAdapterRequest(name=name, directory=directory, load_inplace=load_inplace)
    answers = await asyncio.gather(
        *(pod.ask(pod.load_adapter, request, LOAD_TIMEOUT_S) for pod in pods),
        return_exceptions=True,
    )
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    done = [
        (pod, answer)
        for pod, answer in zip(pods, answers, strict=True)
        if isinstance(answer, pb.LoadAdapterResponse)
    ]
    if failures:
        await asyncio.gather(*(_unload(pod, name) for pod, _ in done), return_exceptions=True)
        raise failures[0]
    for pod, answer in done:
        pod.adapters = list(answer.adapters)


async def unload_adapter(decoders: DecoderPool, name: str) -> None:
    """Unloads an adapter from all healthy decoders. Running answers are not interrupted.

    Raises:
        ModelNotFound: no decoder has the adapter.
    """
    pods = [pod for pod in decoders.healthy() if any(a.name == name for a in pod.adapters)]
    if not pods:
        raise ModelNotFound(f"the adapter {name[:100]!r} is not loaded", param="lora_name")
    await asyncio.gather(*(_unload(pod, name) for pod in pods))


async def _unload(pod: DecoderPod, name: str) -> None:
    answer = await pod.ask(pod.unload_adapter, pb.UnloadAdapterRequest(name=name))
    pod.adapters = list(answer.adapters)
