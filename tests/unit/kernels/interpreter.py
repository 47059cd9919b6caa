"""Triton's interpreter, which looks up the names it replaces at each call of a function, and makes
each type and shape anew for each operation: here once. Import this with TRITON_INTERPRET=1 before
kernels run: they take a third of the time.

`assert_close` is torch's, whose first call takes two seconds: it imports sympy.
"""

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


@functools.cache
def _interpreted(member: Any) -> Any:
    """What a kernel calls in its place."""
    inner = getattr(member, "__wrapped__", member)

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return inner(*arguments, **options)

    return call


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if core.is_builtin(member):  # not replaced yet
            scope.set_attr(package, name, _interpreted(member))


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

# It computes each sum and product of integers a second time, to look for an overflow that it tells
# nobody: without `debug` it asserts nothing.
_options = interpreter.interpreter_builder.options
assert not _options.debug
interpreter.interpreter_builder.options = replace(_options, sanitize_overflow=False)

_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}  # what a type has besides its elements' type
_sizes: dict[Any, Any] = {}  # equal shapes are one
_shapes: dict[Any, tuple[Any, Any]] = {}  # by a tensor's shape: what it says of it
_make_block, _make_tensor = core.block_type.__init__, core.tensor.__init__


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(getattr(size, "value", size) for size in shape)
    if (known := _blocks.get((element_ty.name, sizes))) is None:
        _make_block(self, element_ty, shape)
        shape = _sizes.setdefault(sizes, self.shape)
        known = {"shape": shape, "numel": self.numel, "name": self.name}
        _blocks[element_ty.name, sizes] = known
    vars(self).update(known, element_ty=element_ty)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape.values) if type.is_block() else ()
    if (known := _shapes.get(sizes)) is None:
        _make_tensor(self, handle, type)
        known = _shapes[sizes] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = known


core.block_type.__init__, core.tensor.__init__ = _block_type, _tensor

_broadcast = interpreter.TritonSemantic.broadcast_impl_value


def _broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    are_blocks = lhs.type.is_block(), rhs.type.is_block()
    if are_blocks == (True, True) and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return (lhs, rhs) if are_blocks == (False, False) else _broadcast(self, lhs, rhs)


interpreter.TritonSemantic.broadcast_impl_value = _broadcast_unequal

_dtypes: dict[str, Any] = {}
_get_np_dtype = interpreter._get_np_dtype


def _np_dtype(kind: Any) -> Any:
    kind = kind.scalar
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _get_np_dtype(kind)
    return _dtypes[kind.name]


interpreter._get_np_dtype = _np_dtype


def assert_close(actual: Tensor, expected: Tensor, *, atol: float, rtol: float) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    error = (actual - expected).abs() - rtol * expected.abs()
    assert torch.allclose(actual, expected, atol=atol, rtol=rtol), f"off by {float(error.max())}"
