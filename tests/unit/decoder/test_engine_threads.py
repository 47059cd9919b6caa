"""The threads among which an engine's process divides computations on the CPU."""

import ast
import importlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from services.common.nn.collectives import ALONE
from services.common.process import passive_threads
from services.decoder import engine_main
from services.decoder.settings import DecoderSettings


class _Loaded(Exception):
    """Ends an engine that has loaded its model."""


@pytest.mark.parametrize(("device", "wanted"), [("cuda:0", 1), ("cpu", 3)])
def test_an_engine_with_a_gpu_has_one_thread_once_its_model_is_loaded(
    device: str, wanted: int
) -> None:
    before, found = torch.get_num_threads(), list[int]()

    def load(*_: Any) -> mock.Mock:
        found.append(torch.get_num_threads())
        return mock.Mock()

    def step(*_: Any) -> None:
        found.append(torch.get_num_threads())
        raise _Loaded

    torch.set_num_threads(3)
    try:
        with (
            mock.patch.object(engine_main, "create_runner", load),
            mock.patch.object(engine_main, "measured_cost", step),
            mock.patch.object(engine_main, "runner_options"),
            pytest.raises(_Loaded),
        ):
            engine_main._serve(mock.Mock(), DecoderSettings.model_construct(), device, ALONE, None)
    finally:
        torch.set_num_threads(before)
    assert found == [3, wanted]


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("given", [None, "active"])
def test_waiting_threads_block_on_a_machine_with_a_gpu(
    given: str | None, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    with mock.patch.object(Path, "exists", return_value=has_gpu):
        importlib.reload(passive_threads)
    assert os.environ.get("OMP_WAIT_POLICY") == (given or ("passive" if has_gpu else None))


@pytest.mark.parametrize(
    "name", ["decoder/engine_main", "decoder/ranks/main", "encoder/engine_main"]
)
def test_engines_choose_how_threads_wait_before_they_import_torch(name: str) -> None:
    source = Path(engine_main.__file__).parents[1] / f"{name}.py"
    imports = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.Import)]
    names = [each.name for node in imports for each in node.names]
    assert names[0] == passive_threads.__name__ and "torch" not in names[:2]
