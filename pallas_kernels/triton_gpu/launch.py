"""Launches of Triton kernels from JAX: through jax-triton on a GPU, or in Triton's interpreter over NumPy arrays.

Triton decides at import, by the environment variable ``TRITON_INTERPRET``, whether its kernels are compiled or
interpreted. In a process that interprets them, every device can run them, slowly.

A kernel takes pointers, alone or in named tuples, and then its constants. jax-triton passes each pointer by itself:
those of arrays that the kernel reads, of arrays that it updates, of these once more at the same addresses, and of its
results. What stands between the two is a function in Triton's language that packs the pointers and calls the kernel.
It is written here for each kernel, and inlined when it is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import zlib
from collections.abc import Sequence

import jax
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.trees import Structure, uninitialised
from pallas_kernels.triton_gpu import device, interpreter
from pallas_kernels.triton_gpu.interpreter import Kernel
from pallas_kernels.triton_gpu.operands import Constants, Operand

type Specs = Sequence[jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a kernel is launched, and its constants."""

    grid: tuple[int] | tuple[int, int] | tuple[int, int, int]
    constants: Constants
    warps: int = 4
    stages: int = 1


def launch(kernel: Kernel, config: Config, inputs: Sequence[Operand], results: Sequence[Operand]) -> list[Operand]:
    """Run a kernel that computes results from inputs.

    Args:
      kernel: decorated with ``triton.jit``. Its arguments are inputs and results, then constants.
      config: how to launch it.
      inputs: what the kernel reads: arrays, named tuples of arrays, or None, which the kernel gets as it is.
      results: likewise, with the shape and dtype of each array as ``jax.ShapeDtypeStruct``.

    Returns:
      The results.
    """
    return _run(kernel, config, inputs, (), results)


def update(kernel: Kernel, config: Config, inputs: Sequence[Operand], state: Sequence[Operand]) -> list[Operand]:
    """Run a kernel that changes arrays in place, if the caller's jit donates them.

    Args:
      kernel: as for ``launch``. Its arguments are inputs and state, then constants.
      config: how to launch it.
      inputs: as for ``launch``.
      state: likewise, of the arrays that it updates.

    Returns:
      The updated state.
    """
    return _run(kernel, config, inputs, state, ())


def _run(
    kernel: Kernel, config: Config, inputs: Sequence[Operand], state: Sequence[Operand], results: Sequence[Operand]
) -> list[Operand]:
    """Returns the updated state, then the results."""
    read, changed = jax.tree.leaves(inputs), jax.tree.leaves(state)
    found = [*state, *results]
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found)]
    pointers = jax.tree.structure([*inputs, *found])
    if interpreter.interprets(kernel):
        updated = _interpreted(kernel, config, [*read, *changed], specs, pointers)
    else:
        flat = _flat(kernel, pointers, len(read), len(changed))
        aliases = {len(read) + i: i for i in range(len(changed))}
        updated = _compiled(flat, config, [*read, *changed], specs, aliases)
    return jax.tree.unflatten(jax.tree.structure(found), updated)


@functools.cache
def _flat(kernel: Kernel, pointers: Structure, num_read: int, num_changed: int) -> triton.JITFunction:
    """Return a kernel with a parameter for each pointer, which packs them and calls this kernel."""
    names = [f"p{i}" for i in range(pointers.num_leaves + num_changed)]
    again = num_read + num_changed
    packed = jax.tree.unflatten(pointers, names[:again] + names[again + num_changed :])
    constants = kernel.arg_names[len(packed) :]
    scope = {"__name__": __name__, "tl": tl, "kernel": kernel}
    parameters = ", ".join([*names, *(f"{name}: tl.constexpr" for name in constants)])
    arguments = ", ".join([*(_expression(value, scope) for value in packed), *constants])
    source = f"def {kernel.__name__}({parameters}):\n    kernel({arguments})\n"
    file = f"<launch of {kernel.__name__} {zlib.crc32(source.encode()):08x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where Triton looks for it
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[kernel.__name__])


def _expression(value: Operand, scope: dict[str, object]) -> str:
    """Return an expression for a name, None, or a named tuple of such, and put the classes of tuples into ``scope``."""
    if value is None or isinstance(value, str):
        return str(value)
    kind = type(value)
    scope[kind.__name__] = kind
    return f"{kind.__name__}({', '.join(_expression(field, scope) for field in value)})"


def _compiled(
    kernel: triton.JITFunction,
    config: Config,
    given: Sequence[jax.Array],
    results: Specs,
    aliases: dict[int, int],
) -> list[jax.Array]:
    import jax_triton  # it takes a second to import, and the interpreter does without

    return jax_triton.triton_call(
        *given,
        kernel=kernel,
        name=kernel.__name__,
        out_shape=results,
        grid=config.grid,
        num_warps=config.warps,
        num_stages=config.stages,
        compute_capability=device.capability(),
        input_output_aliases=aliases,
        **config.constants,
    )


def _interpreted(
    kernel: Kernel, config: Config, given: Sequence[jax.Array], results: Specs, pointers: Structure
) -> list[jax.Array]:
    """Run a kernel in the interpreter. Results hold NaN, or the largest integer, where the kernel stores nothing."""
    num_made = pointers.num_leaves - len(given)
    num_changed = len(results) - num_made

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        # Copies, because the interpreter writes through pointers, and arrays may be aligned to less than their dtype.
        copies = [np.array(array, order="C") for array in arrays]
        made = [uninitialised(spec) for spec in results[num_changed:]]
        interpreter.run(kernel, config.grid, pointers, [*copies, *made], config.constants)
        return [*copies[len(copies) - num_changed :], *made]

    return list(jax.pure_callback(run, results, *given, vmap_method="sequential"))
