"""The name of a kernel's module, which is part of what compilation caches look it up by."""

from __future__ import annotations

import os

import jax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

_ATTRIBUTE = "mosaic_gpu.dump_basename"
_NUMBERED = jax.__version_info__ < (0, 12)  # newer ones leave the number out of what they look up


def name_module(name: str) -> None:
    """Name the module around the insertion point after its kernel alone.

    jax 0.11 appends a number that counts the kernels of the process, so that no two modules are equal. Then the same
    kernel is compiled once more for each program, and the key of a program in the persistent compilation cache depends
    on how many kernels were made before it. The number keeps the files of kernel dumps apart: where dumps are asked
    for, it stays.
    """
    if not _NUMBERED or any(variable.startswith("MOSAIC_GPU_DUMP_") for variable in os.environ):
        return
    operation = ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    operation.attributes[_ATTRIBUTE] = ir.StringAttr.get(name)
