"""Train the demonstration model on scenes that are drawn while it trains.

    python -m demo.train --out OUT --minutes 9.3 --compile

The wall-clock budget covers everything: starting, training with a cosine schedule that fits the
time that is left, saving in bfloat16, and the held-out evaluation in float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from demo.batches import IGNORED, BatchShape, SceneBatches
from demo.curriculum import TASKS
from demo.evaluate import evaluate, mistakes, table
from demo.forward import PaddedForward
from demo.heldout import NUM_CLIPS, held_out, held_out_clips
from demo.hf import HFAnswerer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

MODEL_DIR = Path(__file__).parent / "model"
WEIGHTS = "model.safetensors"
WARMUP_STEPS = 300
Batch = dict[str, torch.Tensor]


def build_model(folder: Path, resume: Path | None, seed: int) -> Qwen3VLForConditionalGeneration:
    """A float32 model from the directory's config: random, or with the weights of `resume`."""
    torch.manual_seed(seed)
    config = Qwen3VLConfig.from_pretrained(folder)
    config.dtype = config.text_config.dtype = torch.float32
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    if resume is not None:
        missing, unexpected = model.load_state_dict(load_file(resume / WEIGHTS), strict=False)
        if unexpected or missing not in ([], ["lm_head.weight"]):
            raise ValueError(f"{resume}: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
    return model.float()


def save_model(model: Qwen3VLForConditionalGeneration, source: Path, out: Path) -> None:
    """Write a complete model directory: the static files of `source` and bfloat16 weights."""
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name != WEIGHTS and out.resolve() != source.resolve():
            shutil.copyfile(path, out / path.name)
    state = {
        key: value.detach().to("cpu", torch.bfloat16).contiguous()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"  # tied to the embedding
    }
    save_file(state, out / WEIGHTS, metadata={"format": "pt"})


def build_optimizer(model: torch.nn.Module, lr: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=device.type == "cuda")


def start_workers(args: argparse.Namespace, shape: BatchShape) -> Iterator[Batch]:
    """Start the processes that draw and pack batches, and return the stream of batches.

    To be called before anything else uses threads or the device, since the processes are forks.
    """
    loader = DataLoader(
        SceneBatches(MODEL_DIR / "tokenizer.json", shape, args.seed),
        batch_size=None,
        num_workers=args.workers,
        pin_memory=args.device.startswith("cuda"),
        prefetch_factor=3 if args.workers else None,
        multiprocessing_context="fork" if args.workers else None,
    )
    return iter(loader)


class Meter:
    """Progress: mean loss since the last line, and how often each task's tokens are right."""

    def __init__(self, device: torch.device) -> None:
        self._start(device)

    def _start(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        self._hits = torch.zeros(len(TASKS), device=device)
        self._total = torch.zeros(len(TASKS), device=device)
        self._steps = 0
        self._since = time.monotonic()

    def add(self, loss: torch.Tensor, right: torch.Tensor, batch: Batch) -> None:
        """Take one step's result, without waiting for the device."""
        counted = (batch["labels"] != IGNORED).flatten().float()
        tasks = batch["tasks"].flatten()
        self._loss += loss.detach()
        self._hits.index_add_(0, tasks, right.flatten().float() * counted)
        self._total.index_add_(0, tasks, counted)
        self._steps += 1

    def line(self, step: int, lr: float, seconds_left: float) -> str:
        """One progress line; starts the next interval."""
        rate = self._steps / (time.monotonic() - self._since)
        share = (100 * self._hits / self._total.clamp(min=1)).tolist()
        tasks = " ".join(f"{name} {value:.1f}" for name, value in zip(TASKS, share, strict=True))
        text = (
            f"step {step}  {rate:.1f}/s  loss {float(self._loss) / self._steps:.4f}  lr {lr:.2e}  "
            f"{seconds_left:.0f} s left | {tasks}"
        )
        self._start(self._loss.device)
        return text


def learning_rate(step: int, done: float, peak: float) -> float:
    """Linear warm-up by steps, then cosine by the part of the time budget that is used."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * done))


def train(
    model: Qwen3VLForConditionalGeneration,
    stream: Iterator[Batch],
    args: argparse.Namespace,
    deadline: float,
) -> dict[str, object]:
    """Train until the deadline (or --steps) and return what was done."""
    device = model.device
    step_forward = PaddedForward(model, device).train()
    if args.compile:
        step_forward = torch.compile(step_forward)
    optimizer = build_optimizer(model, args.lr, device)
    meter, step, started = Meter(device), 0, time.monotonic()
    for host_batch in stream:
        if step == 1:
            started = time.monotonic()
            print(f"first step done, {deadline - started:.0f} s left", flush=True)
        batch = {key: value.to(device, non_blocking=True) for key, value in host_batch.items()}
        now = time.monotonic()
        done = (now - started) / max(1e-6, deadline - started) if step else 0.0
        if args.steps:
            done = max(done, step / args.steps)
        if done >= 1.0:
            break
        lr = learning_rate(step, done, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, right = step_forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.add(loss, right, batch)
        step += 1
        if step % args.log_every == 0:
            print(meter.line(step, lr, deadline - time.monotonic()), flush=True)
    return {
        "steps": step,
        "train_seconds": round(time.monotonic() - started, 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for model and metrics")
    parser.add_argument("--minutes", type=float, default=9.3, help="wall-clock budget of it all")
    parser.add_argument("--eval-seconds", type=float, default=60.0, help="kept for evaluation")
    parser.add_argument("--eval-scenes", type=int, default=1000)
    parser.add_argument("--eval-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    parser.add_argument(
        "--rows",
        type=int,
        nargs=4,
        default=BatchShape().rows,
        help="rows of a batch with none, one, two and three pictures",
    )
    parser.add_argument("--clips", type=int, default=BatchShape().clips, help="rows with a clip")
    parser.add_argument("--eval-clips", type=int, default=NUM_CLIPS)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--resume", type=Path, help="model directory to start from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the forward")
    return parser.parse_args()


def main() -> None:
    """Command line: train, save, evaluate."""
    began = time.monotonic()
    args = _arguments()
    shape = BatchShape(rows=tuple(args.rows), clips=args.clips)
    stream = start_workers(args, shape)
    torch.set_float32_matmul_precision("highest")
    model = build_model(MODEL_DIR, args.resume, args.seed).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters on {args.device}", flush=True)
    deadline = began + 60 * args.minutes - args.eval_seconds
    summary = train(model, stream, args, deadline)
    del stream
    save_model(model, MODEL_DIR, args.out / "model")
    metrics: dict[str, object] = {
        "parameters": parameters,
        "rows_per_step": shape.num_rows,
        "pictures_per_step": shape.num_images,
        "clips_per_step": shape.clips,
        **summary,
    }
    items = [*held_out_clips(args.eval_clips), *held_out(args.eval_scenes)]
    for dtype in ("float32", "bfloat16"):
        answerer = HFAnswerer(args.out / "model", dtype, args.device, args.eval_batch)
        report = evaluate(answerer, items, show=False)
        print(f"{dtype}\n{table(report)}\n" + "\n".join(mistakes(report, items)[:60]), flush=True)
        metrics[dtype] = report
        metrics["total_seconds"] = round(time.monotonic() - began, 1)
        (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")


if __name__ == "__main__":
    main()
