"""Kernels in Triton's interpreter, over NumPy arrays. The interpreter as it is takes tensors of torch.

More is made right here. It fails with newer versions of NumPy, which do not turn arrays of one element into an index.
It cuts f32 to bf16, where GPUs round to nearest. And it multiplies matrices of bf16 as if their bits were integers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_EXCHANGED = (
    (interpreter, "_patch_lang_tensor"),
    (interpreter, "_patch_lang"),
    (interpreter, "_convert_float"),
    (interpreter.InterpreterBuilder, "create_dot"),
)
_INTERPRETER = threading.Lock()  # the interpreter exchanges functions of triton.language while it runs


def interprets(kernel: Any) -> bool:
    """Whether this process interprets its kernels, as the environment variable ``TRITON_INTERPRET`` asks for."""
    return isinstance(kernel, interpreter.InterpretedFunction)


def run(
    kernel: Any, grid: tuple[int, ...], pointers: Any, arrays: Sequence[np.ndarray], constants: dict[str, Any]
) -> None:
    """Run a kernel, which reads and changes arrays.

    Args:
      kernel: decorated with ``triton.jit``.
      grid: blocks along each axis.
      pointers: the structure of its arguments, as a pytree of pointers.
      arrays: what each of them points to.
      constants: by name.
    """
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

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        pass


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
    scopes: dict[int, Any] = {}

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch_all(function)
        return _NothingToRestore()

    def rounded(values: Any, of: Any, to: Any, mode: Any) -> Any:
        if (of, to) == (tl.float32, tl.bfloat16):
            return values.astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(values, of, to, mode)

    def product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, *map(_widened, (a, b)), *rest)

    def exchange(functions: Sequence[Any]) -> None:
        for (owner, name), function in zip(_EXCHANGED, functions, strict=True):
            setattr(owner, name, function)

    exchange((with_index, once, rounded, product))
    try:
        yield
    finally:
        exchange(before)
        for scope in reversed(scopes.values()):
            scope.restore()


def _widened(handle: Any) -> Any:
    """A matrix of bf16 as one of f32."""
    if handle.dtype != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)
