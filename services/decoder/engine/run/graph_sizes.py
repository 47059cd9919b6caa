"""The sizes of steps for which CUDA graphs are captured. A step is padded to the next size."""

from collections.abc import Sequence
from functools import cache

from kernels.tuning import (
    LEAST_CAPTURED_LONG,
    MAX_CAPTURED_CROWD,
    MAX_CAPTURED_DECODES,
    MAX_CAPTURED_PROMPT,
    MAX_CAPTURED_TOKENS,
    MOST_CAPTURED_DECODES,
)


@cache
def decode_buckets(max_num_sequences: int) -> Sequence[int]:
    """Returns the batch sizes to capture decodes for.

    Sizes are dense where a step is short, and above that add at most an eighth of padding.
    """
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < max_num_sequences:
        step = max(4, 1 << (sizes[-1].bit_length() - 4))
        sizes.append(sizes[-1] + step)
    return tuple(sorted({min(size, max_num_sequences) for size in sizes}))


def padded_decodes(num_decodes: int, max_num_sequences: int) -> int:
    """Returns the least of `decode_buckets` that is not below `num_decodes`, of which there are at
    most `max_num_sequences`.
    """
    return next(size for size in decode_buckets(max_num_sequences) if size >= num_decodes)


def prompt_buckets(max_num_tokens: int) -> list[int]:
    """Returns the lengths to capture lone prompts for.

    The time of launches no longer matters for longer prompts. Above 1,408 tokens, GEMM tiles fill
    the SMs no better in steps of 64 tokens than in steps of 128.
    """
    sizes = [*range(64, 1408, 64), *range(1408, MAX_CAPTURED_PROMPT + 1, 128)]
    return [size for size in sizes if size <= max_num_tokens]


def mixed_buckets(max_num_tokens: int) -> list[int]:
    """Returns the numbers of tokens, decodes included, to capture mixed steps for."""
    sizes = [*range(256, 1408, 64), *range(1408, MAX_CAPTURED_TOKENS + 1, 128)]
    return [size for size in sizes if size <= max_num_tokens]


def crowded_buckets(
    max_num_tokens: int, max_num_sequences: int, launch_hiding_tokens: int
) -> list[int]:
    """Returns the numbers of tokens to capture mixed steps of more than 64 decodes for.

    There are none if no step has so many. A graph has more tokens than decodes. From
    `launch_hiding_tokens` on, eager steps are nearly as fast if nothing else keeps the host busy,
    so graphs have up to twice as many.
    """
    if max_num_sequences <= MAX_CAPTURED_DECODES:
        return []
    decodes = min(MOST_CAPTURED_DECODES, max_num_sequences)
    most = min(MAX_CAPTURED_CROWD, 2 * launch_hiding_tokens)
    return [n for n in mixed_buckets(max_num_tokens) if decodes < n <= most]


def long_buckets(max_num_tokens: int, launch_hiding_tokens: int) -> list[int]:
    """Returns the numbers of tokens to capture mixed steps behind long contexts for.

    Such a step's attention takes the device longer than that of others, so from four times
    `launch_hiding_tokens` on the device is busy for several times as long as the host needs.
    """
    most = max(1024, 4 * launch_hiding_tokens)
    return [n for n in mixed_buckets(max_num_tokens) if LEAST_CAPTURED_LONG <= n <= most]


def adapted_sizes(sizes: Sequence[int], launch_hiding_tokens: int, *, decodes: bool) -> list[int]:
    """Returns the sizes to capture for steps with adapters, out of those to capture for others.

    Steps with prompts are padded as little as without adapters, because their time grows with their
    tokens. Such a step has up to twice as many launches, which eager steps of more than
    `3 * launch_hiding_tokens` tokens hide. The time of decodes hardly grows with their number, so
    there are fewer sizes for them, which keeps the start short. Decodes are padded by at most a
    quarter where the other sizes allow that.

    Args:
        sizes: sizes to capture, ascending.
        launch_hiding_tokens: number of tokens from which on an eager step of the base model is
            nearly as fast as a graph.
        decodes: True if the steps have decodes alone, of which any number is captured.
    """
    if not decodes:
        return [size for size in sizes if size <= 3 * launch_hiding_tokens]
    found: list[int] = []
    for index, size in enumerate(sizes):
        following = sizes[index + 1 : index + 2]
        if not found or not following or following[0] > found[-1] * 1.25:
            found.append(size)
    return found
