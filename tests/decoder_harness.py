"""A runner over a tiny checkpoint, driven as the engine drives it but by hand. CPU."""

import json
import mmap
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.families import read_spec
from services.common.nn import weights
from services.common.nn.checkpoint import Checkpoint
from services.decoder.engine.messages import AddSequence, ImageSpan, SamplingParams
from services.decoder.engine.run import step_inputs
from services.decoder.engine.run.graphs import DeviceState
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.pending_step import DevicePendingStep
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.schedule.batch import Batch, Chunk
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.step import Step
from services.decoder.models.draft_head_files import add_draft_head
from services.decoder.models.transformer import Transformer
from services.decoder.operations.ops import PlainOps
from tests.image_processor import write_image_processor

ARENA_BYTES = 16 << 20
BLOCK_SIZE = 4


class Harness:
    """A runner, an arena and a block list without a scheduler."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.arena = mmap.mmap(-1, ARENA_BYTES)
        self._arena_used = 4096
        chosen: dict[str, Any] = {
            "device": "cpu", "block_size": BLOCK_SIZE, "max_num_sequences": 8,
            "max_batched_tokens": 2048, "kv_cache_bytes": 16 << 20,
            "max_model_len": 2048,
        } | options  # fmt: skip
        self.runner: ModelRunner = create_runner(
            RunnerOptions(model_directory=directory, **chosen), self.arena
        )
        self._size = self.runner.info.block_size
        # Out of order, so that a block's number never equals its index by luck.
        rng = np.random.default_rng(0)
        self._free = rng.permutation(self.runner.info.num_blocks).tolist()
        self._next_id = 0
        self.started: list[Sequence] = []  # start with the next step

    def close(self) -> None:
        """Due on a GPU before the arena is unmapped: it is registered as pinned memory."""
        if (images := self.runner.computer.parts.images) is not None:
            images.close()

    @property
    def model(self) -> Any:
        """The language model."""
        return self.runner.computer.model

    @property
    def state(self) -> DeviceState:
        """What stays on the device between steps."""
        return self.runner.computer.state

    def put(self, embedding: Tensor) -> int:
        """Puts `[features, n, hidden]` into the arena; returns its offset."""
        data = embedding.contiguous().view(torch.uint8).numpy().tobytes()
        offset = self._arena_used
        self.arena[offset : offset + len(data)] = data
        self._arena_used += -(-len(data) // 4096) * 4096
        return offset

    def start(
        self,
        token_ids: Seq[int],
        row: int = 0,
        sampling: SamplingParams | None = None,
        positions: np.ndarray | None = None,
        delta: int = 0,
        images: Seq[tuple[int, Tensor]] = (),
        adapter: int = -1,
    ) -> Sequence:
        """A sequence in a row. `images`: (offset of the first placeholder, embedding)."""
        self._next_id += 1
        spans, offsets = [], {}
        for index, (offset, embedding) in enumerate(images):
            key = f"{self._next_id}/{index}".encode()
            spans.append(ImageSpan(key, offset, embedding.shape[1]))
            offsets[key] = self.put(embedding)
        given = b"" if positions is None else positions.astype(np.int32).tobytes()
        message = AddSequence(
            self._next_id, np.array(token_ids, np.int32).tobytes(), given, delta, spans,
            sampling or SamplingParams(), adapter=adapter,
        )  # fmt: skip
        sequence = Sequence(message, image_offsets=offsets)
        return self.restart(sequence, row)

    def restart(self, sequence: Sequence, row: int) -> Sequence:
        """Gives a sequence (new, or preempted) a row and no blocks."""
        self._free += sequence.block_table
        sequence.block_table = []
        sequence.row = row
        sequence.num_computed_tokens = sequence.num_sent_blocks = 0
        self.started.append(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Takes the blocks back."""
        self._free += sequence.block_table
        sequence.block_table = []

    def chunk(self, sequence: Sequence, length: int | None = None) -> Chunk:
        """The next chunk: a decode where only in-flight or last tokens are left."""
        start = sequence.num_computed_tokens
        num_tokens = len(sequence.token_ids) + sequence.num_in_flight
        left = num_tokens - start
        length = left if length is None else min(length, left)
        while len(sequence.block_table) * self._size < start + length:
            sequence.block_table.append(self._free.pop())
        sequence.num_computed_tokens += length
        from_device = start >= len(sequence.token_ids)
        samples = start + length == num_tokens
        if samples:
            sequence.num_in_flight += 1
        return Chunk(sequence, start, length, from_device, samples)

    def launch(self, *chunks: Chunk) -> DevicePendingStep:
        """One step; decodes first, those whose token is on the device before the others."""
        ordered = sorted(chunks, key=lambda chunk: (not chunk.from_device, chunk.length != 1))
        pending = self.runner.execute(self.step_of(*ordered))
        self.order = [chunk for chunk in ordered if chunk.samples]
        return pending

    def step_of(self, *chunks: Chunk) -> Step:
        """The chunks as a step, in this order."""
        sequences = [chunk.sequence for chunk in chunks]
        num_tokens = sum(chunk.length for chunk in chunks)
        late = [chunk for chunk in chunks if chunk.is_late]
        step = Batch(list(chunks), num_tokens, self.started, sequences, late).to_step()
        self.started = []
        return step

    def take(self, pending: DevicePendingStep, chunks: Seq[Chunk]) -> None:
        """Appends a step's tokens to the sequences of its sampling chunks, in their order."""
        for chunk, (token_id,) in zip(chunks, pending.result().token_ids.tolist(), strict=True):
            chunk.sequence.token_ids.append(token_id)
            chunk.sequence.num_in_flight -= 1

    def step(self, *chunks: Chunk) -> DevicePendingStep:
        """Launch and take."""
        pending = self.launch(*chunks)
        self.take(pending, self.order)
        return pending

    def logits(self, *chunks: Chunk, only: list[int] | None = None) -> Tensor:
        """`[T, V]` of all of a step's tokens, or of those in `only`."""
        runner, computer = self.runner, self.runner.computer
        with torch.inference_mode():
            step = self.step_of(*chunks)
            for start in step.sample.row_starts:
                runner.sampler.start_row(start)
            step.compute.scored = np.zeros((1, 3), np.int64)  # keeps hidden states: eager
            inputs = computer.stage(step.compute)
            computer.upload(step.compute, inputs)
            rows = None if only is None else torch.tensor(only)
            hidden, adapters = computer.forward(inputs, rows), computer.parts.adapters(inputs)
            if adapters is not None and rows is not None:
                adapters = adapters.part(rows)
            return computer.model.logits(hidden, adapters=adapters).clone()

    def prompt_logits(self, sequence: Sequence, chunk_size: int | None = None) -> Tensor:
        """`[T, V]` of a whole prompt, computed in chunks; finishes the sequence."""
        parts: list[Tensor] = []
        while sequence.num_computed_tokens < sequence.num_prompt_tokens:
            parts.append(self.logits(self.chunk(sequence, chunk_size)))
        self.finish(sequence)
        return torch.cat(parts)

    def inputs(self, *chunks: Chunk) -> StepInputs:
        """What the runner makes of a step of these chunks."""
        return step_inputs.lay_out(self.step_of(*chunks).compute, self.runner.computer.max_blocks)

    def generate(
        self, sequence: Sequence, num_tokens: int, chunk_size: int | None = None
    ) -> list[int]:
        """Runs a sequence alone to its end; returns the completion."""
        while sequence.num_generated < num_tokens:
            self.step(self.chunk(sequence, chunk_size))
        return completion_of(sequence)


def completion_of(sequence: Sequence) -> list[int]:
    """The tokens after the prompt."""
    return sequence.token_ids[sequence.num_prompt_tokens :].tolist()


def write_checkpoint(directory: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A tiny Qwen3-VL language model's checkpoint; logits spread over about ±15."""
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 95, "video_token_id": 96, "vision_start_token_id": 97,
        "vision_end_token_id": 98, "tie_word_embeddings": tied,
        "text_config": {
            "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "eos_token_id": 99,
            "rope_theta": 1e4, "rope_scaling": {"mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "num_position_embeddings": 16, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 1],
        },
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_image_processor(directory, 256, 65536)
    return write_tensors(directory, seed)


def write_hybrid(directory: Path, *, seed: int = 0, tied: bool = False, **text: object) -> Path:
    """A tiny Qwen3.5's language model, with the sizes and the vocabulary of `write_checkpoint`."""
    write_checkpoint(directory)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    config["tie_word_embeddings"] = tied
    config["vision_config"]["deepstack_visual_indexes"] = []
    config["text_config"] |= {
        "num_hidden_layers": 4, "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
            "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
        },
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    } | text  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return write_tensors(directory, seed)


def write_draft_head(directory: Path, *, seed: int = 1) -> Path:
    """Adds a layer for multi-token prediction to a checkpoint of `write_hybrid`."""
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    spec = read_spec(directory)
    with torch.device("meta"):
        model = Transformer(spec, backend=None, ops=PlainOps())  # type: ignore[arg-type]
        add_draft_head(model, spec, None, None)  # type: ignore[arg-type]
    none = Checkpoint(directory, {})
    sources = weights._sources(model, model.weight_map, none)
    shapes = {part.name: part.shape for part in sources if part.name.startswith("mtp.")}
    path = directory / "model.safetensors"
    save_file(load_file(path) | random_tensors(shapes, seed), path)
    return directory


def write_tensors(directory: Path, seed: int = 0) -> Path:
    """Random tensors for the language model of a directory that has its JSON files."""
    save_file(random_tensors(tensor_shapes(directory), seed), directory / "model.safetensors")
    return directory


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random tensors of these names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("A_log"):  # states that last, and states that do not
            tensors[name] = 5.0 * torch.rand(shape, generator=generator) - 4.0
        elif len(shape) == 1:
            tensors[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            scale = 4.0 if "embed" in name or "lm_head" in name else 1.5
            tensors[name] = torch.randn(shape, generator=generator) * scale / shape[1] ** 0.5
    return tensors


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model's tensors in a checkpoint."""
    spec = read_spec(directory)
    with torch.device("meta"):
        model = Transformer(spec, backend=None, ops=PlainOps())  # type: ignore[arg-type]
    none = Checkpoint(directory, {})
    return {part.name: part.shape for part in weights._sources(model, model.weight_map, none)}
