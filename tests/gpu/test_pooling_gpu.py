"""Models for search on a GPU: captured steps against eager ones, and scores against whole logits.

For the metric and the tolerances see `test_decoder_gpu.py`.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.decoder.engine.messages import SamplingParams
from services.decoder.models.transformer import Transformer
from tests.decoder_harness import Harness
from tests.gpu.decoder_2b import options, prompts, relative
from tests.search_checkpoints import EMBED_FILES, NO, SCORE_FILES, YES, write_files

pytestmark = pytest.mark.gpu

TASKS = {"embed": EMBED_FILES, "rank": SCORE_FILES}


@pytest.fixture(scope="module", params=TASKS)
def search(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    made = tmp_path_factory.mktemp(request.param)
    for file in directory.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    write_files(made, TASKS[request.param])
    with closing(Harness(made, **options(load_format="dummy"))) as harness:
        yield harness
    torch.cuda.empty_cache()


def results(harness: Harness, prompts: list[list[int]]) -> Tensor:
    """The results of prompts that are computed in one step."""
    once = SamplingParams(max_tokens=1)
    sequences = [harness.start(ids, row, once) for row, ids in enumerate(prompts)]
    output = harness.launch(*map(harness.chunk, sequences)).result()
    assert output.token_ids.tolist() == [[0]] * len(prompts)
    for sequence in sequences:
        harness.finish(sequence)
    assert output.vectors is not None
    return torch.from_numpy(output.vectors)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_captured_steps_agree_with_eager_ones(search: Harness, count: int) -> None:
    computer = search.runner.computer
    graphs = list(computer.graphs)
    assert graphs, "no backend here captures steps"
    captured = results(search, prompts(count))
    computer.graphs.clear()
    try:
        eager = results(search, prompts(count))
    finally:
        computer.graphs += graphs
    if search.runner.info.task == "embed":
        assert captured.shape == (count, 2048)
        assert relative(captured, eager) < 5e-2
    else:
        # Scores are differences, so they are compared with the spread of logits.
        assert captured.shape == (count, 1)
        assert float((captured - eager).abs().max()) < 0.1


def test_a_vector_is_the_state_and_a_score_the_difference_of_logits(search: Harness) -> None:
    hidden = torch.randn(9, 2048, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to("cuda", torch.bfloat16)
    with torch.inference_mode():
        logits = Transformer.logits(search.model, hidden).float()
        found = search.runner.pooler(hidden)
    if search.runner.info.task == "embed":
        assert torch.equal(found, hidden.float())
        return
    expected = logits[:, YES] - logits[:, NO]
    # Logits are rounded to bfloat16, a score is not.
    assert float((found[:, 0] - expected).abs().max()) < 2**-6 * float(logits.abs().max())
