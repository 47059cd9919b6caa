"""A layer of experts on this machine's GPU: how fast is each implementation, and where does its
time go?

    python -m benchmarks.kernels.moe           # the 30B-A3B's layer; two minutes on an H200
    ... --format fp8_block
    ... --tune              # configurations as well, the fastest first
    ... --variants          # of 1 to 4 tokens' kernels; with --tune, more
    ... --write-model DIR   # its config.json, for `benchmarks.engine`

Microseconds per call in a replayed CUDA graph, for tokens drawn anew for each call and weights of
several layers in turn, so that the L2 has few of them. `floor` is the larger of two: the bytes of
the experts that the calls touch, over `--bandwidth`, and the operations, over `--rate`. The
relative error is against the plain twin. `predicted` is what was expected before the first run.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.text_shapes import TEXT_SHAPES
from kernels import plain
from kernels.device import DeviceFacts
from kernels.experts import moe_gemm
from kernels.experts.moe_weights import ExpertWeights
from kernels.tuning import MoEGemmConfig, MoEGemvConfig
from services.common.model_spec import MoESpec, QuantizationSpec, TextSpec
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.experts import Experts, Router
from services.common.nn.experts import moe as plain_moe
from services.common.nn.formats import method_of
from services.decoder.operations import table
from services.decoder.operations.moe import MoEKernels, weights_of
from services.decoder.operations.table import KernelFacts

_30B = TEXT_SHAPES["30b-a3b"]
SHAPES = {
    "30b-a3b": _30B,
    "35b-a3b": replace(_30B, moe=MoESpec(num_experts=256, top_k=8, intermediate_size=512)),
}
TOKENS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1008, 2048, 4096, 8192)
LAYERS = 4  # of weights, used in turn
_LAUNCH_US = 2.0  # predicted, of a kernel that follows another in a graph
_REACHED = {"bytes": 0.75, "operations": 0.55}  # predicted, of the bandwidth and of the rate
_WHOLE = ("plain", "fp8_block", "fp8_channel")  # formats whose kernels are timed by themselves, too
_GROUPS = {"w4a16": 128, "w8a16": 128, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
_BYTES = {"plain": 2, "w4a16": 0.53, "nvfp4": 0.56, "mxfp4": 0.53}  # a weight, scales included
Call = Callable[[Tensor, Router, Experts, Tensor], object]


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self, text: TextSpec, weight_format: str) -> None:
        super().__init__()
        moe = text.moe
        assert moe is not None
        self.router = Router(
            text.hidden_size, moe.num_experts, moe.top_k, normalize=moe.norm_topk_prob
        )
        self.experts = Experts(moe.num_experts, text.hidden_size, moe.intermediate_size)
        if weight_format != table.UNQUANTIZED:
            group = _GROUPS.get(weight_format, 0)
            method = method_of(QuantizationSpec(format=weight_format, group_size=group))  # pyright: ignore[reportArgumentType]
            for stack in self.experts.stacks.values():
                stack.set_method(method)


class Bench:
    """Layers and inputs of one shape and format."""

    def __init__(self, text: TextSpec, weight_format: str, rates: tuple[float, float]) -> None:
        self.text, self.format = text, weight_format
        self.bandwidth, self.rate = rates
        self.device = DeviceFacts.of(torch.device("cuda"))
        self.facts = KernelFacts(self.device, text, torch.bfloat16, weight_format)
        assert text.moe is not None
        self.moe = text.moe
        self.layers: list[Layer] = []
        for seed in range(LAYERS):
            with torch.device("meta"):
                layer = Layer(text, weight_format)
            load_dummy(layer, seed, device="cuda", dtype=torch.bfloat16)
            self.layers.append(layer)

    def weights(self) -> tuple[ExpertWeights, ...]:
        """Of the first layer."""
        return tuple(map(weights_of, self.layers[0].experts.stacks.values()))

    def inputs(self, num_tokens: int) -> list[Tensor]:
        """For as many calls as a graph has: more where they are short."""
        count = max(LAYERS, min(16, 2048 // num_tokens))
        size = num_tokens, self.text.hidden_size
        return [torch.randn(size, device="cuda").bfloat16() for _ in range(count)]

    def floor_us(self, inputs: list[Tensor]) -> tuple[float, str]:
        """Of a call, and what limits it; by the experts that the tokens really go to."""
        touched = 0
        for index, x in enumerate(inputs):
            router = self.layers[index % LAYERS].router
            chosen, _ = plain.route(router(x), router.top_k, normalize=router.normalize)
            touched += len(chosen.unique())
        expert = 3 * self.text.hidden_size * self.moe.intermediate_size
        size = _BYTES.get(self.format, 1)
        num_bytes = touched / len(inputs) * expert * size
        operations = 2 * len(inputs[0]) * self.moe.top_k * expert
        times = {"bytes": num_bytes / self.bandwidth, "operations": operations / self.rate}
        limit = max(times, key=lambda name: times[name])
        return times[limit] * 1e6, limit

    def time_us(self, call: Call, inputs: list[Tensor]) -> float:
        """Median µs of one call."""
        residuals = [torch.zeros_like(x) for x in inputs]

        def run() -> None:
            for index, (x, residual) in enumerate(zip(inputs, residuals, strict=True)):
                layer = self.layers[index % LAYERS]
                call(x, layer.router, layer.experts, residual)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            times: list[float] = []
            for _ in range(9):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / len(inputs))
        return statistics.median(times[2:])

    def error(self, call: Call, x: Tensor) -> float:
        """Relative, of the norm, against the plain twin."""
        layer, residual = self.layers[0], torch.zeros_like(x)
        with torch.inference_mode():
            twin = plain_moe(x, layer.router, layer.experts, residual).float()
            call(x, layer.router, layer.experts, residual)
        return float((residual.float() - twin).norm() / twin.norm())

    def implementations(self) -> dict[str, Call]:
        """Those of the dispatch table that run here, but for the plain one."""
        found: dict[str, Call] = {}
        for row in table.ROWS:
            if row.operation == "moe" and not row.obstacle(self.facts) and row.name != "plain":
                kernel = row.create(self.facts)
                assert kernel is not None
                found[row.name] = kernel
        return found

    def parts(self, num_tokens: int) -> dict[str, Call]:
        """The kernels of an implementation by themselves."""
        pdl = self.facts.pdl
        kernels = MoEKernels(self.device, self.moe, pdl)
        config = kernels.gemm_config(num_tokens, *self.weights())
        kept = {}

        def scores(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
            kernels._scores(x, router)

        def route(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
            kernels._route(x, router, config.tokens)

        def up(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
            weights = weights_of(experts.gate_up_proj)
            if x.data_ptr() not in kept:
                kept[x.data_ptr()] = kernels._route(x, router, config.tokens)
            routing = kept[x.data_ptr()]
            out = x.new_empty(len(routing.order), self.moe.intermediate_size)
            moe_gemm.launch_gemm(x, routing, weights, out, config=config, is_up=True, pdl=pdl)

        def down(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> None:
            weights, routing = weights_of(experts.down_proj), kept[x.data_ptr()]
            inner = x.new_empty(len(routing.order), self.moe.intermediate_size)
            out = x.new_empty(len(routing.order), self.text.hidden_size)
            moe_gemm.launch_gemm(inner, routing, weights, out, config=config, is_up=False, pdl=pdl)

        return {"scores": scores, "scores+route": route, "up": up, "down": down}

    def compare(self, counts: tuple[int, ...]) -> None:
        """Prints a line per number of tokens."""
        calls = self.implementations()
        heads = ["floor", "by", "predicted", *calls, "scores", "scores+route", "up", "down"]
        print(f"\n{self.format} experts, us per call (error)")
        print(f"{'T':>5} " + " ".join(f"{head:>16}" for head in heads))
        for count in counts:
            inputs = self.inputs(count)
            floor, limit = self.floor_us(inputs)
            predicted = floor / _REACHED[limit] + 6 * _LAUNCH_US
            cells = [f"{floor:.1f}", limit, f"{predicted:.1f}"]
            for name, call in calls.items():
                if name == "gemv" and count > 16:
                    cells.append("-")
                    continue
                cells.append(self._shown(call, inputs))
            if self.format in _WHOLE:
                parts = self.parts(count).values()
                cells += [f"{self.time_us(call, inputs):.1f}" for call in parts]
            print(f"{count:5} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)

    def _shown(self, call: Call, inputs: list[Tensor]) -> str:
        try:
            return f"{self.time_us(call, inputs):.1f} ({self.error(call, inputs[0]):.1e})"
        except Exception as error:
            torch.cuda.synchronize()
            return f"{type(error).__name__}: {error}".splitlines()[0][:40]

    def tune(self, counts: tuple[int, ...]) -> None:
        """Prints configurations by time, the present one marked."""
        pdl = self.facts.pdl
        kernels = MoEKernels(self.device, self.moe, pdl)
        for count in counts:
            inputs = self.inputs(count)
            floor, limit = self.floor_us(inputs)
            found: list[tuple[float, str]] = []
            weights = self.weights()
            w8a8 = weights[0].multiplies_quantized(self.device)
            configs: list[MoEGemvConfig | MoEGemmConfig] = list(
                _gemm_configs(self.device, count, w8a8=w8a8)
            )
            present = {str(kernels.gemm_config(count, *weights))}
            if count <= 8:
                base = MoEGemvConfig()
                configs += _gemv_configs(base)
                present.add(str(base))
            for config in configs:

                def call(
                    x: Tensor,
                    router: Router,
                    experts: Experts,
                    residual: Tensor,
                    config: MoEGemvConfig | MoEGemmConfig = config,
                ) -> None:
                    up, down = map(weights_of, experts.stacks.values())
                    if isinstance(config, MoEGemvConfig):
                        kernels.gemv(x, router, experts, residual, config=config)
                    else:
                        routing = kernels._route(x, router, config.tokens)
                        gemm = partial(moe_gemm.launch_gemm, config=config, pdl=pdl)
                        moe_gemm.grouped_experts(x, routing, up, down, residual, gemm, pdl=pdl)

                try:
                    found.append((self.time_us(call, inputs), str(config)))
                except Exception as error:
                    print(f"{config}: {type(error).__name__}: {str(error)[:60]}")
            print(f"\n{self.format}, {count} tokens: floor {floor:.1f} us by {limit}")
            best = sorted(found)
            for micros, shown in best[:6] + [x for x in best[6:] if x[1] in present]:
                mark = "  <- present" if shown in present else ""
                print(f"{micros:10.1f}  {shown}{mark}", flush=True)


def _gemv_configs(base: MoEGemvConfig) -> Iterator[MoEGemvConfig]:
    yield base
    for rows, columns, warps in product((2, 4, 8), (512, 1024, 2048), (2, 4, 8)):
        if 16 <= 2 * rows * columns // (32 * warps) <= 128:
            yield replace(base, up_rows=rows, up_columns=columns, up_warps=warps)
    for rows, columns, warps in product((2, 4, 8), (128, 256, 1024), (2, 4, 8)):
        if 16 <= 8 * rows * columns // (32 * warps) <= 128:
            yield replace(base, down_rows=rows, down_columns=columns, down_warps=warps)


# Tokens of a tile → rows, columns, stages, warps.
_SKINNY = (
    (64, 128, 4, 4), (64, 128, 5, 4), (64, 128, 6, 4), (64, 64, 6, 4), (64, 256, 3, 4),
    (128, 64, 5, 4), (128, 64, 6, 4), (128, 128, 4, 4), (128, 128, 5, 8),
)  # fmt: skip
_WIDE = (
    (64, 64, 5, 4), (128, 64, 3, 4), (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 4),
    (256, 64, 3, 8), (256, 64, 4, 8),
)  # fmt: skip
_TILES = {16: _SKINNY, 32: _SKINNY, 64: _WIDE, 128: _WIDE}
_W8A8 = (  # K goes by 128
    (64, 128, 3, 4), (64, 128, 5, 4), (128, 128, 3, 4), (128, 128, 4, 4), (128, 128, 3, 8),
    (128, 128, 4, 8), (256, 128, 3, 8), (256, 128, 4, 8),
)  # fmt: skip


def _gemm_configs(device: DeviceFacts, count: int, *, w8a8: bool) -> Iterator[MoEGemmConfig]:
    sizes = (16,) if count <= 64 else (16, 32) if count <= 256 else (64, 128)
    found = [MoEGemmConfig(tokens, *rest) for tokens in sizes for rest in _TILES[tokens]]
    if w8a8:
        found += [MoEGemmConfig(tokens, *rest, w8a8=True) for tokens in sizes for rest in _W8A8]
    return (config for config in found if config.shared_bytes() <= device.shared_memory_bytes)


def write_model(directory: Path, text: TextSpec, weight_format: str) -> None:
    """A config.json of this shape, as a text model, for random weights; in bf16 or FP8 blocks."""
    moe = text.moe
    assert moe is not None
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size, "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers, "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads, "head_dim": text.head_dim,
        "rms_norm_eps": text.rms_norm_eps, "rope_theta": text.rope.theta,
        "max_position_embeddings": text.max_position_embeddings, "norm_topk_prob": True,
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size, "eos_token_id": 0,
        "tie_word_embeddings": text.tie_word_embeddings,
    }  # fmt: skip
    if weight_format == "fp8_block":
        config["quantization_config"] = {
            "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "re:.*mlp.gate$"],
        }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="30b-a3b", choices=SHAPES)
    parser.add_argument("--format", default="plain", choices=[*_WHOLE, "int8", *_GROUPS])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s")
    parser.add_argument("--rate", type=float, default=790.0, help="TFLOP/s")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tune-tokens", default="1,2,4,8,16,64,256,1008,8192")
    parser.add_argument("--write-model", type=Path)
    parser.add_argument("--variants", action="store_true")
    chosen = parser.parse_args()
    text = SHAPES[chosen.shape]
    if chosen.write_model:
        write_model(chosen.write_model, text, chosen.format)
        return
    rates = chosen.bandwidth * 1e12, chosen.rate * 1e12
    if chosen.variants:
        from benchmarks.kernels import moe_variants

        moe_variants.run(text, chosen.format, (1, 2, 4), rates[0], sweep=chosen.tune)
        return
    bench = Bench(text, chosen.format, rates)
    bench.compare(tuple(map(int, chosen.tokens.split(","))))
    if chosen.tune:
        bench.tune(tuple(map(int, chosen.tune_tokens.split(","))))


if __name__ == "__main__":
    main()
