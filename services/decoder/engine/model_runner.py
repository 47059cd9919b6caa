"""The model runner: steps in, sampled tokens out. The only owner of its device.

The engine calls it, with nothing but a `Step`. An exception of the device is the engine's to
handle; a kind of step whose CUDA graphs cannot be captured runs eagerly.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.linear_attention.states import StateCache
from kernels.rows import DeviceRows, EnteredStep
from kernels.sampling.sampling import MaskedRows, SamplingInputs
from kernels.tuning import MAX_CAPTURED_CHUNKS
from services.common.process.progress import log_progress
from services.decoder.attention.base import AttentionBackend
from services.decoder.engine import step_inputs
from services.decoder.engine.graphs import (
    DecodeGraphs,
    MixedGraphs,
    PromptGraphs,
    StepGraphs,
    StepParts,
)
from services.decoder.engine.images import ImageReader
from services.decoder.engine.mask_buffer import MaskBuffer
from services.decoder.engine.messages import EngineInfo, SamplingParams
from services.decoder.engine.pending_step import DevicePendingStep, HostTokens, LateSampling
from services.decoder.engine.prompt_scores import PromptScores, score_prompt
from services.decoder.engine.sampler import Sampled, SampledLogprobs, Sampler
from services.decoder.engine.staging import Staging
from services.decoder.engine.step import RowStart, Step
from services.decoder.engine.step_inputs import NOTHING_NEW, RowUpdates, StepInputs
from services.decoder.models.base import CausalLM, VisualInput

logger = logging.getLogger(__name__)

# Staging bytes that do not depend on a step's size: alignment, the attention's shortest work list.
_MOST_ELSE_BYTES = 16 << 10
# Together, they run every branch of the sampler.
_WARM_UP_PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.8, top_logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,)),
)


class PreparedStep(NamedTuple):
    """A step whose arrays are staged and not uploaded.

    Attributes:
        step: of the engine.
        inputs: padded for the graphs.
        graphs: that run it; None: it runs eagerly.
        sampling: of its samples.
    """

    step: Step
    inputs: StepInputs
    graphs: StepGraphs | None
    sampling: SamplingInputs | MaskedRows | None


@dataclass(slots=True)
class DeviceState:
    """Tensors that stay on the device between steps."""

    device: torch.device
    kv_cache: Tensor  # [num_layers, num_blocks + 1, 2, block_size, num_kv_heads, head_dim]
    states: StateCache | None  # of rows, and one more for padding; None: the model has none
    checkpoints: StateCache | None
    rows: DeviceRows  # the last one is scratch, for padding


class ModelRunner:
    """The `step.Runner` of a model. Not thread-safe.

    Nothing in `execute` waits for the device: a step is arrays on the host, one upload, launches,
    and one copy back. All steps run on one stream, so that step n + 1 finds the tokens of step n in
    `last_tokens`.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: CausalLM,
        backend: AttentionBackend,
        state: DeviceState,
        images: ImageReader | None,
    ) -> None:
        self.info = info
        self._model = model
        self._backend = backend
        self._state = state
        self._images = images
        self._max_blocks = state.rows.blocks.shape[1]
        self._scratch_row = info.max_num_sequences
        state.rows.blocks[self._scratch_row] = info.num_blocks
        chunks = _most_chunks(info)
        tokens = max(info.max_batched_tokens, chunks)
        self._entered = EnteredStep.allocate(tokens, chunks, state.device)
        self._sampler = Sampler(info.max_num_sequences, info.vocab_size, state.device, model.ops)
        words = -(-info.vocab_size // 32)
        self._masks = MaskBuffer(info.max_num_sequences, words, state.device)
        self._staging = Staging(_staging_bytes(info, self._max_blocks), state.device)
        self._dtype = state.kv_cache.dtype
        self.graphs: list[StepGraphs] = []  # captured kinds of steps, see graphs.py
        self._prepared: PreparedStep | None = None
        self._resend = False  # a step has failed: lengths on the device may be of it

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Calls so far by "operation=implementation", replayed ones included."""
        calls = self._model.ops.table.calls()
        return {f"{operation}={name}": count for (operation, name), count in calls.items()}

    @torch.inference_mode()
    def prepare(self, step: Step) -> None:
        """Stages a step; see `step.Runner`. A row that is given to another sequence is the last
        one's until the step before is sampled, so that such a step is not staged yet.
        """
        if not step.row_starts:
            self._prepared = self._stage_all(step)

    @torch.inference_mode()
    def execute(self, step: Step) -> DevicePendingStep:
        """Launches a step; see `step.Runner`."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.step is not step:
            if step.row_starts:
                self._start_rows(step.row_starts)
            prepared = self._stage_all(step)
        try:
            return self._launch(prepared)
        except Exception:
            self._resend = True
            raise

    def _launch(self, prepared: PreparedStep) -> DevicePendingStep:
        """Launches a step that was staged last."""
        step, inputs, graphs, sampling = prepared
        if len(step.late):
            self._masks.begin()
            for index, mask in enumerate(step.token_masks):
                self._masks.put(index, mask)
        self._staging.upload()
        step_inputs.update_rows(inputs, self._staging, self._state.rows)
        logits = token_ids = None
        scores: list[PromptScores] = []
        if graphs is not None:
            count = len(step.samples)
            logits, token_ids = (out[:count] for out in graphs.replay(inputs))
        else:
            # Scored prompt tokens may be any.
            sampled = self._last_tokens_of(inputs)
            narrow = len(step.samples) > 0 and len(step.scored) == 0
            hidden = self._forward(inputs, sampled if narrow else None)
            scores = self._score(step, hidden)
            if len(step.samples):
                logits = self._model.logits(hidden if narrow else hidden[sampled])
        self._save_states(step)
        if logits is None:
            # The step still reads the arena, which may be reused once its result is there.
            done = self._mark()
            self._staging.done_by(done)
            tokens = HostTokens(torch.empty(0, dtype=torch.int32), None, None, done)
            return DevicePendingStep(tokens, None, scores)
        rows = self._rows_of_samples(inputs)
        if sampling is None or len(step.late) == 0:
            tokens = self._sample(rows, logits, token_ids, sampling)
            self._staging.done_by(tokens.event)
            return DevicePendingStep(tokens, None, scores)
        computed = self._mark()
        self._staging.done_by(computed)
        first, count = len(step.token_masks), len(step.token_masks) + len(step.late)
        late = LateSampling(
            computed=computed,
            put=lambda index, mask: self._masks.put(first + index, mask),
            sample=partial(self._sample_late, rows, logits, token_ids, sampling, count),
        )
        return DevicePendingStep(None, late, scores)

    def _rows_of_samples(self, step: StepInputs) -> Tensor:
        """Those of a launched step, perhaps with padding; valid until the next one."""
        place = step.places.sampled_rows
        if place is None:
            return self._entered.rows[: len(step.seq_lens)]
        return self._staging.device(place)

    def _last_tokens_of(self, step: StepInputs) -> Tensor:
        """Indices of an eager step's tokens that sample."""
        assert step.places.sampled_tokens is not None
        return self._staging.device(step.places.sampled_tokens)

    def _score(self, step: Step, hidden: Tensor) -> list[PromptScores]:
        """Logprobs of the prompt tokens that a step names, on their way to the host.

        Args:
            step: it was launched.
            hidden: of all its tokens, if it names any.
        """
        runs: list[PromptScores] = []
        taken = 0
        for first, count, most in step.scored.tolist():
            followers = torch.from_numpy(step.followers[taken : taken + count].astype(np.int64))
            taken += count
            found = score_prompt(
                hidden[first : first + count], self._upload(followers),
                self._model.logits, min(most, self.info.vocab_size), self.info.max_num_sequences,
            )  # fmt: skip
            runs.append(PromptScores(*(self._to_host(part) for part in found)))
        return runs

    @torch.inference_mode()
    def _sample_late(
        self,
        rows: Tensor,
        logits: Tensor,
        token_ids: Tensor | None,
        sampling: SamplingInputs | MaskedRows,
        num_masks: int,
    ) -> HostTokens:
        """`_sample` of a step whose masks are all there."""
        self._masks.upload(num_masks)
        return self._sample(rows, logits, token_ids, sampling)

    def close(self) -> None:
        """Releases the arena; the process may go on without the runner."""
        if self._images is not None:
            self._images.close()

    @torch.inference_mode()
    def capture_graphs(self, decodes: list[int], prompts: list[int], mixed: list[int]) -> None:
        """Captures decode steps of these sizes, lone prompts of these lengths, and mixed steps of
        these numbers of tokens. A kind whose capture fails runs eagerly, with a warning.

        Raises:
            torch.OutOfMemoryError: the graphs do not fit into the device's memory.
        """
        parts = StepParts(
            self._model,
            self._backend,
            self._images,
            self._state.rows,
            self._entered,
            self._staging,
            self._state.kv_cache,
            torch.cuda.graph_pool_handle(),
            torch.cuda.Stream(),
            self._state.states,
        )
        scratch = self._scratch([1] * self._scratch_row)
        mixed_graphs, decode_graphs = MixedGraphs(parts, scratch), DecodeGraphs(parts, scratch)
        prompt_graphs = PromptGraphs(parts)
        # The largest first, so that the smaller ones find their memory in the pool.
        steps = (
            (mixed_graphs, (mixed_graphs.scratch(n) for n in sorted(mixed, reverse=True))),
            (prompt_graphs, (self._scratch([n]) for n in sorted(prompts, reverse=True))),
            (decode_graphs, (self._scratch([1] * n) for n in sorted(decodes, reverse=True))),
        )
        done, total = 0, len(mixed) + len(prompts) + len(decodes)
        for graphs, scratch in steps:
            try:
                for step in scratch:
                    graphs.capture(self._stage(step, graphs))
                    done += 1
                    log_progress("graphs", done, total)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                kind = type(graphs).__name__
                logger.warning("%s: capture failed, these steps run eagerly", kind, exc_info=True)
            else:
                self.graphs.insert(0, graphs)

    @torch.inference_mode()
    def forward_scratch(self, lengths: list[int]) -> None:
        """Runs model and head over sequences of meaningless tokens in the scratch block.

        Warms kernels up, and shows how much memory a step of that size takes.
        """
        step = self._stage(self._scratch(lengths))
        self._staging.upload()
        hidden = self._forward(step, self._last_tokens_of(step))
        self._model.ops.greedy(self._model.logits(hidden))

    @torch.inference_mode()
    def sample_scratch(self, num_rows: int) -> None:
        """Runs every sampling kernel on rows of meaningless logits."""
        logits = torch.zeros(
            (num_rows, self.info.vocab_size), dtype=self._dtype, device=self._state.device
        )
        rows, one = np.zeros(num_rows, np.int64), np.zeros(1, np.int32)
        words = -(-self.info.vocab_size // 32)
        masks = np.full((1, words), -1, np.int32)
        for params in _WARM_UP_PARAMS:
            self._sampler.start_row(0, params, one, one)
            for masked in (np.empty(0, np.int64), np.zeros(1, np.int64)):
                self._staging.begin()
                inputs = self._sampler.prepare(rows, rows, self._staging, masked, masks)
                self._staging.upload()
                assert isinstance(inputs, SamplingInputs)
                tokens = self._copy_back(self._sampler.sample(logits, inputs), inputs)
                DevicePendingStep(tokens).result()
        self._sampler.start_row(0, SamplingParams())
        self._staging.begin()
        inputs = self._sampler.prepare(rows[:1], rows[:1], self._staging, rows[:1], masks)
        self._staging.upload()
        assert isinstance(inputs, MaskedRows)
        token_ids = self._model.ops.greedy(logits)
        # Of meaningless tokens, which the row's next sequence does not read.
        self._model.ops.greedy_masked(logits, inputs, token_ids, self._state.rows.last_tokens)

    def _scratch(self, lengths: list[int]) -> StepInputs:
        return StepInputs.scratch(lengths, self._scratch_row, self._max_blocks)

    def _graphs_for(self, step: StepInputs) -> tuple[StepGraphs | None, StepInputs]:
        """The graphs that run the step, and the step padded for them."""
        for graphs in self.graphs:
            padded = graphs.pad(step)
            if padded is not None:
                return graphs, padded
        return None, step

    def _stage_all(self, step: Step) -> PreparedStep:
        """Copies all of a step's arrays into the staging buffer."""
        inputs = step_inputs.lay_out(step, self._max_blocks, resend=self._resend)
        graphs = None
        if len(step.scored) == 0:
            graphs, inputs = self._graphs_for(inputs)
        self._stage(inputs, graphs, RowUpdates.of(step, self._max_blocks))
        return PreparedStep(step, inputs, graphs, self._prepare_sampling(step))

    def _stage(
        self,
        step: StepInputs,
        graphs: StepGraphs | None = None,
        updates: RowUpdates = NOTHING_NEW,
    ) -> StepInputs:
        """Copies a step, padded for `graphs` if any, into the staging buffer; returns it."""
        self._staging.begin()
        return step_inputs.stage(
            step,
            self._staging,
            updates,
            work=self._backend.list_work(step, captured=graphs is not None),
            masked=bool(step.images) if graphs is None else graphs.masks_images,
            with_states=self._state.states is not None,
            decodes=graphs is not None and graphs.runs_decodes,
            early=graphs is not None and graphs.plans_from_blocks(step),
        )

    def _start_rows(self, starts: list[RowStart]) -> None:
        for start in starts:
            prompt = completion = None
            if start.sampling.has_penalties:
                prompt = np.frombuffer(start.prompt_token_ids, np.int32)
                completion = np.frombuffer(start.completion_token_ids, np.int32)
            self._sampler.start_row(start.row, start.sampling, prompt, completion)
            if start.checkpoint >= 0:
                states, checkpoints = self._state.states, self._state.checkpoints
                assert states is not None and checkpoints is not None
                checkpoints.copy_slot(start.checkpoint, states, start.row)

    def _save_states(self, step: Step) -> None:
        """Copies states that the step has computed to checkpoints."""
        if step.state_saves is not None:
            states, checkpoints = self._state.states, self._state.checkpoints
            assert states is not None and checkpoints is not None
            for row, slot in step.state_saves.tolist():
                states.copy_slot(row, checkpoints, slot)

    def _forward(self, step: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Runs an uploaded step eagerly; see `CausalLM.forward` for `rows`."""
        state, staging = self._state, self._staging
        entered = self._entered.part(step.num_tokens, len(step.seq_lens))
        self._model.ops.enter_step(
            step_inputs.entry(step, staging), state.rows, entered, self.info.block_size
        )
        metadata = step_inputs.attention_metadata(step, staging, state.rows, entered, state.states)
        metadata.plan = self._backend.plan(metadata)
        return self._model.forward(
            entered.input_ids,
            entered.positions,
            state.kv_cache,
            metadata,
            self._visual(step),
            rows,
        )

    def _visual(self, step: StepInputs) -> VisualInput | None:
        if step.places.visual_mask is None:
            return None
        if self._images is None:
            raise RuntimeError("a sequence has images, but the runner has no arena")
        self._images.read(step.images)
        return self._images.visual(self._staging.device(step.places.visual_mask))

    def _prepare_sampling(self, step: Step) -> SamplingInputs | MaskedRows | None:
        late = late_masks = None
        if len(step.late):
            late, late_masks = step.late, self._masks.device(len(step.masked) + len(step.late))
        return self._sampler.prepare(
            step.rows[step.samples], step.generated, self._staging, step.masked, step.token_masks,
            late, late_masks,
        )  # fmt: skip

    def _sample(
        self,
        rows: Tensor,
        logits: Tensor,
        token_ids: Tensor | None,
        sampling: SamplingInputs | MaskedRows | None,
    ) -> HostTokens:
        """Samples tokens, keeps them for the next step, copies them to the host.

        Args:
            rows: of its samples, and perhaps padding.
            logits: of its samples.
            token_ids: greedy ones that are kept already; None: the step was no graph's.
            sampling: of its samples.
        """
        if isinstance(sampling, SamplingInputs):
            sampled = self._sampler.sample(logits, sampling)
            self._keep(rows, sampled.token_ids)
            return self._copy_back(sampled, sampling)
        if token_ids is None:
            token_ids = self._model.ops.greedy(logits)
            self._keep(rows, token_ids)
        if sampling is not None:
            last_tokens = self._state.rows.last_tokens
            self._model.ops.greedy_masked(logits, sampling, token_ids, last_tokens)
        return self._copy_back(Sampled(token_ids, None), None)

    def _keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """Writes a step's tokens where the next step reads them."""
        rows = rows[: len(token_ids)]  # without padding
        # A row that failed may be in the next step already, which then needs any valid id.
        self._state.rows.last_tokens.index_copy_(0, rows, token_ids.clamp(min=0))

    def _copy_back(self, sampled: Sampled, sampling: SamplingInputs | None) -> HostTokens:
        token_ids, logprobs = self._to_host(sampled.token_ids), sampled.logprobs
        if logprobs is not None:
            parts = (logprobs.chosen, logprobs.top_ids, logprobs.top)
            logprobs = SampledLogprobs(*(self._to_host(part) for part in parts))
        return HostTokens(token_ids, logprobs, sampling, self._mark())

    def _upload(self, values: Tensor) -> Tensor:
        if self._state.device.type != "cuda":
            return values
        # The pinned copy returns to torch's allocator, which waits for the stream.
        return values.pin_memory().to(self._state.device, non_blocking=True)

    def _mark(self) -> torch.cuda.Event | None:
        """An event after everything launched so far; None on a CPU."""
        if self._state.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _to_host(self, values: Tensor) -> Tensor:
        """An asynchronous copy to pinned memory (which torch's allocator keeps and reuses)."""
        if self._state.device.type != "cuda":
            return values
        target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return target.copy_(values, non_blocking=True)


def _most_chunks(info: EngineInfo) -> int:
    """Chunks of the largest step, see `step_inputs.pad_mixed`."""
    return info.max_num_sequences + MAX_CAPTURED_CHUNKS + 1


def _staging_bytes(info: EngineInfo, max_blocks: int) -> int:
    """The most a step's arrays take: per token, and per chunk with its blocks and token mask."""
    per_token, per_row = 52, 324 + 1024 + 4 * -(-info.vocab_size // 32)
    rows = _most_chunks(info)
    tokens = max(info.max_batched_tokens, rows)
    return tokens * per_token + rows * (per_row + 12 * max_blocks) + _MOST_ELSE_BYTES
