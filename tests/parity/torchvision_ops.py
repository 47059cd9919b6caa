"""Makes torchvision importable beside a torch it was not built for. Import before transformers.

The transforms that image processors use are pure torch; only two operators, which are never
called, have to be declared.
"""

import contextlib
import importlib
import sys

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

try:
    importlib.import_module("torchvision")
except RuntimeError:
    for _name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[_name]
    for _operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared before
            LIBRARY.define(f"{_operator}(Tensor dets, Tensor scores, float t) -> Tensor")
    importlib.import_module("torchvision")
