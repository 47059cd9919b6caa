"""The half of a step that every rank computes: rows, inputs, layers, and the head's logits.

`ModelRunner` stages a `ComputeStep` and runs it; what is sampled of the logits is another's
(`model_runner`). A kind of step whose CUDA graphs cannot be captured runs eagerly.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import EnteredStep
from kernels.tuning import MAX_CAPTURED_CHUNKS
from services.common.nn.collectives import ALONE, Ranks
from services.common.process.progress import log_progress
from services.decoder.attention.base import AttentionBackend
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run import step_inputs
from services.decoder.engine.run.graphs import (
    DecodeGraphs,
    DeviceState,
    GraphMemory,
    Graphs,
    Kind,
    MixedGraphs,
    PromptGraphs,
    StepParts,
)
from services.decoder.engine.run.images import ImageReader
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.step import ComputeStep
from services.decoder.models.transformer import Transformer

logger = logging.getLogger(__name__)

# Staging bytes that do not depend on a step's size: alignment, the attention's shortest work list.
_MOST_ELSE_BYTES = 16 << 10
_CAPTURE_S = 60.0  # by which ranks capture the last graphs of a kind sooner or later


class Computed(NamedTuple):
    """What a step's layers gave, on the device; valid until the next step.

    Attributes:
        hidden: `[T, hidden]`, if the step keeps them.
        logits: `[B, vocab_size]`; None: nothing samples.
        token_ids: `[B]` int32, the most likely ones, which the rows have as their last tokens
            already; None: the step was no graph's.
        rows: `[B]` int64 and perhaps padding, of the samples; None: nothing samples.
    """

    hidden: Tensor | None
    logits: Tensor | None
    token_ids: Tensor | None
    rows: Tensor | None


class StepComputer:
    """Owner of what the device keeps, of the staging buffer, and of the graphs.

    Attributes:
        staging: begun by `stage`.
        graphs: captured kinds of steps, see graphs.py.

    Args:
        images: reads embeddings; None: there is no arena.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Transformer,
        backend: AttentionBackend,
        state: DeviceState,
        images: ImageReader | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.staging = Staging(
            _staging_bytes(info, state.rows.blocks.shape[1]), state.kv_cache.device
        )
        self.graphs: list[Graphs] = []
        self._model = model
        self._state = state
        self._ranks = ranks
        self._most_scored = info.max_num_sequences
        self._max_blocks = state.rows.blocks.shape[1]
        self._scratch_row = info.max_num_sequences
        state.rows.blocks[self._scratch_row] = info.num_blocks
        chunks = _most_chunks(info)
        tokens = max(info.max_batched_tokens, chunks)
        entered = EnteredStep.allocate(tokens, chunks, state.kv_cache.device)
        self._parts = StepParts(model, backend, images, state, entered, self.staging)

    def stage(self, step: ComputeStep) -> StepInputs:
        """Copies a step's arrays into the staging buffer, behind which others may be put."""
        inputs = step_inputs.lay_out(step, self._max_blocks)
        graphs = None
        if not step.keeps_hidden:
            graphs = next((each for each in self.graphs if each.pad(inputs)), None)
        return self._stage(inputs, graphs)

    def run(self, step: ComputeStep, inputs: StepInputs) -> Computed:
        """Uploads the staging buffer, and launches the step that was staged last."""
        self._restore_states(step)
        self.staging.upload()
        step_inputs.update_rows(inputs, self.staging, self._state.rows)
        if step.num_from_device:
            self._ranks.broadcast(self._state.rows.last_tokens)  # rank 0 has sampled them
        return self._run(step, inputs)

    def score(self, step: ComputeStep, computed: Computed) -> None:
        """This rank's part of what rank 0 scores prompts with, see `prompt_scores`."""
        for first, count, _ in step.scored.tolist():
            assert computed.hidden is not None
            for hidden in computed.hidden[first : first + count].split(self._most_scored):
                self._model.logits(hidden)

    def _run(self, step: ComputeStep, inputs: StepInputs) -> Computed:
        count = len(step.samples)
        if inputs.graphs is not None:
            logits, token_ids = inputs.graphs.replay(inputs)
            if count == 0:
                return Computed(None, None, None, None)
            return Computed(None, logits[:count], token_ids[:count], self._sampled_rows(inputs))
        assert inputs.places.sampled_tokens is not None
        sampled = self.staging.device(inputs.places.sampled_tokens)
        narrow = count > 0 and not step.keeps_hidden
        hidden = self._forward(inputs, sampled if narrow else None)
        if count == 0:
            return Computed(hidden, None, None, None)
        logits = self._model.logits(hidden if narrow else hidden[sampled])
        return Computed(None if narrow else hidden, logits, None, self._sampled_rows(inputs))

    def _sampled_rows(self, inputs: StepInputs) -> Tensor:
        place = inputs.places.sampled_rows
        if place is None:
            return self._parts.entered.rows[: len(inputs.seq_lens)]
        return self.staging.device(place)

    @torch.inference_mode()
    def capture_graphs(self, decodes: list[int], prompts: list[int], mixed: list[int]) -> None:
        """Captures decode steps of these sizes, lone prompts of these lengths, and mixed steps of
        these numbers of tokens. A kind whose capture fails runs eagerly, with a warning.

        Raises:
            torch.OutOfMemoryError: the graphs do not fit into the device's memory.
            RuntimeError: another rank waits within a step whose capture has failed here.
        """
        parts, memory, scratch = self._parts, GraphMemory(), self._scratch([1] * self._scratch_row)
        mixed_graphs = MixedGraphs(parts, memory, scratch)
        prompt_graphs = PromptGraphs(parts, memory)
        decode_graphs = DecodeGraphs(parts, memory, scratch)
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
                logger.warning(
                    "%s: capture failed, these steps run eagerly", graphs.name, exc_info=True
                )
            else:
                self.graphs.insert(0, graphs)
            # A rank whose capture failed before a sum goes no further than this: the others wait
            # for its term, and its end is theirs.
            self._ranks.exchange(graphs.name, _CAPTURE_S)
        self._keep_graphs_of_all()

    def _keep_graphs_of_all(self) -> None:
        """Forgets graphs that another rank has not, so that all run a step in the same way."""
        if self._ranks.count == 1:
            return
        of_ranks = self._ranks.exchange({each.name: sorted(each.kinds) for each in self.graphs})
        for graphs in list(self.graphs):
            kinds = [{Kind(*kind) for kind in each.get(graphs.name, ())} for each in of_ranks]
            graphs.keep(set.intersection(*kinds))
            if not graphs.kinds:
                self.graphs.remove(graphs)

    @torch.inference_mode()
    def forward_scratch(self, lengths: list[int]) -> None:
        """Runs model and head over sequences of meaningless tokens in the scratch block.

        Warms kernels up, and shows how much memory a step of that size takes.
        """
        step = self._stage(self._scratch(lengths))
        self.staging.upload()
        assert step.places.sampled_tokens is not None
        hidden = self._forward(step, self.staging.device(step.places.sampled_tokens))
        self._model.ops.greedy(self._model.logits(hidden))

    def _scratch(self, lengths: list[int]) -> StepInputs:
        return StepInputs.scratch(lengths, self._scratch_row, self._max_blocks)

    def _stage(self, step: StepInputs, graphs: Graphs | None = None) -> StepInputs:
        """Copies a step, padded for `graphs` if any, into the staging buffer; returns it."""
        self.staging.begin()
        step.graphs = graphs
        return step_inputs.stage(
            step,
            self.staging,
            work=self._parts.backend.list_work(step, captured=graphs is not None),
            masked=bool(step.images) if graphs is None else graphs.masks_images,
            with_states=self._state.states is not None,
            decodes=graphs is not None and graphs.runs_decodes,
        )

    def _restore_states(self, step: ComputeStep) -> None:
        """Copies checkpoints to the rows that begin with them."""
        for start in step.row_starts:
            if start.checkpoint >= 0:
                states, checkpoints = self._state.states, self._state.checkpoints
                assert states is not None and checkpoints is not None
                checkpoints.copy_slot(start.checkpoint, states, start.row)

    def _forward(self, step: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Runs an uploaded step eagerly; see `Transformer.forward` for `rows`."""
        if step.images:
            if self._parts.images is None:
                raise RuntimeError("a sequence has images, but the runner has no arena")
            self._parts.images.read(step.images)
        return self._parts.forward(step, rows)


def _most_chunks(info: EngineInfo) -> int:
    """Chunks of the largest step, see `graphs.pad_mixed`."""
    return info.max_num_sequences + MAX_CAPTURED_CHUNKS + 1


def _staging_bytes(info: EngineInfo, max_blocks: int) -> int:
    """The most a step's arrays take: per token, and per chunk with its blocks and token mask."""
    per_token, per_row = 56, 324 + 1024 + 4 * -(-info.vocab_size // 32)
    rows = _most_chunks(info)
    tokens = max(info.max_batched_tokens, rows)
    return tokens * per_token + rows * (per_row + 12 * max_blocks) + _MOST_ELSE_BYTES
