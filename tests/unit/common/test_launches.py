"""Which products get a kernel of our choice, and with which tile."""

import pytest
import torch

from services.common.nn import cublaslt, launches


def test_launches_are_free_in_graphs_and_in_long_steps() -> None:
    assert not launches.are_free(1024) and launches.are_free(2048)
    with launches.captured():
        assert launches.are_free(1)
    assert not launches.are_free(1)


def test_they_are_not_free_after_a_capture_that_failed() -> None:
    with pytest.raises(ValueError, match="no"), launches.captured():
        raise ValueError("no")
    assert not launches.are_free(1)


@pytest.mark.parametrize(
    ("size", "tile"),
    [
        # A lone prompt of an eighth of its tokens to a tile: 2,048 features are 128 tiles of 132.
        ((1024, 2048, 2048), 128),
        ((1088, 4096, 2048), 136),
        ((1152, 2048, 6144), 144),
        ((1280, 12288, 2048), 160),
        # The vision tower's, of a picture of 1024².
        ((4096, 3072, 1024), 152),
        ((4096, 1024, 1024), 128),
        # Left to cuBLAS: few tokens, long sums.
        ((512, 2048, 2048), 0),
        ((4096, 1024, 4096), 0),
    ],
)
def test_tiles_fit_the_processors(size: tuple[int, int, int], tile: int) -> None:
    with launches.captured():
        assert cublaslt.tile_tokens(*size) == tile


def test_short_eager_steps_are_left_to_cublas() -> None:
    assert cublaslt.tile_tokens(1024, 2048, 2048) == 0
    assert cublaslt.tile_tokens(8192, 2048, 2048) > 0


def test_what_torch_shall_multiply_is_not_refused_loudly() -> None:
    x, weight = torch.zeros(4096, 64), torch.zeros(128, 64)  # float32
    assert cublaslt.linear(x, weight) is None


class Refusing:
    """A library that does not do what it is asked for; at the first use, or when it runs."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.asked = 0

    def product(self, *_: object) -> "Refusing":
        self.asked += 1
        if self.at_once:
            raise cublaslt.Refused("no such tile")
        return self

    def run(self, *_: object) -> None:
        raise cublaslt.Refused("not aligned")


@pytest.mark.parametrize("at_once", [True, False])
def test_what_the_library_refuses_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, at_once: bool
) -> None:
    library = Refusing(at_once=at_once)
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    cublaslt._say_once.cache_clear()
    x, weight = torch.zeros(4096, 64).bfloat16(), torch.zeros(128, 64).bfloat16()
    for _ in range(3):
        assert cublaslt.linear(x, weight) is None
    assert library.asked == 3
    assert len([r for r in caplog.records if "left to torch" in r.message]) == 1
