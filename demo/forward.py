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

from demo.batches import IGNORED, MAX_PATCHES
from demo.hf import (
    Qwen3VLForConditionalGeneration,
    apply_rotary_pos_emb_vision,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

SIDES = (10, 12, 14, 16)  # patch sides of images of 160 to 256 pixels


class PaddedForward(nn.Module):
    """Loss of a batch of `demo.batches`, through the modules of an HF model."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, device: torch.device) -> None:
        super().__init__()
        self.model = model
        visual = model.model.visual
        self.heads = visual.config.num_heads
        index = torch.zeros(len(SIDES) ** 2, MAX_PATCHES, 4, dtype=torch.long)
        weight = torch.zeros(len(SIDES) ** 2, MAX_PATCHES, 4)
        cos = torch.ones(len(SIDES) ** 2, MAX_PATCHES, visual.config.hidden_size // self.heads)
        sin = torch.zeros_like(cos)
        valid = torch.zeros(len(SIDES) ** 2, MAX_PATCHES, dtype=torch.bool)
        for number, (h, w) in enumerate((h, w) for h in SIDES for w in SIDES):
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
            self.register_buffer(f"grid_{name}", table.to(device), persistent=False)

    def vision(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Padded patches [I, 256, 768] to merged and DeepStack embeddings [I * 64, width]."""
        visual = self.model.model.visual
        number = (grids[:, 0] - SIDES[0]) // 2 * len(SIDES) + (grids[:, 1] - SIDES[0]) // 2
        proj = visual.patch_embed.proj
        # Both temporal slices of a still image are equal, so their weights add up.
        kernel = proj.weight.sum(2).flatten(1)
        x = F.linear(pixels, kernel, proj.bias)  # [I, P, C]
        places = visual.pos_embed(self.grid_index) * self.grid_weight[..., None]
        x = x + places.sum(2)[number]
        rotary = self.grid_cos[number], self.grid_sin[number]
        mask = torch.where(self.grid_valid[number], 0.0, float("-inf"))[:, None, None, :]
        mask = mask.to(torch.bfloat16 if x.dtype == torch.bfloat16 else x.dtype)
        mask = mask.expand(-1, self.heads, MAX_PATCHES, -1)
        taps = []
        for layer, block in enumerate(visual.blocks):
            x = x + self._attend(block.attn, block.norm1(x), rotary, mask)
            x = x + block.mlp(block.norm2(x))
            if layer in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(layer)]
                taps.append(merger(x))
        return [visual.merger(x), *taps]

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
        pixels = batch["pixels"].float().sub(127.5).div(127.5)
        if self.training:  # a little noise, so that compressed images are read too
            pixels = pixels + 0.03 * torch.randn_like(pixels)
        embeddings, *taps = self.vision(pixels, batch["grids"])
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
