"""What others reach on the rows of `workloads.py`, and what we want to reach.

Peer: vLLM 0.26.0 (`vllm serve`, model runner V2, torch.compile and full CUDA graphs, FA3), measured
over HTTP with streaming on 2026-11-21: one NVIDIA H200 (141 GB), 16 CPU cores, Python 3.12,
torch 2.11.0+cu130, bf16, Qwen3-VL-2B shape with random weights and the real tokenizer, client on
the same machine. Prefix and multimodal caches off, but for the rows that name a cache.
A ratio to these numbers means something on that machine only, and at `--scale 1`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians in milliseconds, throughput in output tokens and in requests per second."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_per_s: float | None = None
    requests_per_s: float | None = None


VLLM: dict[str, Figures] = {
    "text_c1": Figures(18.8, 2.15, 439),
    "text_c64": Figures(222, 5.28, 8964),
    "text_c256": Figures(871, 15.7, 11330),
    "img1024_c1": Figures(59.5, 2.10),
    "img1024_repeat_c1": Figures(20.6, 2.14),
    "text1058_c1": Figures(20.6, 2.11),
    "img512_c64": Figures(486, 15.4, None, 90.4),
    "img512_reuse80_c64": Figures(304, 4.11, None, 143),
    "img1024_c32": Figures(488, 7.85, None, 32.4),
    "img4x640_c16": Figures(594, 4.78, None, 11.9),
}

# Times are upper bounds, throughputs lower bounds.
TARGETS: dict[str, Figures] = {
    "text_c1": Figures(9, 1.4),
    "text_c64": Figures(tokens_per_s=11_000),
    "text_c256": Figures(tokens_per_s=13_500),
    "img1024_c1": Figures(28),
    "img1024_repeat_c1": Figures(10),
    "text1058_c1": Figures(9.5),
    "img512_c64": Figures(requests_per_s=200),
    "img512_reuse80_c64": Figures(requests_per_s=350),
    "img1024_c32": Figures(requests_per_s=50),
    "img4x640_c16": Figures(requests_per_s=20),
}

# What the arithmetic of the card allows (4.3 TB/s, 790 TFLOP/s), where it was worked out.
FLOORS: dict[str, Figures] = {
    "text_c1": Figures(3.8, 0.83),
    "text_c64": Figures(tokens_per_s=14_400),
    "text_c256": Figures(tokens_per_s=16_600),
    "img1024_c1": Figures(10),
    "img1024_repeat_c1": Figures(4),
    "text1058_c1": Figures(3.9),
    "img512_c64": Figures(requests_per_s=400),
    "img1024_c32": Figures(requests_per_s=70),
    "img4x640_c16": Figures(requests_per_s=33),
}
