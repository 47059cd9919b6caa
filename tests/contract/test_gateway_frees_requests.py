"""A request's memory goes at its end, not with the next run of the garbage collector.

The admission's bound on memory counts a request until it ends. What a cycle keeps after that is
held but not counted, and a gateway that collects rarely holds hundreds of megabytes of it.
"""

import base64
import contextlib
import gc
import logging
from collections import Counter

import grpc.aio
import pytest

from services.common.errors import (
    InvalidImage,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
)
from services.gateway.endpoints.request_context import RequestContext
from services.gateway.media.images import Image
from services.gateway.prompts.prompt import PromptBuilder
from services.gateway.request.attempts import Attempts
from services.gateway.request.completion import Completion
from services.gateway.tenancy.slot import Slot
from tests.attacks.images import small
from tests.contract.test_gateway_openai import send_raw
from tests.fakes import forever, raising
from tests.gateway_stack import MODEL
from tests.noise import PATIENCE_S

KEPT = (Attempts, Completion, Image, RequestContext, Slot)
LARGE = 1 << 20
STREAMS = (False, True)


def image(data):
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asking(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


GOOD = asking(image(small(1)), image(small(2)), {"type": "text", "text": "What?"})
REFUSED = {
    "unreadable images": asking(image(bytes(20)), image(bytes(30))),
    "large unreadable images": asking(image(bytes(LARGE)), image(bytes(LARGE))),
    "an unreadable image beside a good one": asking(image(bytes(LARGE)), image(small(1))),
    "unknown field": {"nonsense": 1},
    "large unknown field": {"nonsense": "x" * LARGE},
    "long prompt": {"messages": [{"role": "user", "content": "hello " * 20_000}]},
}


def fail_encoder(error):
    def prepare(stack):
        stack.encoder.before = raising(error)
        stack.decoder.before = forever  # a real decoder, too, has no token without the image

    return prepare


def fail_decoder(error):
    return lambda stack: setattr(stack.decoder, "before", raising(error))


FAILURES = {
    "image refused by an encoder": fail_encoder(InvalidImage("no image")),
    "encoder full": fail_encoder(Overloaded("full", retry_after_s=1)),
    "encoder failed": fail_encoder(Unavailable("lost")),
    "refused by a decoder": fail_decoder(InvalidRequest("no")),
    "decoder full": fail_decoder(Overloaded("full", retry_after_s=1)),
    "decoder failed": fail_decoder(Unavailable("lost")),
    "decoder lost in mid-answer": lambda stack: setattr(stack.decoder, "die_after", 1),
    "refused in mid-answer": lambda stack: setattr(
        stack.decoder, "fail_after", (1, "invalid_request")
    ),
}


@contextlib.contextmanager
def everything_is_freed(stack, patience_s=PATIENCE_S):
    """Nothing of a request is there at the end that was not at the start. What was there at the
    start is frozen, so that only what has come since is counted.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
        stack.wait(lambda: stack.gateway.admission.num_running == 0)
        with contextlib.suppress(AssertionError):
            stack.wait(lambda: not count(), patience_s)
        assert not count()
    finally:
        gc.enable()


def count() -> Counter[str]:
    """Returns the number of objects of each kind that `gc.freeze` has not frozen."""
    kinds = Counter(map(type, gc.get_objects()))
    failures = TriptychError | grpc.aio.AioRpcError
    errors = sum(number for kind, number in kinds.items() if issubclass(kind, failures))
    return +Counter({"errors": errors} | {kind.__name__: kinds[kind] for kind in KEPT})


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(stack, name, stream):
    with everything_is_freed(stack):
        assert stack.chat(**REFUSED[name], stream=stream).status_code == 400


@pytest.mark.parametrize("stream", STREAMS)
def test_answered(stack, stream):
    with everything_is_freed(stack):
        assert stack.chat(**GOOD, stream=stream).status_code == 200


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", FAILURES)
def test_failed(stack, name, stream):
    FAILURES[name](stack)
    with everything_is_freed(stack):
        answer = stack.chat(**GOOD, stream=stream)
        assert answer.status_code >= 400 or '"error"' in answer.text, answer.text


def test_abandoned(stack):
    stack.decoder.delay_s = 30.0
    with everything_is_freed(stack), send_raw(stack, GOOD | {"model": MODEL}):
        stack.wait(lambda: stack.decoder.submits)


def test_a_cycle_would_be_seen(stack):
    with pytest.raises(AssertionError), everything_is_freed(stack, 1.0):
        found = Image("", b"", ())
        found.units = [found]  # type: ignore[list-item]
        del found


@pytest.mark.parametrize("size", [1, 20_000])  # inline, and in a thread
def test_ended_by_a_bug(stack, monkeypatch, size):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(PromptBuilder, "draft", fail)
    logging.disable()  # pytest keeps records, and with them tracebacks
    try:
        with everything_is_freed(stack):
            answer = stack.chat(**asking(image(small(1)), {"type": "text", "text": "x" * size}))
            assert answer.status_code == 500
    finally:
        logging.disable(logging.NOTSET)
