"""Runs the named `interpreted_*.py` in turn, with TRITON_INTERPRET=1, which Triton reads when it is
imported. Each begins with the same random numbers.
"""

import runpy
import sys

import torch

for name in sys.argv[1:]:
    torch.manual_seed(0)
    runpy.run_module(f"tests.unit.kernels.interpreted_{name}", run_name="__main__")
