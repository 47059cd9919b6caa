"""A faster way through HF's own modules, for training only.

HF's vision tower attends image by image. Here every image is padded to the same number of
patches, so that one masked attention serves the whole batch, and every tensor has the same size at
every step. All weights and all modules but the attention product are HF's; `tests/unit/demo` holds
this forward equal to HF's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from demo.batches import IGNORED, MAX_TOKENS
from demo.hf import (
    Qwen3VLForConditionalGeneration,
    apply_rotary_pos_emb_vision,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

SIDES = (10, 12, 14, 16)  # patch sides of images of 160 to 256 pixels
CLIP_SIDES = (8, 10, 12)  # of frames of 128 to 192


class GridTables(nn.Module):
    """Position tables of the vision tower for every grid of the given sides, padded to one size."""

    def __init__(self, visual: nn.Module, sides: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.sides, self.size = sides, sides[-1] ** 2
        count = len(sides) ** 2
        index = torch.zeros(count, self.size, 4, dtype=torch.long)
        weight = torch.zeros(count, self.size, 4)
        head = visual.config.hidden_size // visual.config.num_heads
        cos, sin = torch.ones(count, self.size, head), torch.zeros(count, self.size, head)
        valid = torch.zeros(count, self.size, dtype=torch.bool)
        for number, (h, w) in enumerate((h, w) for h in sides for w in sides):
            grid = torch.tensor([[1, h, w]])
            n = h * w
            index[number, :n], weight[number, :n] = get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=2,
            )
            ids = get_vision_position_ids(grid, 2)
            rotary = visual.rotary_pos_emb(torch.zeros(1, device=device), ids.to(device))
            cos[number, :n], sin[number, :n] = (part.cpu() for part in rotary)
            valid[number, :n] = True
        for name, table in (
            ("index", index),
            ("weight", weight),
            ("cos", cos),
            ("sin", sin),
            ("valid", valid),
        ):
            self.register_buffer(name, table.to(device), persistent=False)

    def number(self, grids: torch.Tensor) -> torch.Tensor:
        """Rows of the tables for grids [I, 2]."""
        steps = (grids - self.sides[0]) // 2
        return steps[:, 0] * len(self.sides) + steps[:, 1]


class PaddedForward(nn.Module):
    """Loss of a batch of `demo.batches`, through the modules of an HF model."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, device: torch.device) -> None:
        super().__init__()
        self.model = model
        visual = model.model.visual
        self.heads = visual.config.num_heads
        self.stills = GridTables(visual, SIDES, device)
        self.clips = GridTables(visual, CLIP_SIDES, device)

    def vision(
        self, pixels: torch.Tensor, grids: torch.Tensor, tables: GridTables
    ) -> list[torch.Tensor]:
        """Padded patches [I, P, 768 or 1536] to merged and DeepStack embeddings [I * 64, width].

        Patches of 768 values are of still images, those of 1,536 of pairs of frames.
        """
        visual = self.model.model.visual
        number = tables.number(grids)
        proj = visual.patch_embed.proj
        # Both temporal slices of a still image are equal, so their weights add up.
        still = pixels.shape[-1] == 768
        kernel = (proj.weight.sum(2) if still else proj.weight).flatten(1)
        x = F.linear(pixels, kernel, proj.bias)  # [I, P, C]
        places = visual.pos_embed(tables.index) * tables.weight[..., None]
        x = x + places.sum(2)[number]
        rotary = tables.cos[number], tables.sin[number]
        mask = torch.where(tables.valid[number], 0.0, float("-inf"))[:, None, None, :]
        mask = mask.to(torch.bfloat16 if x.dtype == torch.bfloat16 else x.dtype)
        mask = mask.expand(-1, self.heads, tables.size, -1)
        taps = []
        for layer, block in enumerate(visual.blocks):
            x = x + self._attend(block.attn, block.norm1(x), rotary, mask)
            x = x + block.mlp(block.norm2(x))
            if layer in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(layer)]
                taps.append(merger(x))
        return [_padded(part, len(pixels)) for part in (visual.merger(x), *taps)]

    def _attend(
        self,
        attn: nn.Module,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = attn.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [I, P, H, D]
        q, k = apply_rotary_pos_emb_vision(q, k, *rotary)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return attn.proj(y.transpose(1, 2).flatten(2))

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits [S, T, V] of every position of the batch."""
        text = self.model.model.language_model
        parts = []
        for key, tables in (("", self.stills), ("clip_", self.clips)):
            if f"{key}pixels" not in batch:
                continue
            pixels = batch[f"{key}pixels"].float().sub(127.5).div(127.5)
            if self.training:  # a little noise, so that compressed images are read too
                pixels = pixels + 0.03 * torch.randn_like(pixels)
            parts.append(self.vision(pixels, batch[f"{key}grids"], tables))
        embeddings, *taps = (torch.cat(both) for both in zip(*parts, strict=True))
        seen = (batch["slots"] >= 0)[..., None]
        # Text positions read some row that is then dropped: spread out, since the backward of an
        # index is slow where thousands of positions share a row.
        filler = torch.arange(seen.numel(), device=seen.device).view_as(batch["slots"])
        slots = torch.where(seen[..., 0], batch["slots"], filler % len(embeddings))
        x = text.embed_tokens(batch["ids"])
        x = torch.where(seen, embeddings[slots].to(x.dtype), x)
        segment = batch["segments"]
        same = segment[:, :, None] == segment[:, None, :]
        length = segment.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        allowed = causal & (same | (segment == 0)[:, None, :])
        mask = torch.where(allowed, 0.0, float("-inf"))[:, None]
        if torch.is_autocast_enabled(x.device.type):
            mask = mask.to(torch.bfloat16)
        rotary = text.rotary_emb(x, batch["positions"])
        for layer, block in enumerate(text.layers):
            x = block(x, attention_mask=mask, position_embeddings=rotary)
            if layer < len(taps):
                x = x + torch.where(seen, taps[layer][slots], 0.0).to(x.dtype)
        return self.model.lm_head(text.norm(x))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the answers' tokens, and whether each position was predicted right."""
        logits = self.logits(batch)
        labels = batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
        return loss, logits.detach().argmax(-1) == labels


def _padded(embeddings: torch.Tensor, count: int) -> torch.Tensor:
    """Embeddings of `count` images with `MAX_TOKENS` rows for each."""
    rows = embeddings.unflatten(0, (count, -1))
    return F.pad(rows, (0, 0, 0, MAX_TOKENS - rows.shape[1])).flatten(0, 1)
