"""One kernel launch: a body over a grid of blocks, inputs it reads and state it updates in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.simulator.tensor_memory import TensorMemorySimulator

Body = Callable[[Any, Any, Any], None]  # of a TensorMemory machine, inputs and state
_SCRATCH_BYTES = 1024  # shared memory every launch has, for reductions


def launch(
    body: Body,
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Any,
    state: Any,
    warpgroups: int = 1,
    cluster: int = 1,
    shared_bytes: int = 0,
    simulate: bool = False,
) -> Any:
    """Run ``body(machine, inputs, state)`` on each block of a grid and return the updated state.

    Args:
      body: gets the two pytrees back with a ``lanes.Buffer`` in place of each array.
      name: the kernel's name in a profile.
      grid: blocks along one or two axes.
      inputs: pytree of arrays that the kernel only reads.
      state: pytree of arrays that it updates in place where the caller's jit donates them, or of
        ``jax.ShapeDtypeStruct`` for results that it writes whole.
      warpgroups: of 128 lanes each, per block.
      cluster: blocks that stand at each place of the grid, run together and reach each other's shared memory.
      shared_bytes: shared memory per block, besides that of the reductions.
      simulate: run in NumPy on the host, with checks, on any device.
    """
    operands, inputs_tree = jax.tree.flatten(inputs)
    state_leaves, state_tree = jax.tree.flatten(state)
    is_result = isinstance(state_leaves[0], jax.ShapeDtypeStruct)
    if not any(leaf.size for leaf in state_leaves):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state) if is_result else state
    shared_bytes = -(-(shared_bytes + _SCRATCH_BYTES) // 16) * 16
    if simulate:
        run = functools.partial(_simulate, body, name, grid, warpgroups, cluster, shared_bytes)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        if is_result:  # garbage at first, as on a GPU
            state = jax.tree.map(lambda leaf: jnp.full(leaf.shape, _garbage(leaf.dtype), leaf.dtype), state)
        return jax.pure_callback(run, shapes, inputs, state)

    from pallas_kernels.language.ptx.tensor_memory import (
        TensorMemoryPTX,  # needs Mosaic GPU, which not every jaxlib has
    )

    # A ref handed to a kernel is updated in place: XLA aliases it, and copies it only if its old value is used later.
    refs = [] if is_result else [jax.new_ref(leaf) for leaf in state_leaves]
    shapes = [(leaf.shape, leaf.dtype) for leaf in (*operands, *state_leaves)]
    axes = ("block", "unit")[: len(grid)]

    def kernel(*arguments: Any) -> None:
        *arrays, shared = arguments
        numbers = [lax.axis_index(axis) for axis in axes]
        ref_types = [plgpu.RefType()] * (len(arrays) + 1)
        scalar_types = [plgpu.Layout.WG_SPLAT(())] * len(numbers)

        @plgpu.inline_mgpu(arg_types=(*ref_types, *scalar_types))
        def emit(context: Any, *values: Any) -> None:
            del context
            memrefs, shared_memref = values[: len(arrays)], values[len(arrays)]
            machine = TensorMemoryPTX([number.registers.item() for number in values[len(arrays) + 1 :]], shared_memref)
            buffers = [
                machine.buffer(memref, shape, dtype, constant=i < len(operands))
                for i, (memref, (shape, dtype)) in enumerate(zip(memrefs, shapes, strict=True))
            ]
            body(
                machine,
                jax.tree.unflatten(inputs_tree, buffers[: len(operands)]),
                jax.tree.unflatten(state_tree, buffers[len(operands) :]),
            )
            _check_shared(name, machine, shared_bytes)

        emit(*arrays, shared, *numbers)

    kernel.__name__ = name
    shape: dict[str, Any] = {} if warpgroups == 1 else dict(num_threads=warpgroups, thread_name="warpgroup")
    shape |= {} if cluster == 1 else dict(cluster=(cluster,), cluster_names=("rank",))
    results = plgpu.kernel(
        kernel,
        out_type=tuple(state_leaves) if is_result else (),
        grid=grid,
        grid_names=axes,
        scratch_types=[plgpu.SMEM((shared_bytes // 4,), jnp.int32)],
        **shape,
    )(*operands, *refs)
    return jax.tree.unflatten(state_tree, results if is_result else [jax.freeze(ref) for ref in refs])


def _check_shared(name: str, machine: Machine, available: int) -> None:
    if machine.shared_bytes > available:
        raise ValueError(f"{name} takes {machine.shared_bytes} bytes of shared memory, its launch has {available}")


def _garbage(dtype: Any) -> Any:
    """A number that no body means to store: NaN, or the largest integer."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _simulate(
    body: Body,
    name: str,
    grid: tuple[int, ...],
    warpgroups: int,
    cluster: int,
    shared_bytes: int,
    inputs: Any,
    state: Any,
) -> Any:
    if not math.prod(grid):
        return state
    machine = TensorMemorySimulator(grid, warpgroups * WARPGROUP, shared_bytes, cluster)

    def buffers(tree: Any, *, constant: bool) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, array: machine.buffer(name + jax.tree_util.keystr(path), array, constant=constant), tree
        )

    inputs = jax.tree.map(lambda array: np.array(array, order="C"), inputs)
    state = jax.tree.map(lambda array: np.array(array, order="C"), state)
    body(machine, buffers(inputs, constant=True), buffers(state, constant=False))
    _check_shared(name, machine, shared_bytes)
    return state
