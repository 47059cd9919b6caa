"""The first layer of the vision towers: a linear layer over the pixels of each patch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.model_spec import TowerSpec
from services.common.nn.linear import Linear, UnquantizedLinear


class PatchEmbed(nn.Module):
    """The patch embedding: a linear layer over the pixels of a patch. The checkpoint stores it as a
    convolution whose stride equals its kernel size, which computes the same.

    Args:
        spec: sizes of the tower.
        bias: True if the checkpoint has a bias.
    """

    def __init__(self, spec: TowerSpec, *, bias: bool = True) -> None:
        super().__init__()
        pixels = spec.in_channels * spec.patch_size**2
        method = PatchWeights(spec)
        self.proj = Linear(
            pixels * spec.temporal_patch_size, spec.hidden_size, bias=bias, method=method
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Embeds patches `[N, channels * time * patch²]`, or `[N, channels * patch²]` of still
        images, as `[N, hidden]`.
        """
        weight = self.proj.weight
        if patches.shape[1] != self.proj.in_features:
            weight = self.proj.still_weight
        assert isinstance(weight, Tensor)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class PatchWeights(UnquantizedLinear):
    """Weights of the patch embedding, converted for the pixels that this service computes.

    The checkpoint expects pixels that are normalized by a mean and a standard deviation. This
    service scales pixels to [-1, 1] instead, so the difference is made part of the weight and the
    bias. A layer without a bias gets one if the mean differs. For still images, whose pixels are
    the same at each time, there is a second weight, which is the sum of the weight over time.
    """

    def __init__(self, spec: TowerSpec) -> None:
        self._spec = spec

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Converts weight and bias, and sets `layer.still_weight`, `[hidden, channels * patch²]`.
        Sums are computed in float32 and rounded once.
        """
        spec, weight = self._spec, layer.weight.detach()
        shape = spec.in_channels, spec.temporal_patch_size, -1
        by_time = weight.unflatten(1, shape).float()  # [hidden, channels, time, patch²]
        mean, std = (
            torch.tensor(levels, device=weight.device)[:, None, None]
            for levels in (spec.pixel_mean, spec.pixel_std)
        )
        if not torch.all((mean == 127.5) & (std == 127.5)):
            # A pixel of level x, 0 ≤ x ≤ 255, arrives as y = (x - 127.5) / 127.5. The checkpoint
            # expects (x - mean) / std, which is y * 127.5 / std + (127.5 - mean) / std.
            shift = (by_time * ((127.5 - mean) / std)).sum((1, 2, 3))
            bias = shift if layer.bias is None else layer.bias + shift
            layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
            by_time = by_time * (127.5 / std)
            weight.copy_(by_time.flatten(1))
        layer.still_weight = by_time.sum(2).flatten(1).to(weight.dtype)
