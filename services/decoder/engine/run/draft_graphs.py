"""CUDA graphs that draft tokens with the layer for multi-token prediction, see `Drafter`.

A graph drafts for a fixed number of rows, behind whichever step has sampled. It begins with the
comparison of drafts and sampled tokens, so nothing has to be known on the host.
"""

import logging
from collections.abc import Sequence

import torch

from kernels import launches
from services.common.nn.collectives import CAPTURE_S, Ranks
from services.common.process.progress import log_progress
from services.decoder.engine.run.drafter import CapturedDrafts, Drafter
from services.decoder.engine.run.graphs import GraphMemory
from services.decoder.operations.ops import Ops

logger = logging.getLogger(__name__)


@torch.inference_mode()
def capture_drafts(
    drafter: Drafter, ops: Ops, memory: GraphMemory, sizes: Sequence[int], ranks: Ranks
) -> None:
    """Captures a graph for each number of rows; if a capture fails, drafts run eagerly.

    All ranks call the function together, and keep the graphs that all of them have.

    Args:
        drafter: drafts tokens; gets the graphs.
        ops: operations of the model.
        memory: memory pool and stream of all graphs.
        sizes: numbers of rows.
        ranks: the ranks that share the model.

    Raises:
        torch.OutOfMemoryError: the graphs do not fit into the device's memory.
    """
    if not drafter.plans_on_device:
        logger.warning("attention plans on the host, so that no graph drafts tokens")
        return
    captured: dict[int, CapturedDrafts] = {}
    try:
        # The largest first, so that the smaller ones find their memory in the pool.
        for done, size in enumerate(sorted(sizes, reverse=True)):
            memory.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(memory.stream), ops.table.for_graph():
                drafter.draft_groups(size)  # libraries allocate and choose kernels at first
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # so that the graph's pool can have the memory
                with (
                    ops.table.capturing() as calls,
                    launches.captured_graph(memory.pool) as graph,
                ):
                    drafts = drafter.draft_groups(size)
            torch.cuda.current_stream().wait_stream(memory.stream)
            graph.replay()  # the first replay takes longer
            captured[size] = graph, calls, drafts
            log_progress("graphs of drafts", done + 1, len(sizes))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        logger.warning("capture failed, drafts run eagerly", exc_info=True)
        captured = {}
    # If the capture failed on another rank within a step, that rank waits here for no longer.
    of_ranks = ranks.exchange(sorted(captured), CAPTURE_S)
    drafter.sizes = sorted(set.intersection(*map(set, of_ranks)))
    drafter.graphs = {size: captured[size] for size in drafter.sizes}
