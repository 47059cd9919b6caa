"""The positions that Qwen2-VL and Qwen2.5-VL were trained with.

They are those of `get_rope_index` of transformers 4, of its documentation in 5.17, and of vLLM. The
code of 5.17 differs for videos: it begins the text behind a video at the video's start plus its
largest side, within the video's time, and rounds the seconds of a pair of frames down.
"""

import itertools
from typing import Any

import torch
from torch import Tensor


def trained_rope_index(
    config: Any,
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Any = None,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """One sequence's positions `[3, 1, T]` and delta, token by token."""
    assert len(input_ids) == 1
    per_second = getattr(config.vision_config, "tokens_per_second", None)
    merge = config.vision_config.spatial_merge_size
    grids = {
        kind: iter([] if given is None else given.tolist())
        for kind, given in ((1, image_grid_thw), (2, video_grid_thw))
    }
    seconds = iter([] if second_per_grid_ts is None else second_per_grid_ts)
    found: list[tuple[int, int, int]] = []
    following = 0
    for kind, group in itertools.groupby(mm_token_type_ids[0].tolist()):
        tokens = list(group)
        if kind == 0:
            found += [(at, at, at) for at in range(following, following + len(tokens))]
        else:
            time, height, width = next(grids[kind])
            step = torch.tensor(1.0)
            if kind == 2 and per_second is not None:
                step = torch.as_tensor(next(seconds), dtype=torch.float32) * per_second
            for t, h, w in itertools.product(
                range(time), range(height // merge), range(width // merge)
            ):
                at = int(torch.tensor(float(t)) * step)
                found.append((following + at, following + h, following + w))
        following = max(map(max, found)) + 1
    positions = torch.tensor(found).T[:, None]
    return positions, torch.tensor([[following - len(found)]])


def time_continues(model: Any) -> None:
    """Gives a model of transformers the positions of `trained_rope_index`."""
    model.get_rope_index = lambda input_ids, mm_token_type_ids, **given: trained_rope_index(
        model.config, input_ids, mm_token_type_ids, **given
    )
