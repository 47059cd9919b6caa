"""Triton's interpreter, which looks up the names it replaces at each call of a function: here once.
Import this with TRITON_INTERPRET=1 before kernels run: they take two thirds of the time.

`assert_close` is torch's, whose first call takes two seconds: it imports sympy.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if core.is_builtin(member):  # not replaced yet
            interpreter._patch_attr(package, name, member, builder, scope)


interpreter._patch_builtin = _patch_builtin


def assert_close(actual: Tensor, expected: Tensor, *, atol: float, rtol: float) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    error = (actual - expected).abs() - rtol * expected.abs()
    assert torch.allclose(actual, expected, atol=atol, rtol=rtol), f"off by {float(error.max())}"
