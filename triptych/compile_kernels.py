"""Compiles flashinfer's kernels that the decoder uses, into its package: `triptych compile`.

`--arch native` compiles for the GPUs of this machine, `--arch 8.9,9.0a` for named architectures.
Without this command, flashinfer compiles the kernels at the first start, which takes minutes and
needs CUDA's compiler where the services run. A list of architectures needs no GPU, but a C++
compiler and CUDA's: the one from pip (the extra `kernels`) if it is installed, or else the one that
flashinfer finds. Images run this file alone, before the rest of the project is there.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_COMMAND = "triptych compile"
_HEAD_DIM = 128  # head size of Qwen3-VL's language models


def pip_toolkit(into: Path) -> Path | None:
    """Arranges CUDA's compiler from pip in the layout of an installed toolkit.

    Returns:
        The toolkit's directory. None if pip has not installed the compiler.
    """
    package = importlib.util.find_spec("nvidia")
    places = package.submodule_search_locations if package else None
    roots = [Path(place) / "cu13" for place in places or ()]
    found = next((root for root in roots if (root / "bin" / "nvcc").exists()), None)
    if found is None:
        return None
    for name in ("bin", "include", "nvvm"):
        (into / name).symlink_to(found / name)
    # The linker looks for names without a version, which the packages lack.
    libraries = into / "lib64"
    libraries.mkdir()
    for path in (found / "lib").glob("*.so.*"):
        (libraries / path.name).symlink_to(path)
        (libraries / f"{path.name.partition('.so.')[0]}.so").symlink_to(path)
    # Only machines with a GPU have the driver's library. An empty one is enough for linking.
    empty = into / "empty.c"
    empty.touch()
    stub = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(libraries / "libcuda.so"), str(empty)]
    subprocess.run(["cc", *stub], check=True)
    return into


def architectures(text: str, native: Callable[[], str]) -> list[str]:
    """Reads the value of `--arch`: `native`, or names with commas or blanks between them.

    From Hopper on, the kernels use instructions that only one architecture has. The name of such an
    architecture ends in `a`.

    Args:
        text: value of the option.
        native: returns the compute capabilities of the machine's GPUs, such as `9.0`, a line each.

    Raises:
        SystemExit: a name is not an architecture, or the machine has no GPU.
    """
    is_native = text.strip() == "native"
    found = (native() if is_native else text).replace(",", " ").split()
    if not found:
        raise SystemExit(
            f"{_COMMAND}: --arch native: nvidia-smi finds no GPU here; name an architecture, such "
            "as --arch 9.0a"
        )
    names: list[str] = []
    for name in found:
        if not re.fullmatch(r"\d+\.\d[a-f]?", name):
            raise SystemExit(
                f"{_COMMAND}: --arch: {name} is not an architecture, such as 8.9, 9.0a or 10.0a"
            )
        is_plain = name[-1].isdigit()
        names.append(f"{name}a" if is_plain and int(name.partition(".")[0]) >= 9 else name)
    return sorted(set(names), key=lambda name: float(name.rstrip("abcdef")))


def native_architectures() -> str:
    """Returns the compute capabilities of the machine's GPUs, a line each. Empty without a GPU."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def compile_all(names: list[str]) -> None:
    """Compiles the kernels that are not there yet, for some architectures.

    flashinfer reads its settings from the environment when it is imported.
    """
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(names)
    import torch

    if torch.version.cuda is None:
        raise SystemExit(f"{_COMMAND}: torch is built for CPUs here: install its build for CUDA")
    from flashinfer.jit import (  # pyright: ignore[reportMissingImports]
        env,
        gen_batch_decode_module,
        gen_batch_prefill_module,
    )

    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    has_hopper = any(name.startswith("9.") for name in names)
    backends = ("fa3", "fa2") if has_hopper else ("fa2",)
    size = _HEAD_DIM
    specs = [gen_batch_decode_module(*types, size, size, 0, False, False)] + [
        gen_batch_prefill_module(backend, *types, size, size, 0, False, False, False)
        for backend in backends
    ]
    for number, spec in enumerate(specs, 1):
        target = env.FLASHINFER_AOT_DIR / spec.name / f"{spec.name}.so"
        print(f"[{number}/{len(specs)}] {spec.name}", flush=True)
        if target.exists():
            continue
        start = time.monotonic()
        spec.build(verbose=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, target)
        print(f"    {time.monotonic() - start:.0f} s", flush=True)


def compile_for(arch: str) -> int:
    """Compiles the kernels for the value of `--arch` and returns the exit status."""
    names = architectures(arch, native_architectures)
    print(f"for {', '.join(names)}", flush=True)
    # ninja may lie beside this Python, in an environment that is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="triptych-cuda-") as directory:
        home = pip_toolkit(Path(directory))
        if home is not None:
            os.environ["CUDA_HOME"] = str(home)
        compile_all(names)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default="native", help="native, or a list such as 8.9,9.0a")
    sys.exit(compile_for(parser.parse_args().arch))
