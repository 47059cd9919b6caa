"""The adapters that requests may call by name, which the decoders report with their load.

A gateway has no setting for adapters: an adapter is served while a healthy decoder has it. If only
lost decoders had an adapter and may come back, the adapter is still listed, and requests for it get
an error after which clients try again. A tenant sees all adapters unless its entry in the key file
lists some.
"""

import asyncio
from collections.abc import Sequence

from services.common.adapter_config import already_loaded
from services.common.errors import (
    AdapterUnavailable,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.decoders import DecoderPod, DecoderPool
from services.gateway.tenancy.tenants import bound_tenant

# Time in which a decoder reads an adapter's files, twice, and copies its weights to the device.
LOAD_TIMEOUT_S = 120.0


def served_adapters(decoders: DecoderPool) -> dict[str, pb.Adapter]:
    """Returns the adapters that the caller's tenant may use, by name.

    If decoders have different adapters of one name, as during a roll-out, the first is served.
    """
    found: dict[str, pb.Adapter] = {}
    for pod in decoders.healthy():
        for adapter in pod.adapters:
            if _is_allowed(adapter.name):
                found.setdefault(adapter.name, adapter)
    return found


def known_adapters(decoders: DecoderPool) -> list[str]:
    """Returns the names of the adapters that the caller's tenant may use: first the served
    adapters, then the adapters of lost decoders that may come back.
    """
    lost = filter(_is_allowed, decoders.lost_adapters.names())
    return list(dict.fromkeys((*served_adapters(decoders), *lost)))


def check_adapter(decoders: DecoderPool, name: str, model_names: Sequence[str]) -> None:
    """Checks that an adapter is served to the caller's tenant.

    Args:
        decoders: the decoders.
        name: name in a request, which is not the name of the base model.
        model_names: names of the base model, for the error.

    Raises:
        AdapterUnavailable: no healthy decoder has the adapter, and a lost decoder that had it may
            come back.
        Unavailable: no decoder is healthy, so nobody knows which adapters there are.
        ModelNotFound: there is no such adapter, or the tenant may not use it.
    """
    # The description is asked for first, because the pool may then begin to serve decoders with
    # another checkpoint, whose adapters count.
    is_served = decoders.description() is not None
    if name in served_adapters(decoders):
        return
    if _is_allowed(name):
        if not is_served:
            raise Unavailable("no decoder is available", retry_after_s=1)
        if name in decoders.lost_adapters.names():
            raise _absent(name)
    served = ", ".join((*model_names, *known_adapters(decoders)))
    message = f"the model {name[:100]!r} does not exist; this gateway serves {served}"
    raise ModelNotFound(message, param="model")


def _is_allowed(name: str) -> bool:
    """Returns whether the caller's tenant may use an adapter of this name."""
    allowed = bound_tenant().limits.adapters
    return allowed is None or name in allowed


def _absent(name: str) -> AdapterUnavailable:
    return AdapterUnavailable(
        f"no decoder with the adapter {name[:100]!r} is available", retry_after_s=1
    )


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
        Unavailable: no decoder is healthy, or only lost decoders have the adapter, which may come
            back with it.
    """
    healthy = decoders.healthy()
    if not healthy:
        raise Unavailable("no decoder is available", retry_after_s=1)
    pods = [pod for pod in healthy if any(a.name == name for a in pod.adapters)]
    if not pods and name in decoders.lost_adapters.names():
        raise _absent(name)
    if not pods:
        raise ModelNotFound(f"the adapter {name[:100]!r} is not loaded", param="lora_name")
    await asyncio.gather(*(_unload(pod, name) for pod in pods))
    decoders.lost_adapters.forget(name)


async def _unload(pod: DecoderPod, name: str) -> None:
    answer = await pod.ask(pod.unload_adapter, pb.UnloadAdapterRequest(name=name))
    pod.adapters = list(answer.adapters)
