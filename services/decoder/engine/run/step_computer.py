"""The part of a step that every rank computes: rows, inputs, layers, and the head's logits.

`ModelRunner` stages a `ComputeStep` and runs it here, and samples from the logits. Steps run in
CUDA graphs where graphs were captured, and eagerly otherwise.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import EnteredStep
from kernels.tuning import MAX_CAPTURED_CHUNKS
from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.collectives import ALONE, CAPTURE_S, Ranks
from services.common.process.progress import log_progress
from services.decoder.attention.base import AttentionBackend
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.run import step_inputs
from services.decoder.engine.run.drafter import Drafter
from services.decoder.engine.run.graph_sizes import adapted_sizes, padded_decodes
from services.decoder.engine.run.graphs import DeviceState, Graphs, Kind, StepParts
from services.decoder.engine.run.host_cache import HostCache
from services.decoder.engine.run.images import ImageReader
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.step import ComputeStep
from services.decoder.models.transformer import Transformer

logger = logging.getLogger(__name__)

# Staging bytes that do not depend on a step's size: alignment, attention's shortest work list.
_CONSTANT_BYTES = 16 << 10


class Computed(NamedTuple):
    """The result of a step's layers on the device, valid until the next step.

    Attributes:
        hidden: `[T, hidden]` hidden states. None unless the step keeps them.
        logits: `[B, vocab_size]`. None if no token is sampled.
        token_ids: `[B]` int32, the most likely tokens, which the rows have as their last tokens
            already. None if the step ran without a graph.
        rows: `[B]` int64, rows of the samples, and then padding. None if no token is sampled.
        adapters: adapters of the T tokens, with `hidden`. None if no token has one.
    """

    hidden: Tensor | None
    logits: Tensor | None
    token_ids: Tensor | None
    rows: Tensor | None
    adapters: AdapterRows | None = None


class StepComputer:
    """Owner of the staging buffer and of the CUDA graphs.

    Args:
        info: the engine's limits.
        model: the language model.
        backend: implementation of paged attention.
        state: the tensors that stay on the device between steps.
        images: reader of image embeddings. None if there is no arena.
        ranks: the ranks that share the model. Defaults to this process alone.
        drafter: the user of the model's layer for multi-token prediction. None if there is none.

    Attributes:
        parts: the objects that run a step.
        staging: buffer of a step's arrays, begun by `stage`.
        graphs: the captured graphs, by class of steps.
        scratch_row: the row of meaningless sequences.
        max_blocks: number of blocks of a row.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Transformer,
        backend: AttentionBackend,
        state: DeviceState,
        images: ImageReader | None,
        ranks: Ranks = ALONE,
        drafter: Drafter | None = None,
    ) -> None:
        self.info, self.model, self.state = info, model, state
        self.max_blocks = state.rows.blocks.shape[1]
        self.scratch_row = info.max_num_sequences
        self.staging = Staging(_staging_bytes(info, self.max_blocks), state.kv_cache.device)
        self.graphs: list[Graphs] = []
        self._ranks = ranks
        self._host_cache: HostCache | None = None
        if info.num_host_blocks:
            self._host_cache = HostCache(state, info.num_host_blocks, info.num_host_states)
        state.rows.blocks[self.scratch_row] = info.num_blocks
        chunks = _max_chunks(info)
        tokens = max(info.max_batched_tokens, chunks)
        entered = EnteredStep.allocate(tokens, chunks, state.kv_cache.device)
        self.parts = StepParts(model, backend, images, state, entered, self.staging, drafter)

    def stage(self, step: ComputeStep) -> StepInputs:
        """Copies a step's arrays into the staging buffer; the caller may add more arrays."""
        inputs = step_inputs.lay_out(step, self.max_blocks)
        graphs = None
        adapters = self.model.adapters
        fits = step.adapters is None or (adapters is not None and adapters.fit_graphs)
        if fits and not step.keeps_hidden:
            graphs = next((each for each in self.graphs if each.pad(inputs)), None)
        return self.stage_inputs(inputs, graphs)

    def stage_inputs(self, step: StepInputs, graphs: Graphs | None = None) -> StepInputs:
        """Copies laid out arrays into the staging buffer, and returns the step.

        Args:
            step: the arrays of a step.
            graphs: the graphs that run the step and for which it is padded. None if the step runs
                eagerly.
        """
        self.staging.begin()
        step.graphs, work = graphs, None
        if graphs is None or graphs.lists_work:
            work = self.parts.backend.list_work(step, captured=graphs is not None)
        num_samples = len(step.samples)
        if graphs is None and self.graphs:
            num_samples = padded_decodes(num_samples, self.info.max_num_sequences)
        return step_inputs.stage(
            step,
            self.staging,
            work=work,
            masked=bool(step.images) if graphs is None else graphs.masks_images,
            with_states=self.state.states is not None,
            with_runs=self.state.kept is not None,
            decodes=graphs is not None and graphs.runs_decodes,
            num_samples=num_samples,
            drafts=self.parts.drafter and self.parts.drafter.lay_out(step),
        )

    def run(self, step: ComputeStep, inputs: StepInputs) -> Computed:
        """Uploads the staging buffer, and launches the step that was staged last."""
        if self.parts.drafter is not None:
            self.parts.drafter.begin(step)
        self.upload(step, inputs)
        if (amends := inputs.places.amends) is not None and self.parts.drafter is not None:
            device = self.staging.device
            self.parts.drafter.amend(self.staging.device_buffer(torch.int32), device(amends))
        if step.num_from_device:
            self._ranks.broadcast(self.state.rows.last_tokens)  # rank 0 has sampled them
        run = self._run_eagerly if inputs.graphs is None else self._replay
        computed = run(step, inputs)
        if self._host_cache is not None:
            self._host_cache.save_idle(step)
        if self.parts.drafter is not None:
            self._enter_drafts(inputs, self.parts.drafter)
        return computed

    def _enter_drafts(self, inputs: StepInputs, drafter: Drafter) -> None:
        """Tells the drafter which rows the launched step samples, and which states it saves."""
        places, device = inputs.places, self.staging.device
        assert places.draft_groups is not None
        drafter.enter(device(places.draft_groups))
        if places.draft_saves is not None:
            drafter.save(device(places.draft_saves), self.parts.entered.part(inputs.num_tokens, 0))

    def upload(self, step: ComputeStep, inputs: StepInputs) -> None:
        """Uploads a staged step, and changes rows and blocks on the device as the step says."""
        if self._host_cache is not None:
            self._host_cache.copy(step)
        for start in step.row_starts:
            if start.checkpoint >= 0:
                states, checkpoints = self.state.states, self.state.checkpoints
                assert states is not None and checkpoints is not None
                checkpoints.copy_slot(start.checkpoint, states, start.row)
        self.staging.upload()
        step_inputs.update_rows(inputs, self.staging, self.state.rows)

    def forward(self, step: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Runs the layers of an uploaded step eagerly; see `Transformer.forward` for `rows`."""
        if step.images:
            if self.parts.images is None:
                raise RuntimeError("a sequence has images, but the runner has no arena")
            self.parts.images.read(step.images)
        return self.parts.forward(step, rows)

    def load_adapter(self, slot: int, directory: str) -> None:
        """Loads an adapter into a slot, or empties the slot if `directory` is empty.

        Raises:
            AdapterError: the adapter cannot be served. The slot is empty.
        """
        adapters = self.model.adapters
        assert adapters is not None
        if directory:
            adapters.load_files(slot, directory)
        else:
            adapters.unload(slot)

    def score(self, step: ComputeStep, computed: Computed) -> None:
        """Computes this rank's part of the logits of prompt tokens, see `prompt_scores`."""
        most, adapters = self.info.max_num_sequences, computed.adapters
        for first, count, _ in step.scored.tolist():
            assert computed.hidden is not None
            for start in range(first, first + count, most):
                stop = min(start + most, first + count)
                rows = None if adapters is None else adapters.piece(start, stop)
                self.model.logits(computed.hidden[start:stop], adapters=rows)

    def _replay(self, step: ComputeStep, inputs: StepInputs) -> Computed:
        """Runs an uploaded step by a graph."""
        assert inputs.graphs is not None
        count = len(step.samples)
        logits, token_ids = inputs.graphs.replay(inputs)
        if count == 0:
            return Computed(None, None, None, None)
        return Computed(None, logits[:count], token_ids[:count], self._sampled_rows(inputs))

    def _run_eagerly(self, step: ComputeStep, inputs: StepInputs) -> Computed:
        """Runs an uploaded step without a graph.

        The head, and in most models the last layer's projections behind attention, are computed for
        the sampled tokens alone. Where other steps have graphs, the number of these tokens is
        padded to one for which decodes are captured. A library of GEMMs loads a kernel when it is
        first used, and waits for that until the device has computed all steps in flight. Most
        kernels for the captured numbers were loaded by the warm-up: a few differ, where eager steps
        choose others than graphs.
        """
        assert inputs.places.sampled_tokens is not None
        sampled = self.staging.device(inputs.places.sampled_tokens)
        count = len(step.samples)
        if count == 0:
            hidden = self.forward(inputs)
            return Computed(hidden, None, None, None, self.parts.adapters(inputs))
        rows, adapters = self._sampled_rows(inputs), self.parts.adapters(inputs)
        of_samples = None if adapters is None else adapters.part(sampled)
        if step.keeps_hidden:
            hidden = self.forward(inputs)
            logits = self.model.logits(hidden[sampled], adapters=of_samples)
            return Computed(hidden, logits[:count], None, rows, adapters)
        logits = self.model.logits(self.forward(inputs, sampled), adapters=of_samples)
        return Computed(None, logits[:count], None, rows)

    def _sampled_rows(self, inputs: StepInputs) -> Tensor:
        place = inputs.places.sampled_rows
        if place is None:
            return self.parts.entered.rows[: len(inputs.seq_lens)]
        return self.staging.device(place)

    @torch.inference_mode()
    def capture_graphs(self, wanted: Sequence[tuple[Graphs, list[int]]]) -> None:
        """Captures graphs; a class of steps whose capture fails runs eagerly, with a warning.

        Args:
            wanted: graphs that capture nothing yet, with the sizes to capture.

        Raises:
            torch.OutOfMemoryError: the graphs do not fit into the device's memory.
            RuntimeError: another rank waits within a step whose capture has failed on this rank.
        """
        done, total = 0, sum(len(sizes) for _, sizes in wanted)
        hiding = self.model.ops.table.facts.launch_hiding_tokens
        for graphs, sizes in wanted:
            adapted: list[int] = []
            if self.model.adapters is not None:
                adapted = adapted_sizes(sizes, hiding, decodes=graphs.runs_decodes)
            try:
                # The largest first, so that the smaller ones find their memory in the pool.
                for size in sorted(sizes, reverse=True):
                    graphs.capture(self.stage_inputs(graphs.scratch(size), graphs))
                    if size in adapted:
                        step = graphs.scratch(size).for_adapters()
                        graphs.capture(self.stage_inputs(step, graphs))
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
            # If the capture failed on another rank before a sum over ranks, that rank stops here,
            # while this rank waits for its term until one of them ends.
            self._ranks.exchange(graphs.name, CAPTURE_S)
        self._keep_graphs_of_all()
        if self.graphs and self.model.adapters is not None:
            self.model.adapters.note_capture()

    def _keep_graphs_of_all(self) -> None:
        """Drops graphs that another rank lacks, so that all ranks run steps in the same way."""
        if self._ranks.count == 1:
            return
        of_ranks = self._ranks.exchange({each.name: sorted(each.kinds) for each in self.graphs})
        for graphs in list(self.graphs):
            kinds = [{Kind(*kind) for kind in each.get(graphs.name, ())} for each in of_ranks]
            graphs.keep(set.intersection(*kinds))
            if not graphs.kinds:
                self.graphs.remove(graphs)

    @torch.inference_mode()
    def forward_scratch(self, lengths: list[int], num_cached: int = 0) -> None:
        """Runs model and head over sequences of meaningless tokens in the scratch block.

        The run warms kernels up and shows how much memory a step takes.

        Args:
            lengths: number of tokens of each sequence.
            num_cached: number of cached tokens before those of each sequence.
        """
        steps = [self.scratch(lengths, num_cached)]
        if self.model.adapters is not None:
            steps.append(self.scratch(lengths, num_cached).for_adapters())
        for each in steps:
            step = self.stage_inputs(each)
            self.staging.upload()
            assert step.places.sampled_tokens is not None
            hidden = self.forward(step, self.staging.device(step.places.sampled_tokens))
            self.model.ops.greedy(self.model.logits(hidden))

    def scratch(self, lengths: list[int], num_cached: int = 0) -> StepInputs:
        """Returns a step of meaningless sequences of these lengths behind cached tokens."""
        return StepInputs.scratch(lengths, self.scratch_row, self.max_blocks, num_cached)


def _max_chunks(info: EngineInfo) -> int:
    """Returns the most chunks of a step, with padding; see `graphs.pad_mixed`."""
    return info.max_num_sequences + MAX_CAPTURED_CHUNKS + 1


def _staging_bytes(info: EngineInfo, max_blocks: int) -> int:
    """Returns the most bytes that a step's arrays take: per token, and per chunk."""
    per_token, per_row = 64, 336 + 1024 + 4 * -(-info.vocab_size // 32)
    if info.has_draft_head:
        per_token, per_row = per_token + 24, per_row + 64 + 4 * info.max_drafts
    rows = _max_chunks(info)
    tokens = max(info.max_batched_tokens, rows)
    return tokens * per_token + rows * (per_row + 12 * max_blocks) + _CONSTANT_BYTES
