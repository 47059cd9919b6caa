"""Wrong turns, each refused before a process starts, with one line that says what to do."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.common.families import read_spec
from services.common.model_spec import ModelSpec
from tests.cases import first
from tests.noise import least
from tests.tiny_tokenizer import write_model_directory, write_text_model_directory
from triptych import checks, cli
from triptych.checkpoint import Checkpoint, read_checkpoint
from triptych.devices import Card, Placement, count_gpus, visible_cards
from triptych.fit import GIB, decoder_need, text_parameters, tower_parameters
from triptych.options import DEMONSTRATION_MODEL, ServeOptions
from triptych.stack import StackError

# In which the plan can know; the interpreter's start is part of it.
BOUND_S = 1.5  # of CPU, on a busy machine; with torch imported it is more


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A text checkpoint whose files are whole."""
    directory = write_text_model_directory(tmp_path / "model")
    save_file({"model.norm.weight": torch.ones(32)}, directory / "model.safetensors")
    return directory


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def adapter(directory: Path) -> None:
    """As PEFT saves one."""
    (directory / "config.json").rename(directory / "adapter_config.json")
    adapter_beside(directory)


def adapter_beside(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")


def only_gguf(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-Q4.gguf")


def half_a_download(directory: Path) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors").rename(directory / shards["a"])
    index = json.dumps({"weight_map": shards})
    (directory / "model.safetensors.index.json").write_text(index)


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def headed(head: str) -> Callable[[Path], object]:
    data = head.encode()
    data = len(data).to_bytes(8, "little") + data
    return lambda directory: (directory / "model.safetensors").write_bytes(data)


def sized(shape: str, offsets: str) -> Callable[[Path], object]:
    return headed(f'{{"norm": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}')


def unknown(directory: Path) -> None:
    (directory / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')


def cpu_seconds() -> float:
    """Of all children so far: what a turn takes that waits for nothing, whatever else the machine
    does.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


TURNS = {
    "no directory": (
        "serve {model}/none", None, "no model at {model}/none: there is no such directory"
    ),
    "no name of a directory": (
        f"serve {{model}}/{'x' * 300}", None, f"no model at {{model}}/{'x' * 300}: "
    ),
    "no organisation": (
        "serve Qwen3-VL-8B", None,
        "there is no directory Qwen3-VL-8B here, and the name of a model on the hub begins with",
    ),
    "URL": (
        "serve https://huggingface.co/Qwen/Qwen3-VL-8B/tree/main", None,
        "models on the hub are served by their names: triptych serve Qwen/Qwen3-VL-8B",
    ),
    "GGUF by name": ("serve org/model-Q4.gguf", None, "org/model-Q4.gguf is a GGUF file, which is"),
    "file": ("serve {model}/config.json", None, "{model}/config.json is a file: give the"),
    "ranks": (
        "serve {model} --tensor-parallel 3", None,
        "the model's 2 attention heads cannot be divided among 3 GPUs; possible: 1",
    ),
    "adapter": ("serve {model}", adapter, "no model at {model}: it is an adapter: serve its model"),
    "adapter beside": (
        "serve {model}",
        adapter_beside,
        "adapter_model.safetensors has a format that is not supported",
    ),
    "no weights": ("serve {model}", remove("model.safetensors"), "no weights at {model}: "),
    "GGUF": ("serve {model}", only_gguf, "model-Q4.gguf has a format that is not supported"),
    "half a download": (
        "serve {model}", half_a_download,
        "weights are missing at {model}: model-00002-of-00002.safetensors of 2 files",
    ),
    "cut": ("serve {model}", cut, "model.safetensors is not a complete safetensors file"),
    "no dtype": (
        "serve {model}", headed('{"model.norm.weight": {"shape": [0], "data_offsets": [0, 0]}}'),
        "model.safetensors is not a complete safetensors file",
    ),
    "offsets": ("serve {model}", sized("[32]", "[0, 1e999]"), "is not a complete safetensors file"),
    "shape": (
        "serve {model}", sized(f"[1{'0' * 999}]", "[0, 4]"), "is not a complete safetensors file"
    ),
    "nested head": ("serve {model}", headed("[" * 200_000), "is not a complete safetensors file"),
    "LFS": ("serve {model}", pointer, "is a pointer of Git LFS: run `git lfs pull` there"),
    "no tokenizer": ("serve {model}", remove("tokenizer.json"), "it has no tokenizer.json"),
    "no template": ("serve {model}", remove("chat_template.jinja"), "no chat template at {model}"),
    "architecture": ("serve {model}", unknown, "architecture GPT2LMHeadModel is not supported"),
    "no GPU": ("serve {model} --device cuda", None, "cuda was requested, but there is no GPU here"),
    "device": ("serve {model} --device gpu", None, "gpu is not auto, cpu, cuda or cuda:N"),
    "port": ("serve {model} --port 99999", None, "99999 is not a whole number from 0 to 65,535"),
    "option": (
        "serve {model} --pipeline-parallel-size 2", None,
        "--pipeline-parallel-size: use --tensor-parallel N to divide a model among N cards",
    ),
    "encoder": ("serve {model} --encoders 1", None, "is a text model"),
    "open": ("serve {model} --host 0.0.0.0 --port 0", None, "give --api-key KEY"),
    "context": (
        "serve {model} --port 0 --max-model-len 4097", None,
        "max_model_len 4097 is over the model's limit of 4096 tokens",
    ),
    "variable": (
        "serve {model} --port 0", {"DECODER_MAX_MODELLEN": "9"},
        "unknown variable DECODER_MAX_MODELLEN; did you mean DECODER_MAX_MODEL_LEN?",
    ),
    "value": (
        "serve {model} --port 0", {"DECODER_STEP_MS": "soon"}, "DECODER_STEP_MS: Input should be",
    ),
    "exported device": (
        "serve {model} --port 0", {"DECODER_DEVICE": "cuda:x", "CUDA_VISIBLE_DEVICES": "0"},
        "DECODER_DEVICE: 'cuda:x' is not auto, cpu, cuda or cuda:N",
    ),
    "exported dtype": (
        "serve {model} --port 0", {"DECODER_DTYPE": "fp16"}, "DECODER_DTYPE: Input should be",
    ),
    "exported ranks": (
        "serve {model} --port 0", {"DECODER_TENSOR_PARALLEL": "0"},
        "DECODER_TENSOR_PARALLEL: Input should be",
    ),
    "length": ("serve {model} --port 0 --max-model-len 1", None, "1 is not a whole number from 2"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("turn", first(17, sorted(TURNS)))
def test_a_wrong_turn_is_one_line_and_soon(model: Path, turn: str) -> None:
    words, spoil, said = TURNS[turn]
    if callable(spoil):
        spoil(model)
    command = [sys.executable, "-m", "triptych", *words.format(model=model).split()]
    exported = spoil if isinstance(spoil, dict) else {}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **exported}

    def seconds() -> float:
        before = cpu_seconds()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        taken = cpu_seconds() - before
        (line,) = [x for x in done.stderr.splitlines() if "no encoder and no Redis" not in x]
        print(f"{turn}: {taken:.2f} s of CPU: {line}")
        assert said.format(model=model) in line
        assert (done.returncode, done.stdout) == (2, "")
        return taken

    assert least(seconds, BOUND_S) < BOUND_S


def test_the_version_is_there_at_once() -> None:
    code = "import sys; from triptych.cli import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "grpc", "pydantic", "numpy", "rich", "services"} & set(loaded)

    def seconds() -> float:
        before = cpu_seconds()
        done = subprocess.run([sys.executable, "-m", "triptych", "--version"], capture_output=True)
        assert done.stdout.startswith(b"triptych ")
        return cpu_seconds() - before

    assert least(seconds, 0.6) < 0.6


# --- cards ------------------------------------------------------------------------------------

SMI = """#!/bin/sh
echo "0, GPU-aaaa, NVIDIA L40S, 46068, 0"
echo "1, GPU-bbbb, NVIDIA H200, 143771, 90000"
"""


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """An environment whose nvidia-smi knows two cards."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/bin:/usr/bin"}


def test_cards_are_named_as_torch_names_them(driver: dict[str, str]) -> None:
    cards = visible_cards(driver)
    assert {name: card.name for name, card in cards.items()} == {
        "cuda:0": "NVIDIA L40S", "cuda:1": "NVIDIA H200"
    }  # fmt: skip
    assert cards["cuda:0"].total_bytes == 46068 << 20
    for visible in ("1", "GPU-bb"):
        only = visible_cards(driver | {"CUDA_VISIBLE_DEVICES": visible})
        assert {name: card.name for name, card in only.items()} == {"cuda:0": "NVIDIA H200"}
    assert visible_cards(driver | {"CUDA_VISIBLE_DEVICES": "MIG-1"}) == {}
    assert visible_cards({"PATH": "/nowhere"}) == {}


def test_linux_on_windows_has_the_cards_that_its_driver_names(
    driver: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "dxg").touch()
    assert count_gpus(driver, tmp_path) == 2
    assert count_gpus({"PATH": "/nowhere"}, tmp_path) == 0


def install_torch(site: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the metadata of a build of torch before those of the installed one."""
    metadata = site / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(site))


def test_a_card_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path, "2.11.0", monkeypatch)
    checks.check_devices(["cuda", "cuda:1", "auto", "cpu"], 2, {})
    with pytest.raises(StackError, match=r"^cuda:2: cuda:0 to cuda:1 are visible"):
        checks.check_devices(["cuda:2"], 2, {})
    with pytest.raises(StackError, match=r"no GPU here \(no /dev/nvidia\*\): check the driver"):
        checks.check_devices(["cuda"], 0, {})


def test_a_torch_that_cannot_use_the_card_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(tmp_path, "2.11.0+cpu", monkeypatch)
    checks.check_devices(["auto"], 0, {})
    checks.check_devices(["cpu"], 1, {})
    for device in ("auto", "cuda", "cuda:0"):
        with pytest.raises(StackError, match="is built for CPUs: install its build for CUDA"):
            checks.check_devices([device], 1, {})


# --- memory -----------------------------------------------------------------------------------


def large(tmp_path: Path) -> tuple[ModelSpec, Checkpoint]:
    """Sizes of Qwen3-8B: 8.2 B parameters in bf16, 144 KiB of KV cache a token."""
    directory = write_text_model_directory(tmp_path / "Qwen3-8B")
    config = json.loads((directory / "config.json").read_text()) | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(read_spec(DEMONSTRATION_MODEL))
    checkpoint.text.floats, checkpoint.text.fixed_bytes = 8_190_735_360, 0
    return read_spec(directory), checkpoint


def refusal(
    tmp_path: Path, card: Card, tokens: int | None = None, share: float = 0.9, dtype: str = "auto",
    *, fp8_cache: bool = False,
) -> str:  # fmt: skip
    spec, checkpoint = large(tmp_path)
    try:
        checks.Memory(
            spec=spec, checkpoint=checkpoint, cards={"cuda:0": card}, dtype=dtype,
            max_model_len=tokens, fp8_cache=fp8_cache,
        ).check([], [Placement("cuda:0", share, 0)])  # fmt: skip
    except StackError as error:
        assert error.status == 2 and "\n" not in str(error)
        return str(error)
    return ""


def test_what_fits_is_served(tmp_path: Path) -> None:
    for size in (24, 48, 80):
        assert refusal(tmp_path, Card("a card", size * GIB, 0)) == ""


def test_a_context_that_does_not_fit_comes_with_one_that_does(tmp_path: Path) -> None:
    said = refusal(tmp_path, Card("NVIDIA RTX 4090", 24 * GIB, 0), tokens=40960)
    assert said.startswith(
        "Qwen3-8B does not fit cuda:0 (NVIDIA RTX 4090, 24.0 GiB), of which a decoder may use "
        "21.6 GiB: weights take 15.3 GiB, a request of 40,960 tokens 5.6 GiB; what fits: "
        "--max-model-len "
    )
    advice, _, other = said.partition("; or ")
    assert other == "--kv-cache-dtype fp8"
    card = Card("NVIDIA RTX 4090", 24 * GIB, 0)
    assert refusal(tmp_path, card, tokens=40960, fp8_cache=True) == ""
    assert "--kv-cache-dtype" not in refusal(tmp_path, card, tokens=2 * 40960, fp8_cache=True)
    tokens = int(advice.rsplit(" ", 1)[1])
    assert 20_000 < tokens < 40_960
    assert refusal(tmp_path, Card("NVIDIA RTX 4090", 24 * GIB, 0), tokens=tokens) == ""


def test_weights_that_do_not_fit_come_with_a_precision_that_does(tmp_path: Path) -> None:
    said = refusal(tmp_path, Card("NVIDIA RTX 4080", 16 * GIB, 0))
    assert "weights take 15.3 GiB; what fits: its FP8 checkpoint (about 8.1 GiB), with a KV" in said
    said = refusal(tmp_path, Card("a card", 32 * GIB, 0), dtype="float32")
    assert "what fits: --dtype bfloat16, with a KV cache" in said


@pytest.mark.parametrize("tokens", [None, 40960])
def test_a_card_that_is_said_to_do_does(tmp_path: Path, tokens: int | None) -> None:
    said = refusal(tmp_path, Card("a card", 8 * GIB, 0), tokens, share=0.75)
    enough = re.search(r"a card with ([\d.]+) GiB or more is needed, or a smaller model$", said)
    assert enough is not None
    size = int((float(enough[1]) + 0.1) * GIB)
    assert refusal(tmp_path, Card("a card", size, 0), tokens, share=0.75) == ""


def test_a_model_too_large_for_one_card_fits_two(tmp_path: Path) -> None:
    spec, checkpoint = large(tmp_path)
    cards = {f"cuda:{number}": Card("a card", 14 * GIB, 0) for number in range(2)}

    def check(ranks: int) -> None:
        checks.Memory(
            spec=spec, checkpoint=checkpoint, cards=cards, dtype="auto", max_model_len=8192
        ).check([], [Placement("cuda:0", 0.9, 0, ranks)])

    with pytest.raises(StackError, match=r"; or --tensor-parallel 2$"):
        check(1)
    check(2)
    cards["cuda:1"] = Card("a small card", 8 * GIB, 0)
    with pytest.raises(StackError, match="a small card"):
        check(2)


def test_a_decoder_that_fits_a_whole_card_alone_is_told_so(tmp_path: Path) -> None:
    spec, checkpoint = large(tmp_path)
    for size, fits in ((24, True), (20, False), (16, False)):
        cards = {"cuda:0": Card("a card", size * GIB, 0)}
        memory = checks.Memory(spec=spec, checkpoint=checkpoint, cards=cards, dtype="auto")
        assert memory.fits_beside(0.9) == fits
        beside = [Placement("cuda:0", 0.15, 0)], [Placement("cuda:0", 0.75, 0)]
        try:
            memory.check(*beside)
            said = ""
        except StackError as error:
            said = str(error)
        assert bool(said) != fits
        assert ("--layout split:E+D" in said) == (size == 20)


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_serve_asks_the_cards_before_it_starts_anything(
    tmp_path: Path, driver: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], device: str,
) -> None:  # fmt: skip
    spec, _ = large(tmp_path)
    install_torch(tmp_path / "site", "2.11.0", monkeypatch)
    monkeypatch.setenv("PATH", driver["PATH"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["serve", str(spec.directory), "--load-format", "dummy", "--port", "0"]
    more = ["--device", device, "--dtype", "float32", "--gpu-memory-utilization", "0.6"]
    assert cli.main([*words, *more]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "does not fit cuda:0 (NVIDIA L40S, 45.0 GiB), of which a decoder may use 27.0" in said
    assert "weights take 30.5 GiB; what fits: --dtype bfloat16, with a KV cache" in said


def test_a_card_that_others_fill_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, Card("NVIDIA H100", 80 * GIB, 70 * GIB))
    assert "other processes hold 70.0 GiB of its 80.0 GiB: nvidia-smi names them" in said


def test_a_machine_without_the_memory_is_told(tmp_path: Path) -> None:
    spec, checkpoint = large(tmp_path)
    cpu = [Placement("cpu", 1.0, 4)]

    def check(dtype: str) -> None:
        checks.Memory(
            spec=spec, checkpoint=checkpoint, cards={}, dtype=dtype, free_bytes=20 * GIB
        ).check([], cpu)

    check("bfloat16")
    with pytest.raises(StackError, match=r"take 30\.5 GiB on CPUs, and 20\.0 GiB .* bfloat16"):
        check("auto")


@pytest.mark.parametrize(("dtype", "taken"), [("auto", "20.5"), ("float32", "41.0")])
def test_a_towers_own_dtype_counts(tmp_path: Path, dtype: str, taken: str) -> None:
    spec, checkpoint = large(tmp_path)
    checkpoint.vision.floats = 11_000_000_000
    memory = checks.Memory(
        spec=spec, checkpoint=checkpoint, cards={"cuda:0": Card("a card", 16 * GIB, 0)},
        dtype="bfloat16", tower_dtype=dtype,
    )  # fmt: skip
    with pytest.raises(StackError, match=f"needs {taken} GiB of cuda:0"):
        memory.check([Placement("cuda:0", 0.9, 0)], [])


@pytest.mark.parametrize(
    ("option", "exported", "expected"),
    [(None, {"DECODER_DTYPE": "float16", "ENCODER_DTYPE": "float32"}, ("float16", "float32")),
     ("bfloat16", {"ENCODER_DTYPE": "float32"}, ("bfloat16", "bfloat16")),
     (None, {"ENCODER_DTYPE": "float32"}, ("auto", "float32"))],
)  # fmt: skip
def test_each_stage_is_checked_with_its_dtype(
    option: str | None, exported: dict[str, str], expected: tuple[str, str]
) -> None:
    spec = read_spec(DEMONSTRATION_MODEL)
    options = ServeOptions(dtype=option)
    found = checks.Memory.requested(options, exported, spec, read_checkpoint(spec), {})
    assert (found.dtype, found.tower_dtype) == expected


def test_sizes_are_those_of_the_files() -> None:
    spec = read_spec(DEMONSTRATION_MODEL)
    found = read_checkpoint(spec)
    assert spec.vision is not None
    assert sum(text_parameters(spec.text)) == pytest.approx(found.text.parameters, rel=0.01)
    assert tower_parameters(spec.vision.tower) == pytest.approx(found.vision.parameters, rel=0.05)
    assert found.text.bytes_in(2) == 2 * found.text.parameters
    assert found.text.bytes_in(4) == 4 * found.text.parameters


def test_scales_and_quantized_weights_keep_their_size(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "fp8")
    tensors = {
        "model.language_model.a.weight": torch.zeros(128, 128, dtype=torch.float8_e4m3fn),
        "model.language_model.a.weight_scale_inv": torch.ones(1, 1),
        "model.language_model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
        "model.visual.b.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    save_file(tensors, directory / "model.safetensors")
    found = read_checkpoint(read_spec(directory))
    assert found.text.bytes_in(4) == 128 * 128 + 4 + 8 * 4
    assert (found.text.parameters, found.vision.parameters) == (128 * 128 + 8, 4)


def test_packed_weights_are_counted_one_by_one(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "packed")
    path = directory / "config.json"
    quantization = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantization))
    tensors = {
        "model.language_model.a.qweight": torch.zeros(128 // 8, 64, dtype=torch.int32),
        "model.language_model.a.qzeros": torch.zeros(2, 64 // 8, dtype=torch.int32),
        "model.language_model.a.scales": torch.ones(2, 64, dtype=torch.float16),
        "model.language_model.a.g_idx": torch.zeros(128, dtype=torch.int32),
        "model.language_model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
    }
    save_file(tensors, directory / "model.safetensors")
    found = read_checkpoint(read_spec(directory)).text
    assert found.parameters == 128 * 64 + 8
    assert found.stored == {"W4A16": 128 * 64, "BF16": 8}
    assert found.bytes_in(2) == 128 * 64 // 2 + 2 * 8 * 4 + 2 * 64 * 2 + 128 * 4 + 2 * 8


def test_recurrent_states_are_part_of_the_need(tmp_path: Path) -> None:
    spec, _ = large(tmp_path)
    assert decoder_need(spec.text, 0, 2, 256).token == 2 * 8 * 128 * 2 * 36
    from services.common.model_spec import LinearAttentionSpec

    linear = LinearAttentionSpec(
        num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, conv_width=4
    )
    kinds = ("linear_attention", "full_attention") * 18
    text = replace(spec.text, linear_attention=linear, layer_kinds=kinds)
    need = decoder_need(text, 0, 2, 15)
    assert need.token == 2 * 8 * 128 * 2 * 18
    assert need.states == 16 * 18 * (4 * 8192 * 2 + 4 * 4096 * 128)
