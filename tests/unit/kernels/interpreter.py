"""Triton's interpreter, which looks up the names it replaces at each call of a function: here once.
Import this with TRITON_INTERPRET=1 before kernels run: they take two thirds of the time.

`assert_close` is torch's, whose first call takes two seconds: it imports sympy.
"""

import functools
import inspect
from typing import Any

import torch
import triton
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
_patch_lang = interpreter._patch_lang
_replaced: set[int] = set()  # modules whose names are replaced until the running kernel ends


@functools.cache
def _languages(function: Any) -> frozenset[int]:
    members = function.__globals__.values()
    return frozenset(
        id(member) for member in members if member is triton.language or member is core
    )


def _patch_lang_once(function: Any) -> Any:
    """A function that a kernel calls finds the names replaced already."""
    languages = _languages(function)
    if languages <= _replaced:
        return interpreter._LangPatchScope()
    scope = _patch_lang(function)
    _replaced.update(languages)
    restore = scope.restore

    def restore_all() -> None:
        restore()
        _replaced.clear()

    scope.restore = restore_all
    return scope


interpreter._patch_lang = _patch_lang_once


def assert_close(actual: Tensor, expected: Tensor, *, atol: float, rtol: float) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    error = (actual - expected).abs() - rtol * expected.abs()
    assert torch.allclose(actual, expected, atol=atol, rtol=rtol), f"off by {float(error.max())}"
