"""Kernels in Triton's interpreter, over NumPy arrays. The interpreter as it is takes tensors of torch.

More is made right here. It fails with newer versions of NumPy, which do not turn arrays of one element into an index.
It cuts f32 to bf16, where GPUs round to nearest. And it multiplies matrices of bf16 as if their bits were integers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Protocol

import jax
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from pallas_kernels.trees import Structure
from pallas_kernels.triton_gpu.operands import Constants

type Kernel = triton.JITFunction | interpreter.InterpretedFunction  # what ``triton.jit`` returns

_EXCHANGED = (
    (interpreter, "_patch_lang_tensor"),
    (interpreter, "_patch_lang"),
    (interpreter, "_convert_float"),
    (interpreter.InterpreterBuilder, "create_dot"),
)
_INTERPRETER = threading.Lock()  # the interpreter exchanges functions of triton.language while it runs


def interprets(kernel: Kernel) -> bool:
    """Whether this process interprets its kernels, as the environment variable ``TRITON_INTERPRET`` asks for."""
    return isinstance(kernel, interpreter.InterpretedFunction)


def run(
    kernel: Kernel,
    grid: tuple[int, ...],
    pointers: Structure,
    arrays: Sequence[np.ndarray],
    constants: Constants,
) -> None:
    """Run a kernel, which reads and changes arrays.

    Args:
      kernel: decorated with ``triton.jit``.
      grid: blocks along each axis.
      pointers: the structure of its arguments, as a pytree of pointers.
      arrays: what each of them points to.
      constants: by name.
    """
    assert isinstance(kernel, interpreter.InterpretedFunction)
    given = jax.tree.unflatten(pointers, map(_Pointer, arrays))
    with _INTERPRETER, np.errstate(all="ignore"), _patched():
        _OverNumPy(kernel.rewrite(), kernel.arg_names, grid)(*given, **constants)


class _Pointer:
    """An array as the interpreter takes it."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _OverNumPy(interpreter.GridExecutor):
    """Runs a kernel over arrays that are on the host already."""

    def _init_args_hst[Given](self, args_dev: Given, kwargs: Constants) -> tuple[Given, Constants]:
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev: object, args_hst: object, kwargs: object, kwargs_hst: object) -> None:
        pass


class _Scope(Protocol):
    """What the interpreter has exchanged in a module."""

    def restore(self) -> None: ...


class _NothingToRestore:
    """What the interpreter restores after a kernel, where ``_patched`` restores it."""

    def restore(self) -> None:
        pass


@contextmanager
def _patched() -> Iterator[None]:
    """Make it right, and exchange functions of triton.language once for each module.

    The interpreter does so at every call of one of its functions by another, and does not restore all of them.
    """
    before = [getattr(owner, name) for owner, name in _EXCHANGED]
    patch_tensor, patch_all, convert, multiply = before
    scopes: dict[int, _Scope] = {}

    def with_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def once(function: FunctionType) -> _Scope:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch_all(function)
        return _NothingToRestore()

    def rounded(values: np.ndarray, of: tl.dtype, to: tl.dtype, mode: object) -> np.ndarray:
        if (of, to) == (tl.float32, tl.bfloat16):
            return values.astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(values, of, to, mode)

    def product(
        self: interpreter.InterpreterBuilder, a: interpreter.TensorHandle, b: interpreter.TensorHandle, *rest: object
    ) -> interpreter.TensorHandle:
        return multiply(self, *map(_widened, (a, b)), *rest)

    def exchange(functions: Sequence[Callable]) -> None:
        for (owner, name), function in zip(_EXCHANGED, functions, strict=True):
            setattr(owner, name, function)

    exchange((with_index, once, rounded, product))
    try:
        yield
    finally:
        exchange(before)
        for scope in reversed(scopes.values()):
            scope.restore()


def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """A matrix of bf16 as one of f32."""
    if handle.dtype != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)
