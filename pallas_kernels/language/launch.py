"""One kernel launch: a body run on a grid of blocks, with inputs that it reads and state that it updates in place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import plugin
from pallas_kernels.language import target
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.simulator.tensor_memory import TensorMemorySimulator
from pallas_kernels.trees import Tree, uninitialised

type Body = Callable[[Any, Tree, Tree], None]  # takes a TensorMemory machine, inputs and state
type _Leaf = jax.Array | jax.ShapeDtypeStruct  # a result is given by its shape and dtype
type _Lowered = Any  # what Mosaic GPU gives a kernel: refs when it is traced, then memrefs and fragments of registers
MAX_WARPGROUPS, MAX_CLUSTER = 8, 8
SCRATCH_BYTES = 1024  # shared memory that a launch has for reductions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The blocks of a launch."""

    blocks: tuple[int, ...]  # along one or two axes, ``machine.block(0)`` and ``machine.block(1)``
    warpgroups: int = 1  # warpgroups per block, of 128 lanes each
    cluster: int = 1  # blocks at each place of the grid, which run together and can access each other's shared memory
    shared_bytes: int = 0  # shared memory per block, besides the KiB for reductions
    reduces: bool = True  # whether a body may reduce over a block, for which there is a KiB more of shared memory

    def __post_init__(self) -> None:
        if len(self.blocks) not in (1, 2):
            raise ValueError(f"a grid has one axis or two, got {self.blocks}")
        if not 1 <= self.warpgroups <= MAX_WARPGROUPS:
            raise ValueError(f"a block has 1 to {MAX_WARPGROUPS} warpgroups, got {self.warpgroups}")
        if not 1 <= self.cluster <= MAX_CLUSTER:
            raise ValueError(f"a cluster has 1 to {MAX_CLUSTER} blocks, got {self.cluster}")


def launch(
    body: Body,
    *,
    name: str,
    grid: Grid | tuple[int, ...],
    inputs: Tree,
    state: Tree,
    simulate: bool = False,
) -> Tree:
    """Run ``body(machine, inputs, state)`` on each block of a grid and return the updated state.

        def double(machine: Machine, x: Buffer, out: Buffer) -> None:
            lane = machine.thread
            out.store_floats([x.load_floats(lane, count=1)[0] * 2.0], lane)

        launch(double, name="double", grid=(1,), inputs=x, state=jax.ShapeDtypeStruct((128,), jnp.float32))

    Args:
      body: gets the two pytrees with a ``lanes.Buffer`` in place of each array. On a GPU it is called once, when the
        kernel is built; in the simulator once per launch, for all blocks together.
      name: the kernel's name in profiles and errors.
      grid: the blocks. A tuple means blocks of one warpgroup, without clusters or shared memory of their own.
      inputs: pytree of arrays that the kernel only reads. Parts that are None are passed on as None.
      state: pytree of arrays that the kernel updates, in place if the caller's jit donates them, and of
        ``jax.ShapeDtypeStruct`` for results, which the kernel must write completely.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The state, with the same structure and an array at each leaf.

    Warns:
      SlowKernelsWarning: once, where the body's roles ask for registers on Hopper and the installed CUDA plugin ignores
        them (``plugin``).

    Raises:
      ValueError: there are no kernels for the target (``target.unsupported``) and it is not simulated, the launch asks
        for more shared memory than a block can have, the body takes more than the launch has, or ``jax.vmap`` maps
        over an array of the launch.
      TypeError: the body misuses the language. In the simulator this is the text of a JaxRuntimeError, as is
        SimulationError.
    """
    if not isinstance(grid, Grid):
        grid = Grid(blocks=grid)
    operands, inputs_tree = jax.tree.flatten(inputs)
    state_leaves, state_tree = jax.tree.flatten(state)
    operands, state_leaves = _never_mapped(name, operands, state_leaves)
    inputs, state = jax.tree.unflatten(inputs_tree, operands), jax.tree.unflatten(state_tree, state_leaves)
    if not any(leaf.size for leaf in state_leaves):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if _is_result(leaf) else leaf, state)
    shared_bytes = -(-(grid.shared_bytes + grid.reduces * SCRATCH_BYTES) // 16) * 16
    if shared_bytes > (most := target.gpu_or_first().shared_bytes):
        raise ValueError(f"{name} asks for {shared_bytes} bytes of shared memory, a block has at most {most}")
    if simulate:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        run = functools.partial(_simulate, body, name, grid, shared_bytes, shapes)
        given = jax.tree.map(lambda leaf: None if _is_result(leaf) else leaf, state)
        return jax.pure_callback(run, shapes, inputs, given)
    if (reason := target.unsupported()) is not None:
        raise ValueError(f"{name} has no kernel for this target: {reason}")

    # Imported here because not every jaxlib has Mosaic GPU.
    from pallas_kernels.language.ptx.naming import name_module
    from pallas_kernels.language.ptx.tensor_memory import TensorMemoryPTX

    # A ref that is passed to a kernel is updated in place. XLA aliases it, and copies it only if the old value is used
    # later.
    refs = [jax.new_ref(leaf) for leaf in state_leaves if not _is_result(leaf)]
    results = [leaf for leaf in state_leaves if _is_result(leaf)]
    # The kernel gets what it updates before its results.
    order = sorted(range(len(state_leaves)), key=lambda i: _is_result(state_leaves[i]))
    shapes = [(leaf.shape, leaf.dtype) for leaf in (*operands, *(state_leaves[i] for i in order))]
    axes = ("block", "unit")[: len(grid.blocks)]
    gpu = target.gpu()

    def kernel(*arguments: _Lowered) -> None:
        *arrays, shared = arguments
        numbers = [lax.axis_index(axis) for axis in axes]
        ref_types = [plgpu.RefType()] * (len(arrays) + 1)
        scalar_types = [plgpu.Layout.WG_SPLAT(())] * len(numbers)

        @plgpu.inline_mgpu(arg_types=(*ref_types, *scalar_types))
        def emit(context: _Lowered, *values: _Lowered) -> None:
            name_module(name)
            memrefs, shared_memref = values[: len(arrays)], values[len(arrays)]
            machine = TensorMemoryPTX([number.registers.item() for number in values[len(arrays) + 1 :]], shared_memref)
            machine.context = context
            buffers = [
                machine.buffer(memref, shape, dtype, constant=i < len(operands))
                for i, (memref, (shape, dtype)) in enumerate(zip(memrefs, shapes, strict=True))
            ]
            body(
                machine,
                jax.tree.unflatten(inputs_tree, buffers[: len(operands)]),
                jax.tree.unflatten(state_tree, _in_place(order, buffers[len(operands) :])),
            )
            _check_shared(name, machine, grid)
            if machine.changes_registers and gpu is target.HOPPER:
                plugin.warn_if_slow(name)

        emit(*arrays, shared, *numbers)

    kernel.__name__ = name
    several: Tree = {}
    if grid.warpgroups > 1:
        several |= dict(num_threads=grid.warpgroups, thread_name="warpgroup")
    if grid.cluster > 1:
        several |= dict(cluster=(grid.cluster,), cluster_names=("rank",))
    found = plgpu.kernel(
        kernel,
        out_type=tuple(results),
        grid=grid.blocks,
        grid_names=axes,
        scratch_types=[plgpu.SMEM((shared_bytes // 4,), jnp.int32)],
        **several,
    )(*operands, *refs)
    updated = [jax.freeze(ref) for ref in refs]
    return jax.tree.unflatten(state_tree, _in_place(order, [*updated, *(found if results else ())]))


def _never_mapped(name: str, operands: list[jax.Array], state: list[_Leaf]) -> tuple[list[jax.Array], list[_Leaf]]:
    """Return the arrays of a launch as they are; mapping one by ``jax.vmap`` is a ValueError.

    Without it, a launch would run once, on arrays that have an axis more than its body knows.
    """

    @jax.custom_batching.custom_vmap
    def same(arrays: list[_Leaf]) -> list[_Leaf]:
        return arrays

    @same.def_vmap
    def _(axis_size: int, is_mapped: Tree, arrays: Tree) -> Tree:
        del axis_size, is_mapped, arrays
        raise ValueError(f"{name} is a kernel, which jax.vmap cannot map: use jax.lax.map, or backend='xla'")

    is_array = [not _is_result(leaf) for leaf in state]
    arrays = iter(same([*operands, *(leaf for leaf, given in zip(state, is_array, strict=True) if given)]))
    operands = [next(arrays) for _ in operands]
    return operands, [next(arrays) if given else leaf for leaf, given in zip(state, is_array, strict=True)]


def _is_result(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _in_place[Leaf](order: list[int], leaves: list[Leaf]) -> list[Leaf]:
    """Return leaves that are given in an order in the place that each has without it."""
    placed = dict(zip(order, leaves, strict=True))
    return [placed[i] for i in range(len(leaves))]


def _check_shared(name: str, machine: Machine, grid: Grid) -> None:
    taken, scratch = machine.shared_bytes - machine.scratch_bytes, machine.scratch_bytes
    if taken > -(-grid.shared_bytes // 16) * 16:
        raise ValueError(f"{name} takes {taken} bytes of shared memory, its Grid has shared_bytes={grid.shared_bytes}")
    if scratch > (most := grid.reduces * SCRATCH_BYTES):
        raise ValueError(f"{name} takes {scratch} bytes of shared memory for reductions, a launch has {most}")


def _simulate(body: Body, name: str, grid: Grid, shared_bytes: int, shapes: Tree, inputs: Tree, given: Tree) -> Tree:
    """Run the body, with None among ``given`` for each result."""
    inputs = jax.tree.map(lambda array: np.array(array, order="C"), inputs)
    state = jax.tree.map(
        lambda leaf, array: uninitialised(leaf) if array is None else np.array(array, order="C"), shapes, given
    )
    if not math.prod(grid.blocks):
        return state
    machine = TensorMemorySimulator(grid.blocks, grid.warpgroups * WARPGROUP, shared_bytes, grid.cluster)

    def buffers(tree: Tree, *, constant: bool) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, array: machine.buffer(name + jax.tree_util.keystr(path), array, constant=constant), tree
        )

    body(machine, buffers(inputs, constant=True), buffers(state, constant=False))
    _check_shared(name, machine, grid)
    machine.check_end()
    return state
