"""Loading: right values, errors that name tensors, bounded memory."""

import json
import logging
import os
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from services.common.checkpoint_fingerprint import checkpoint_fingerprint
from services.common.model_spec import ModelSpecError
from services.common.nn.checkpoint import Checkpoint, CheckpointError, fingerprint
from services.common.nn.dummy_weights import load_dummy
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.common.nn.weight_map import WeightMap
from services.common.nn.weights import load_weights
from tests.cases import first


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8, 1e-6)
        self.qkv = Linear(8, {"q": 6, "k": 2, "v": 2}, bias=True)
        self.out = Linear(6, 8)
        self.register_buffer("table", None, persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        self.table = torch.arange(3, dtype=torch.float32, device=device) / 3


class Model(nn.Module):
    weight_map = WeightMap(
        prefixes={"": "model.", "head.": "head."},
        shapes={"patch.weight": (4, 2, 3)},
        ignored=frozenset({"model.unused"}),
    )

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.patch = Linear(6, 4)
        self.head = Linear(8, 5)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {"model.patch.weight": torch.randn(4, 2, 3), "head.weight": torch.randn(5, 8)}
    for n in range(2):
        head = f"model.layers.{n}."
        made[head + "norm.weight"] = torch.randn(8)
        made[head + "out.weight"] = torch.randn(8, 6)
        for part, rows in {"q": 6, "k": 2, "v": 2}.items():
            made[f"{head}{part}.weight"] = torch.randn(rows, 8)
            made[f"{head}{part}.bias"] = torch.randn(rows)
    return made | {"model.unused": torch.zeros(1), "other.weight": torch.zeros(1)}


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Model:
    with torch.device("meta"):
        model = Model()
    load_weights(model, Checkpoint.open(directory), model.weight_map, device="cpu", dtype=dtype)
    return model


def save(directory: Path, made: dict[str, torch.Tensor]) -> None:
    save_file(made, directory / "model.safetensors")


def check(model: Model, made: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for n, layer in enumerate(model.layers):
        head = f"model.layers.{n}."
        for kind in ("weight", "bias"):
            fused = torch.cat([made[f"{head}{part}.{kind}"] for part in "qkv"]).to(dtype)
            assert torch.equal(getattr(layer.qkv, kind), fused)
        assert torch.equal(layer.out.weight, made[head + "out.weight"].to(dtype))
    assert torch.equal(model.patch.weight, made["model.patch.weight"].reshape(4, 6).to(dtype))
    assert torch.equal(model.head.weight, made["head.weight"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_and_reshaped_tensors_have_their_values(tmp_path: Path, dtype: torch.dtype) -> None:
    made = tensors()
    save(tmp_path, made)
    check(load(tmp_path, dtype), made, dtype)


def test_each_tensor_is_cast_from_its_own_dtype(tmp_path: Path) -> None:
    made = tensors()
    made["model.layers.0.k.weight"] = made["model.layers.0.k.weight"].bfloat16()
    made["head.weight"] = made["head.weight"].half()
    save(tmp_path, made)
    check(load(tmp_path), made, torch.float32)


def test_buffers_stay_float32(tmp_path: Path) -> None:
    save(tmp_path, tensors())
    layer = load(tmp_path, torch.bfloat16).layers[0]
    assert layer.table.dtype == torch.float32 and layer.table[1] == torch.tensor(1 / 3)


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    made = tensors()
    write_shards(tmp_path, made)
    check(load(tmp_path), made, torch.float32)


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (1, 8, 1)])
def test_axes_of_one_element_are_no_difference(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = tensors()
    name = "model.layers.0.norm.weight"
    save(tmp_path, made | {name: made[name].view(shape)})
    assert torch.equal(load(tmp_path).layers[0].norm.weight, made[name])
    save(tmp_path, made | {name: torch.zeros(8, 0)})
    with pytest.raises(CheckpointError, match=r"norm\.weight is \[8, 0\], the model wants \[8\]"):
        load(tmp_path)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    made = tensors()
    del made["model.layers.1.v.bias"], made["head.weight"]
    made["model.layers.0.surplus"] = torch.zeros(1)
    made["model.layers.0.out.weight"] = torch.zeros(6, 8)
    save(tmp_path, made)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "missing tensors: head.weight, model.layers.1.v.bias" in message
    assert "unexpected tensors: model.layers.0.surplus" in message
    assert "model.layers.0.out.weight is [6, 8], the model wants [8, 6]" in message
    assert "other.weight" not in message and "unused" not in message


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint16])
def test_a_dtype_that_no_tensor_of_ours_has_matters_where_it_is_read(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    made, odd = tensors(), torch.ones(5, 8).to(dtype)
    save(tmp_path, made | {"model.unused": odd, "other.weight": odd.clone()})
    check(load(tmp_path), made, torch.float32)
    save(tmp_path, made | {"head.weight": odd})
    kind = {torch.uint16: "U16"}.get(dtype, "F8_E8M0")
    with pytest.raises(CheckpointError, match=rf"head\.weight is {kind}, the model wants float32"):
        load(tmp_path)


def test_long_lists_of_names_are_capped(tmp_path: Path) -> None:
    save(tmp_path, tensors() | {f"model.x{n:03}": torch.zeros(1) for n in range(100)})
    with pytest.raises(CheckpointError, match=r"model\.x019 and 80 more"):
        load(tmp_path)


BAD_HEADERS: dict[str, dict] = {
    "negative shape": {"shape": [-5, -8]},
    "boolean shape": {"shape": [True, 40]},
    "float shape": {"shape": [5.0, 8]},
    "huge shape": {"shape": [2**63, 2]},
    "huger shape": {"shape": [2**80, 2]},
    "no list": {"shape": "5, 8"},
    "negative offset": {"data_offsets": [-160, 0]},
    "offsets turned": {"data_offsets": [160, 0]},
    "offset beyond the end": {"data_offsets": [0, 2**40]},
    "overlap": {"data_offsets": [4, 164]},
    "no dtype": {"dtype": None},
    "unknown dtype": {"dtype": "Q4"},
}


def header(path: Path, changes: dict) -> None:
    """Changes what the file says of its first tensor."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    first = min(entries, key=lambda name: entries[name]["data_offsets"])
    entries[first] |= changes
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda path: path.write_bytes(b"short"),
        lambda path: path.write_bytes(b"\xff" * 64),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        *(partial(header, changes=changes) for changes in BAD_HEADERS.values()),
        lambda path: path.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
        lambda path: path.write_bytes(struct.pack("<Q", 5 * 10**5) + b'{"a":' * 10**5),
    ],
    ids=["short", "garbage", "truncated", *BAD_HEADERS, "deep list", "deep object"],
)
def test_a_corrupt_file_is_an_error_that_names_it(tmp_path: Path, corrupt) -> None:
    save(tmp_path, tensors())
    corrupt(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint_fingerprint(tmp_path)  # a gateway's: not known, or another one, but no failure
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def write_shards(directory: Path, made: dict[str, torch.Tensor]) -> None:
    index, names = {}, sorted(made)
    for n, part in enumerate((names[::2], names[1::2])):
        save_file({name: made[name] for name in part}, directory / f"m-{n}.safetensors")
        index |= dict.fromkeys(part, f"m-{n}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("with_shards", [True, False])
def test_a_whole_file_wins_over_an_index(
    tmp_path: Path, with_shards: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = tensors()
    write_shards(tmp_path, {name: tensor + 1 for name, tensor in made.items()})
    if not with_shards:
        for n in range(2):
            (tmp_path / f"m-{n}.safetensors").unlink()
    save(tmp_path, made)
    with caplog.at_level(logging.WARNING):
        check(load(tmp_path), made, torch.float32)
    assert "read from model.safetensors; not used: " in caplog.text
    assert "model.safetensors.index.json" in caplog.text
    assert ("m-1.safetensors" in caplog.text) == with_shards


def test_a_file_that_the_index_does_not_name_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tensors()
    write_shards(tmp_path, made)
    save_file({"model.more": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        check(load(tmp_path), made, torch.float32)
    assert "not used: consolidated.safetensors" in caplog.text


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"no weights at .*: it has no model\.safetensors and"):
        load(tmp_path)
    write_shards(tmp_path, tensors())
    (tmp_path / "m-1.safetensors").unlink()
    with pytest.raises(ModelSpecError, match=r"missing at .*: m-1\.safetensors of 2 files"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": 1}', "[" * 10**5, '{"weight_map":{"a":1}}']
)
def test_a_malformed_index_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelSpecError, match=r"index\.json is no"):
        load(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelSpecError, match=r"missing at .*: passwd"):
        Checkpoint.open(tmp_path)


def test_fingerprint_depends_on_every_byte_and_name_under_the_prefix(tmp_path: Path) -> None:
    made = tensors()

    def of(changed: dict[str, torch.Tensor]) -> str:
        save(tmp_path, changed)
        return fingerprint(Checkpoint.open(tmp_path), "model.")

    base = of(made)
    assert of(dict(reversed(made.items()))) == base
    assert of(made | {"other.weight": torch.ones(1)}) == base
    value = made["model.layers.0.q.weight"].clone()
    value.view(torch.int32)[3, 3] ^= 1
    assert of(made | {"model.layers.0.q.weight": value}) != base
    assert of(made | {"model.patch.weight": made["model.patch.weight"].view(4, 3, 2)}) != base
    renamed = made | {"model.z": made["model.layers.0.q.bias"]}
    del renamed["model.layers.0.q.bias"]
    assert of(renamed) != base


def test_dummy_weights_are_reproducible() -> None:
    models = []
    for seed in (3, 3, 4):
        with torch.device("meta"):
            model = Model()
        load_dummy(model, seed, device="cpu", dtype=torch.bfloat16)
        models.append(model)
    first, same, other = (model.layers[0].qkv.weight for model in models)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(models[0].layers[0].norm.weight, torch.ones(8, dtype=torch.bfloat16))
    assert models[0].layers[0].table.dtype == torch.float32


# glibc gives back what was freed; else how much of it stays differs from run to run by 30 MiB.
_EXACT_MEMORY = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}

_MEMORY_PROBE = """
import sys, torch
from torch import nn
from kernels.gemm.fp8_weight import quantize_activations
from services.common.model_spec import QuantizationSpec
from services.common.nn.layer_formats import set_methods
from services.common.nn.linear import Linear
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.weight_map import WeightMap
from services.common.nn.weights import load_weights

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = Linear(1024, {"a": 4096, "b": 4096})

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10

torch.set_num_threads(1)
dtype, fp8 = getattr(torch, sys.argv[2].removeprefix("fp8 ")), None
if sys.argv[2].startswith("fp8 "):
    fp8 = QuantizationSpec(format="fp8_channel", at_load=True)
with torch.device("meta"):
    model = nn.ModuleList([Block() for _ in range(6)])
quantize_activations(torch.ones(1 << 20, 1).to(dtype), 1)  # first casts are not the loader's costs
before = memory("VmRSS")
checkpoint, weight_map = Checkpoint.open(sys.argv[1]), WeightMap({"": ""})
set_methods(model, checkpoint, weight_map, fp8)
load_weights(model, checkpoint, weight_map, device="cpu", dtype=dtype)
peak = memory("VmHWM") - before
for p in model.parameters():
    one = 448.0 if p.dtype == torch.float8_e4m3fn else 1.0 if fp8 is None else 1 / 448
    assert abs(float(p.data[0, 0]) - one) < 1e-6 and abs(float(p.data[-1, -1]) - one) < 1e-6
print(peak, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", first(1, ["bfloat16", "float32"]))
def test_peak_memory_is_the_model_the_mapped_file_and_at_most_two_tensors(
    tmp_path: Path, dtype: str
) -> None:
    largest = torch.ones(4096, 1024)  # 16 MiB, of 192
    save(tmp_path, {f"{n}.{part}.weight": largest.clone() for n in range(6) for part in "ab"})
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROBE, str(tmp_path), dtype],
        capture_output=True, text=True, check=True, env=_EXACT_MEMORY,
    )  # fmt: skip
    peak, size = map(int, done.stdout.split())
    assert size * 0.9 < peak <= size + 12 * largest.nbytes + 2 * largest.nbytes


@pytest.mark.nightly
def test_a_model_that_is_quantized_while_it_is_read_has_no_second_copy(tmp_path: Path) -> None:
    """The model takes a quarter of the mapped file's 192 MiB; on the way are rows of 16 MiB."""
    largest = torch.ones(4096, 1024)
    save(tmp_path, {f"{n}.{part}.weight": largest.clone() for n in range(6) for part in "ab"})
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROBE, str(tmp_path), "fp8 float32"],
        capture_output=True, text=True, check=True, env=_EXACT_MEMORY,
    )  # fmt: skip
    peak, size = map(int, done.stdout.split())
    assert size < 49 << 20
    assert size * 0.9 < peak <= size + 12 * largest.nbytes + 4 * (16 << 20)


def test_loaded_bytes_are_the_files(tmp_path: Path) -> None:
    save(tmp_path, tensors())
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).head.weight, read["head.weight"])


_EXPERTS_PROBE = """
import sys, torch
from torch import nn
from services.common.nn.experts import Experts
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.weight_map import WeightMap
from services.common.nn.weights import load_weights

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10

torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[2])
with torch.device("meta"):
    model = nn.ModuleList([Experts(8, 1024, 512) for _ in range(3)])
torch.ones(1 << 20).view(1024, 1024).mT.to(dtype).contiguous()  # not the loader's costs
before = memory("VmRSS")
load_weights(model, Checkpoint.open(sys.argv[1]), WeightMap({"": ""}), device="cpu", dtype=dtype)
peak = memory("VmHWM") - before
for parameter in model.parameters():
    assert parameter[:, 0, 0].tolist() == parameter[:, -1, -1].tolist() == list(range(8))
print(peak, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "dtype"),
    first(1, [("transposed", "float32"), ("per expert", "float32"), ("fused", "bfloat16")]),
)
def test_peak_memory_of_experts_is_the_model_the_mapped_file_and_one_of_them(
    tmp_path: Path, layout: str, dtype: str
) -> None:
    """H = 2 * I. A fused tensor is 32 MiB, an expert's part of it 4, the model 144 or 72."""
    made = {}
    for n in range(3):
        numbers = torch.arange(8.0)[:, None, None]
        sizes = {"gate_up_proj": (1024, 1024), "down_proj": (1024, 512)}
        for name, (rows, columns) in sizes.items():
            matrix = numbers.expand(-1, rows, columns)
            if layout == "per expert":
                parts = ["down_proj"] if name == "down_proj" else ["gate_proj", "up_proj"]
                for index, expert in enumerate(matrix):
                    of = zip(parts, expert.chunk(len(parts)), strict=True)
                    made |= {f"{n}.{index}.{part}.weight": rows.clone() for part, rows in of}
            else:
                way = matrix.mT if layout == "transposed" else matrix
                made[f"{n}.{name}"] = way.contiguous()
    save(tmp_path, made)
    done = subprocess.run(
        [sys.executable, "-c", _EXPERTS_PROBE, str(tmp_path), dtype],
        capture_output=True, text=True, check=True, env=_EXACT_MEMORY,
    )  # fmt: skip
    peak, size = map(int, done.stdout.split())
    mapped = (tmp_path / "model.safetensors").stat().st_size
    assert size * 0.9 < peak <= size + mapped + (12 << 20)
