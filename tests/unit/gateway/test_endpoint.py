"""What an endpoint keeps of a request after its end."""

from services.common.threads import INLINE_BYTES
from services.gateway.endpoints.endpoint import releasing


class Held:
    """Stands for memory; counts its ends."""

    num_ended = 0

    def __del__(self) -> None:
        Held.num_ended += 1


def test_an_error_keeps_no_memory_of_its_request():
    """A traceback is part of cycles that only the garbage collector ends."""
    body = bytearray(INLINE_BYTES + 1)
    kept: list[BaseException] = []

    def parse(body: bytearray) -> None:
        held, part = Held(), memoryview(body)[:10]
        part.release()
        try:
            raise KeyError(held is None)
        except KeyError:
            raise ExceptionGroup("both", [ValueError("bad")]) from None

    try:
        with releasing(body):
            parse(body)
    except ExceptionGroup as error:
        kept.append(error)
    assert kept
    assert Held.num_ended == 1
    assert not body
