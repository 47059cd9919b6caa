"""A mixture of experts by kernels: the router's scores, the routing, the experts.

| name         | tokens | implementation                                                  |
|--------------|--------|-----------------------------------------------------------------|
| gemv         | 1-4    | a GEMV for each token and each of its experts                   |
| grouped_gemm | any    | our own GEMM kernel over tiles of rows of one expert            |
| packed       | any    | the same with packed codes as weights                           |
| int8         | any    | the same with int8 weights and activations                      |
| plain        | any    | `experts.moe`                                                   |

All implementations but `plain` add to the residual stream in place. FP8 weights are converted to
the activations' data type in registers (`gemv`), or multiplied with quantized activations. On
Hopper, `grouped_gemm` uses the kernels of `moe_warpgroups` for FP8 if experts have many rows.
Weights that no kernel can read (sizes that no tile divides, a checkpoint of two formats) are
dequantized before `grouped_gemm`, the whole layer at each call, which is slow.
"""

from functools import partial

import torch
from torch import Tensor

from kernels import tuning
from kernels.device import DeviceFacts
from kernels.experts import moe_bytes, moe_gemm, moe_gemv, moe_tiles, moe_warpgroups
from kernels.experts.moe_routing import Routing, route
from kernels.experts.moe_weights import ExpertWeights
from kernels.gemm import gemv, skinny_gemm
from kernels.gemm.fp8_weight import Fp8Weight
from kernels.tuning import MoEGemmConfig, MoEGemvConfig, SkinnyConfig
from services.common.model_spec import MoESpec
from services.common.nn.experts import Experts, Router, StackedLinear
from services.common.nn.quantized import QuantizedLinear

# Rows and columns of a CTA of the router's skinny GEMM.
_SCORE_ROWS, _SCORE_COLUMNS = 64, 128
# Number of experts that are dequantized at a time, because their float32 values take memory.
_EXPERTS = 8


def weights_of(stack: StackedLinear, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """Returns the matrices of a loaded layer in a form that kernels read.

    Args:
        stack: matrices of all experts.
        dtype: data type to which a format is dequantized that no kernel reads.
    """
    weight = stack.method.weight(stack)
    if isinstance(weight, Tensor | Fp8Weight):
        return ExpertWeights.of(weight)
    assert isinstance(stack.method, QuantizedLinear)
    size = *stack.stack, stack.out_features, stack.in_features
    values = torch.empty(size, dtype=dtype, device=stack.weight.device)
    for first in range(0, len(values), _EXPERTS):
        some = slice(first, first + _EXPERTS)
        values[some] = stack.method.dequantize(weight[some], dtype)
    return ExpertWeights(values)


class MoEKernels:
    """The implementations of `moe` for one model on one device.

    Args:
        device: facts of the device.
        spec: sizes and options of the experts.
        pdl: mode of dependent launch, see `KernelFacts.pdl`.
    """

    def __init__(self, device: DeviceFacts, spec: MoESpec, pdl: int) -> None:
        self._device = device
        self._spec = spec
        self._pdl = pdl
        # On Blackwell's data center GPUs, the assembly that unpacks FP8 has to be declared pure.
        self._pure = device.capability[0] == 10

    def gemv(
        self,
        x: Tensor,
        router: Router,
        experts: Experts,
        residual: Tensor,
        *,
        config: MoEGemvConfig | None = None,
    ) -> None:
        """Implements `experts.moe` for a few tokens, with a GEMV per token and expert."""
        routing = self._route(x, router, tile=0)
        up, down = map(weights_of, experts.stacks.values())
        moe_gemv.experts(
            x,
            routing,
            up,
            down,
            residual,
            config or MoEGemvConfig(),
            pure=self._pure,
            pdl=self._pdl,
        )

    def grouped_gemm(self, x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
        """Implements `experts.moe` for any number of tokens."""
        up, down = (weights_of(stack, x.dtype) for stack in experts.stacks.values())
        self._grouped_gemm(x, router, up, down, residual)

    def int8(self, x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
        """Implements `experts.moe` for experts in int8."""
        up, down = (stack.method.weight(stack) for stack in experts.stacks.values())
        self._grouped_gemm(x, router, ExpertWeights.of(up), ExpertWeights.of(down), residual)

    def _grouped_gemm(
        self, x: Tensor, router: Router, up: ExpertWeights, down: ExpertWeights, residual: Tensor
    ) -> None:
        is_many = self._mean_rows(len(x)) > tuning.MOE_WARPGROUPS_ROWS
        if is_many and moe_warpgroups.fits(self._device, up, down):
            routing = self._route(x, router, moe_warpgroups.TOKENS)
            moe_warpgroups.experts(x, routing, up, down, residual, pdl=self._pdl)
            return
        config = self.gemm_config(len(x), up, down)
        gemm = partial(moe_gemm.launch_gemm, config=config, pure=self._pure, pdl=self._pdl)
        routing = self._route(x, router, config.tokens)
        moe_gemm.grouped_experts(x, routing, up, down, residual, gemm, pdl=self._pdl)

    def packed(self, x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
        """Implements `experts.moe` for packed codes; sizes that do not fit are dequantized."""
        up, down = (stack.method.weight(stack) for stack in experts.stacks.values())
        is_tiled = up.is_tiled and down.is_tiled
        if not is_tiled and not (moe_bytes.fits(up) and moe_bytes.fits(down)):
            self.grouped_gemm(x, router, experts, residual)
            return
        config = tuning.moe_tiles_config(self._device, self._mean_rows(len(x)))
        gemm = partial(moe_tiles.launch_gemm, config=config, pdl=self._pdl)
        if not is_tiled:
            gemm = partial(moe_bytes.launch_gemm, config=config, pure=self._pure, pdl=self._pdl)
        routing = self._route(x, router, config.tokens)
        moe_gemm.grouped_experts(x, routing, up, down, residual, gemm, pdl=self._pdl)

    def gemm_config(self, num_tokens: int, *weights: ExpertWeights) -> MoEGemmConfig:
        """Returns the configuration of the grouped GEMMs of `num_tokens` tokens."""
        w8a8 = all(weight.multiplies_quantized(self._device) for weight in weights)
        return tuning.moe_gemm_config(self._device, self._mean_rows(num_tokens), w8a8=w8a8)

    def _mean_rows(self, num_tokens: int) -> float:
        return num_tokens * self._spec.top_k / self._spec.num_experts

    def _route(self, x: Tensor, router: Router, tile: int) -> Routing:
        return route(
            self._scores(x, router),
            router.top_k,
            normalize=router.normalize,
            dtype=x.dtype,
            tile=tile,
            pdl=self._pdl,
        )

    def _scores(self, x: Tensor, router: Router) -> Tensor:
        """Returns the router's logits, or split-K partials of them."""
        num_tokens, width = x.shape
        if not router.is_plain:
            return router(x)
        if num_tokens <= tuning.GEMV_TOKENS:
            return gemv.linear(x, router.weight, pdl=self._pdl)
        divides = router.out_features % _SCORE_ROWS == 0 and width % _SCORE_COLUMNS == 0
        if num_tokens > tuning.ROUTER_TOKENS or not divides:
            return router(x)
        splits = min(tuning.router_splits(num_tokens), width // _SCORE_COLUMNS)
        config = SkinnyConfig(_SCORE_ROWS, _SCORE_COLUMNS, 4, 1, 4, splits)
        return skinny_gemm.split_k_partials(
            x,
            router.weight,
            None,
            config,
            shared_memory_bytes=self._device.shared_memory_bytes,
            pdl=self._pdl,
        )
