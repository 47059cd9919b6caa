"""Compiles flashinfer's bfloat16 kernels that the decoder uses, into its package.

`--arch native` compiles for the cards of this machine, `--arch 8.9,9.0a` for those named. Without
this flashinfer compiles them at the first start, which needs CUDA's compiler where the services
run, and minutes. No GPU is needed for a list, but a C++ compiler, and CUDA's: from pip (the extra
`kernels`), which is taken where it is installed, or from where flashinfer finds it.
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

_HEAD_DIM = 128  # of Qwen3-VL's language models


def pip_toolkit(into: Path) -> Path | None:
    """CUDA's compiler from pip in the layout of an installed toolkit; None: it is not there."""
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
    # The driver's library is there where a GPU is: an empty one of its name will do for linking.
    empty = into / "empty.c"
    empty.touch()
    stub = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(libraries / "libcuda.so"), str(empty)]
    subprocess.run(["cc", *stub], check=True)
    return into


def architectures(text: str, native: Callable[[], str]) -> list[str]:
    """The architectures of `--arch`: a list with commas or blanks, or `native`.

    From Hopper on, the kernels use what one architecture alone has, whose name ends in `a`.

    Args:
        text: as given.
        native: what nvidia-smi says of the cards here, such as `9.0` in a line each.

    Raises:
        SystemExit: a name is none, or no card is found.
    """
    is_native = text.strip() == "native"
    found = (native() if is_native else text).replace(",", " ").split()
    if not found:
        raise SystemExit("--arch native: nvidia-smi finds no card here; name one, such as 9.0a")
    names: list[str] = []
    for name in found:
        if not re.fullmatch(r"\d+\.\d[a-f]?", name):
            raise SystemExit(f"--arch: {name} is no architecture; 8.0, 8.9, 9.0a and 10.0a are")
        is_plain = name[-1].isdigit()
        names.append(f"{name}a" if is_plain and int(name.partition(".")[0]) >= 9 else name)
    return sorted(set(names), key=lambda name: float(name.rstrip("abcdef")))


def native_architectures() -> str:
    """Compute capabilities of the cards of this machine, a line each; empty: there is none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def compile_all(names: list[str]) -> None:
    """Compiles what is not there yet; flashinfer reads its settings when it is imported."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(names)  # noqa: TID251 - of flashinfer
    import torch

    if torch.version.cuda is None:
        raise SystemExit("torch is built for the CPU here: install its build for CUDA first")
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


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", required=True, help="native, or a list such as 8.9,9.0a")
    names = architectures(parser.parse_args().arch, native_architectures)
    print(f"for {', '.join(names)}", flush=True)
    # ninja may lie beside this Python, in an environment that is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # noqa: TID251
    with tempfile.TemporaryDirectory(prefix="triptych-cuda-") as directory:
        home = pip_toolkit(Path(directory))
        if home is not None:
            os.environ["CUDA_HOME"] = str(home)  # noqa: TID251 - a setting of flashinfer's
        compile_all(names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
