"""Qwen2.5-VL, Qwen2-VL and PaddleOCR-VL in each way of serving them: their answers about several
images, in conversations and about clips are those of Hugging Face, also behind a cached prefix.

A model is served by one process, by two ranks over gloo (each computes M-RoPE with sections) whose
steps are too short for a long prompt, and from FP8 and W4A16 files. Hugging Face's model then has
the dequantized weights.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.serve_command import serve_command
from tests.e2e.served_pair import Pair, asking, listed, noise, png

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Options and variables of the command, by the way of serving.
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "whole": ([], {}),
    "ranks": (["--tensor-parallel", "2"], {"DECODER_STEP_MS": "1"}),
    "fp8": ([], {}),
    "w4a16": ([], {}),
}
MOST_STEP_TOKENS = 8192  # of any step; the time that a step may last is no exact limit
BLOCK = 16  # tokens of a block of the prefix cache
SIZES = ((256, 320), (300, 150), (500, 90))
PICTURES = [noise(2, *size, seed)[0] for seed, size in enumerate(SIZES, 10)]
IMAGES = [Image.fromarray(picture) for picture in PICTURES]
PARTS = [{"type": "image_url", "image_url": {"url": png(picture)}} for picture in PICTURES]


def pairs(families: Sequence[str], ways: Sequence[str] = tuple(WAYS)) -> Any:
    """Parametrizes `pair`. One process that serves Qwen2.5-VL is not only for the night."""
    every = [(family, way) for family in families for way in ways]
    usual = ("qwen2_5_vl", "whole")
    params = [
        pytest.param(each, marks=() if each == usual else pytest.mark.nightly, id="-".join(each))
        for each in every
    ]
    return pytest.mark.parametrize("pair", params, indirect=True)


FAMILIES = ("qwen2_5_vl", "qwen2_vl", "paddleocr_vl")
ALL = pairs(FAMILIES)
LONG = pairs(FAMILIES, ["ranks"])
WITH_CLIPS = pairs(FAMILIES[:2])


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    from tests.e2e.tiny_video import MAKERS, Oracle

    family, way = request.param
    directory = tmp_path_factory.mktemp(f"{family}-{way}")
    source = served = directory / "tiny"
    model = MAKERS[family](source)
    options, variables = WAYS[way]
    if way in ("fp8", "w4a16"):
        served = directory / "quantized"
        quantize(way, model, source, served)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with serve_command(directory, ["--model", str(served), *options]) as command:
            yield Pair(f"{family}-{way}", command, Oracle(model, source))


def quantize(way: str, model: Any, source: Path, directory: Path) -> None:
    """Writes a quantized checkpoint, and gives the model the weights that the files stand for."""
    from tests import fp8_checkpoints, packed_checkpoints
    from tests.parity.quantized import as_loaded

    if way == "fp8":
        meant = fp8_checkpoints.write(source, directory, "compressed-channel")
    else:
        meant = packed_checkpoints.write(source, directory, "ct-32")
    loaded = {as_loaded(name): tensor for name, tensor in meant.items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    changed = [not tensor.equal(before[name]) for name, tensor in model.state_dict().items()]
    assert sum(changed) > 10, "the files hold the unquantized weights"


def check_twice(pair: Pair, messages: list, *seen: Any) -> None:
    """Compares both answers with the oracle's. The second has all whole blocks from the cache."""
    pair.check(messages, *seen)
    usage = pair.check(messages, *seen)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] - 2 * BLOCK > 0


@ALL
def test_several_images(pair):
    check_twice(pair, [asking(*PARTS)], [], IMAGES)


@LONG
def test_images_in_a_prompt_of_several_steps(pair):
    """No step computes so many tokens. Almost all are images', so that steps end within images."""
    picture = noise(2, 500, 500, 13)[0]
    part = {"type": "image_url", "image_url": {"url": png(picture)}}
    messages, images = [asking(*[part] * 28)], [Image.fromarray(picture)] * 28
    length = pair.check(messages, [], images)["usage"]["prompt_tokens"]
    assert length > MOST_STEP_TOKENS
    check_twice(pair, messages, [], images)


@ALL
def test_a_conversation(pair):
    answer = {"role": "assistant", "content": "A circle."}
    messages = [asking(*PARTS[:2]), answer, asking(PARTS[2], text="And here?")]
    check_twice(pair, messages, [], IMAGES)


@WITH_CLIPS
def test_a_clip_beside_an_image(pair):
    from tests.e2e.tiny_video import Seen

    frames = noise(5, 70, 50, 3)
    check_twice(
        pair, [asking(listed(frames, fps=4.5), PARTS[0])], [Seen(frames, 4.5, None)], IMAGES[:1]
    )
