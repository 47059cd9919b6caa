"""FP8 experts that multiply quantized activations: which kernel is faster?

    python -m benchmarks.kernels.moe_fp8                  # the 30B-A3B's layer, block scales
    ... --shape 35b-a3b --format fp8_channel --tokens 64,1008

First both kernels are checked against float64 with the same rounding of activations, SwiGLU and
outputs. Then a line per number of tokens has the microseconds of a whole layer of experts, by the
tiles of `moe_gemm` and by `moe_warpgroups`, and a line for each kernel has both of its GEMMs alone,
with their rates. `floor` is the larger of the bytes of the experts that the tokens go to,
over `--bandwidth`, and the operations, over `--rate`.
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.moe import SHAPES, Bench, Call
from kernels import plain
from kernels.experts import moe_gemm, moe_warpgroups
from kernels.experts.moe_routing import Routing
from kernels.gemm.fp8_weight import BLOCK, E4M3, Fp8Weight, quantize_activations
from kernels.gemm.quantizing import Quantized
from kernels.gemm.quantizing import quantize_activations as quantize
from kernels.tuning import MoEGemmConfig
from services.common.nn.experts import Experts, Router
from services.decoder.operations.moe import MoEKernels, weights_of

TOKENS = (16, 64, 128, 256, 568, 1008, 4096, 8192)
CHECKED = (5, 64, 568)  # numbers of tokens


def exact_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """`w8a8_linear` with sums in float64."""
    values, scale = quantize_activations(x, weight.block_columns)
    columns = x.shape[1]
    scales = scale.double().repeat_interleave(weight.block_columns, 1)[:, :columns]
    of_weight = weight.scale.double().repeat_interleave(weight.block_rows, 0)
    of_weight = of_weight.repeat_interleave(weight.block_columns, 1)
    wide = weight.values.double() * of_weight[: len(weight.values), :columns]
    return ((values.double() * scales) @ wide.t()).to(x.dtype)


def exact_experts(x: Tensor, experts: Experts, chosen: Tensor, shares: Tensor) -> Tensor:
    """Weighted sums of the experts in float64."""
    up, down = (stack.method.weight(stack) for stack in experts.stacks.values())
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        inner = plain.silu_and_mul(exact_linear(x[token], up[expert]))
        out = exact_linear(inner, down[expert]).double()
        total[token] += out * shares[token, slot, None].double()
    return total


class Fp8Bench(Bench):
    """Layers and inputs, and both kernels."""

    def kernels(self) -> MoEKernels:
        return MoEKernels(self.device, self.moe, self.facts.pdl)

    def both(self, num_tokens: int) -> dict[str, MoEGemmConfig | None]:
        """Names of both kernels, with the configuration of the tiles, and None for warp groups."""
        tile = self.kernels().gemm_config(num_tokens, *self.weights())
        return {f"tiles {tile.tokens}": tile, "warp groups": None}

    def routing(self, config: MoEGemmConfig | None, x: Tensor, router: Router) -> Routing:
        tokens = moe_warpgroups.TOKENS if config is None else config.tokens
        return self.kernels()._route(x, router, tokens)

    def layer(self, config: MoEGemmConfig | None) -> Call:
        """A layer of experts with its router, by one kernel."""
        pdl = self.facts.pdl

        def call(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
            up, down = map(weights_of, experts.stacks.values())
            routing = self.routing(config, x, router)
            if config is None:
                moe_warpgroups.experts(x, routing, up, down, residual, pdl=pdl)
            else:
                gemm = partial(moe_gemm.launch_gemm, config=config, pdl=pdl)
                moe_gemm.grouped_experts(x, routing, up, down, residual, gemm, pdl=pdl)

        return call

    def gemms(self, config: MoEGemmConfig | None) -> dict[str, Call]:
        """Both GEMMs alone, with the quantization of their inputs for the tiles of `moe_gemm`."""
        pdl = self.facts.pdl
        kept: dict[int, tuple[Routing, Tensor, Quantized, Quantized]] = {}
        size, is_block = self.moe.intermediate_size, self.format == "fp8_block"

        def given(x: Tensor, router: Router) -> tuple[Routing, Tensor, Quantized, Quantized]:
            if x.data_ptr() not in kept:
                routing = self.routing(config, x, router)
                inner = torch.randn(len(routing.order), size, device="cuda").to(x.dtype)
                of_up = quantize(x, E4M3, BLOCK if is_block else x.shape[1], pdl=False)
                of_down = quantize(inner, E4M3, BLOCK if is_block else size, pdl=False)
                kept[x.data_ptr()] = routing, inner, of_up, of_down
            return kept[x.data_ptr()]

        def gemm(
            x: Tensor, router: Router, experts: Experts, residual: Tensor, *, is_up: bool
        ) -> None:
            up, down = map(weights_of, experts.stacks.values())
            weight = up if is_up else down
            routing, inner, of_up, of_down = given(x, router)
            rows, scale = len(routing.order), None
            out = x.new_empty(rows, size if is_up else x.shape[1])
            if config is not None:
                wide = x if is_up else inner
                moe_gemm.launch_gemm(
                    wide, routing, weight, out, config=config, is_up=is_up, pdl=pdl
                )
                return
            if is_up and is_block:
                out = torch.empty(rows, size, dtype=E4M3, device="cuda")
                scale = torch.empty(size // BLOCK, rows, device="cuda").t()
            quantized = of_up if is_up else of_down
            moe_warpgroups.launch_gemm(quantized, routing, weight, out, scale, is_up=is_up, pdl=pdl)

        return {"up": partial(gemm, is_up=True), "down": partial(gemm, is_up=False)}

    @torch.inference_mode()
    def check(self) -> None:
        """Prints the relative error of the norm, and whether a repetition gives the same bits."""
        for count in CHECKED:
            x, cells = self.inputs(count)[0], []
            layer = self.layers[0]
            for name, config in self.both(count).items():
                routing = self.routing(config, x, layer.router)
                exact = exact_experts(x, layer.experts, routing.experts, routing.weights)
                found, again = torch.zeros_like(x), torch.zeros_like(x)
                call = self.layer(config)
                call(x, layer.router, layer.experts, found)
                call(x, layer.router, layer.experts, again)
                wrong = float((found.double() - exact).norm() / exact.norm())
                same = "" if found.equal(again) else " NOT THE SAME AGAIN"
                cells.append(f"{name} {wrong:.1e}{same}")
            print(f"error of {count} tokens: " + ", ".join(cells), flush=True)

    def compare(self, counts: tuple[int, ...]) -> None:
        for count in counts:
            inputs = self.inputs(count)
            floor, limit = self.floor_us(inputs)
            both = self.both(count)
            times = {name: self.time_us(self.layer(one), inputs) for name, one in both.items()}
            cells = [f"{name} {time:.1f}" for name, time in times.items()]
            print(f"\n{count} tokens, floor {floor:.1f} us by {limit}: {', '.join(cells)}")
            third = 2 * count * self.moe.top_k * self.text.hidden_size * self.moe.intermediate_size
            num_bytes = floor * self.bandwidth / 1e6 if limit == "bytes" else 0.0
            for name, one in both.items():
                shown = []
                for which, call in self.gemms(one).items():
                    micros, share = self.time_us(call, inputs), 2 if which == "up" else 1
                    tflops = third * share / micros / 1e6
                    rate = f", {num_bytes * share / 3 / micros / 1e6:.2f} TB/s" if num_bytes else ""
                    shown.append(f"{which} {micros:.1f} us ({tflops:.0f} TFLOP/s{rate})")
                print(f"    {name:11} {'; '.join(shown)}", flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="30b-a3b", choices=SHAPES)
    parser.add_argument("--format", default="fp8_block", choices=["fp8_block", "fp8_channel"])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--rate", type=float, default=1580.0, help="TFLOP/s")
    chosen = parser.parse_args()
    rates = chosen.bandwidth * 1e12, chosen.rate * 1e12
    bench = Fp8Bench(SHAPES[chosen.shape], chosen.format, rates)
    print(chosen.shape, chosen.format)
    bench.check()
    bench.compare(tuple(map(int, chosen.tokens.split(","))))


if __name__ == "__main__":
    main()
