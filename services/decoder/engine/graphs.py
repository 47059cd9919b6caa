"""Decode steps as CUDA graphs: one per bucket of batch sizes, all in one memory pool."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.decoder.attention.base import AttentionBackend
from services.decoder.engine import step_inputs
from services.decoder.engine.batch import RunnerInfo
from services.decoder.engine.sampler import greedy
from services.decoder.engine.staging import Staging
from services.decoder.engine.step_inputs import HostStep, StagedStep
from services.decoder.models.base import CausalLM


def decode_buckets(max_num_sequences: int) -> list[int]:
    """Batch sizes to capture: dense where a step is short, at most an eighth of padding above."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < max_num_sequences:
        step = max(4, 1 << (sizes[-1].bit_length() - 4))
        sizes.append(sizes[-1] + step)
    return sorted({min(size, max_num_sequences) for size in sizes})


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor  # [bucket] int32


class DecodeGraphs:
    """Captured steps of decodes: inputs to logits, greedy tokens and the rows' last tokens.

    A graph reads its inputs where the staging buffer has them on the device, and writes logits to
    one buffer that all buckets share.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        last_tokens: Tensor,
        staging: Staging,
        info: RunnerInfo,
    ) -> None:
        self._model = model
        self._backend = backend
        self._last_tokens = last_tokens
        self._staging = staging
        self._info = info
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None  # torch has no public name for its type
        self._logits: Tensor | None = None  # [largest bucket, vocab_size]

    def bucket(self, step: HostStep) -> int | None:
        """The smallest captured size for a step, or None: it must run eagerly."""
        count = len(step.seq_lens)
        if step.num_decodes != count or len(step.samples) != count or step.segments:
            return None
        return min((size for size in self._captured if size >= count), default=None)

    def capture(self, staged: StagedStep, kv_cache: Tensor) -> None:
        """Captures the size of a padded step; the largest size must be the first."""
        self._staging.upload()
        metadata = step_inputs.attention_metadata(staged, self._staging)
        metadata.plan = self._backend.plan(metadata, captured=True)
        size = metadata.num_decodes

        def step() -> Tensor:
            hidden = self._model.forward(
                step_inputs.input_ids(staged, self._staging, self._last_tokens),
                self._staging.device(staged.positions),
                kv_cache,
                metadata,
            )
            logits = self._model.logits(hidden)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits[:size].copy_(logits)
            token_ids = greedy(logits)
            rows = self._staging.device(staged.output_rows)
            self._last_tokens.index_copy_(0, rows, token_ids.clamp(min=0))
            return token_ids

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # libraries allocate and choose kernels at the first call
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            token_ids = step()
        self._pool = graph.pool()
        self._captured[size] = _Captured(graph, token_ids)

    def replay(self, staged: StagedStep, bucket: int) -> tuple[Tensor, Tensor]:
        """Runs an uploaded step: logits `[bucket, vocab_size]` and greedy tokens `[bucket]`.

        Both are valid until the next replay.
        """
        metadata = step_inputs.attention_metadata(staged, self._staging)
        self._backend.plan(metadata, captured=True)
        captured = self._captured[bucket]
        captured.graph.replay()
        assert self._logits is not None
        return self._logits[:bucket], captured.token_ids
