"""`python -m tests.contract.serve_encoder FAULT`: an encoder's front in a process of its own.

Prints its address; encodes whatever it is asked for. FAULT `hang` never knows a digest.
"""

import asyncio
import sys

from services.common.embeddings.embedding_write import Digests
from tests.contract.encoder_pod import run_pod


async def serve() -> None:
    async with run_pod(max_image_patches=1 << 14) as pod:
        print(pod.address, flush=True)
        await asyncio.Event().wait()


async def hang(*_: object) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    if sys.argv[1:] == ["hang"]:
        Digests.of = hang  # type: ignore[method-assign]
    asyncio.run(serve())
