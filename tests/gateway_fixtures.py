"""Session-wide gateway stacks; import the fixtures by name."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from starlette.routing import Route

from services.gateway.endpoints.surfaces import create_routes
from services.gateway.endpoints.tokenization import TokenizerInfo
from services.gateway.metrics import GatewayMetrics
from tests.gateway_stack import GatewayStack, LoopThread
from tests.noise import PATIENCE_S


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def _stack(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    directory = tmp_path_factory.mktemp("stack")
    stack = GatewayStack(
        loop_thread, directory, max_images=4, max_image_bytes=1 << 20,
        max_image_pixels=4_000_000, log_level="ERROR",
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.fixture
def stack(_stack) -> Iterator[GatewayStack]:
    """One encoder and one decoder, reset."""
    yield from _stack.lend()


@pytest.fixture(scope="session")
def _thinking(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("thinking"), text_only=True, num_encoders=0,
        log_level="ERROR",
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.fixture
def thinking(_thinking) -> Iterator[GatewayStack]:
    """A text model whose template thinks, reset."""
    yield from _thinking.lend()


@pytest.fixture(scope="session")
def _pair(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("pair"), num_encoders=2, num_decoders=2,
        request_timeout_s=PATIENCE_S,
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.fixture
def pair(_pair) -> Iterator[GatewayStack]:
    """Two encoders and two decoders, reset."""
    yield from _pair.lend()


def image_url(width: int = 40, height: int = 30, color: tuple[int, int, int] = (255, 0, 0)) -> str:
    """A PNG as a data URL."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def asking(*urls: str, text: str = "what?") -> list[dict]:
    """Messages: images, then a question."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def all_routes(model_directory: Path | None) -> list[Route]:
    """A gateway's routes, to be looked at: what they call is not there."""
    metrics = GatewayMetrics()
    tokenizer = None if model_directory is None else TokenizerInfo(model_directory, "")
    return create_routes(None, None, metrics, tokenizer, None)
