"""Two products of the same rows of x, with weights of different forms, in one launch on Hopper.

A layer multiplies its input by a stored weight and by one of bf16. Each alone is too small to use the whole card for
long, so that most of its time is the beginning and the end of a launch. Together, the first blocks of the launch
compute one product and the others the other. Sums have the same parts as in launches of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax

from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import negate
from pallas_kernels.products import sm90
from pallas_kernels.products.block import Layout, ProductInputs
from pallas_kernels.products.split import CLUSTER_BYTES, MORE_CLUSTERS, TILE, Split
from pallas_kernels.products.weights import CHUNK_BYTES

_SM_BYTES = 227 << 10  # shared memory of a multiprocessor that its blocks divide
_RESERVED = 2 << 10  # of it, for each block: by the card, and for reductions
_MOST_TOGETHER = 2  # blocks on a multiprocessor, for whose registers there is room
_LAUNCH_BYTES = 100 << 10  # what a launch takes, as much as reading so many bytes by a block, as measured on an H200


def _cost(layouts: tuple[Layout, ...]) -> int:
    """What a launch of these takes, as the bytes that one multiprocessor reads; as in ``split.fastest_split``."""
    gpu, blocks = layouts[0].gpu, sum(one.grid.blocks[0] * one.grid.cluster for one in layouts)
    waves = -(-blocks // gpu.multiprocessors)
    read = (one.split.parts * one.split.chunks * (one.split.tiles * TILE + one.columns) for one in layouts)
    return waves * max(read) * CHUNK_BYTES + CLUSTER_BYTES[layouts[0].split.cluster]


def _run_at_once(layouts: tuple[Layout, ...]) -> bool:
    gpu, cluster = layouts[0].gpu, layouts[0].split.cluster
    shared = max(one.grid.shared_bytes for one in layouts) + _RESERVED
    together = min(_MOST_TOGETHER, _SM_BYTES // shared)
    room = gpu.multiprocessors if cluster == 1 else gpu.clusters[cluster] + MORE_CLUSTERS.get(cluster, 0)
    return sum(one.grid.blocks[0] for one in layouts) <= room * together


def fastest_pair(own: tuple[Layout, Layout], outputs: tuple[int, int]) -> tuple[Layout, Layout] | None:
    """Return the layouts of one launch for two products, or None where two launches are expected to be as fast.

    ``own`` are the layouts of launches of their own.
    """
    first, second = own
    parts = first.split.all_parts
    if parts != second.split.all_parts or first.form.groups > 1 or second.form.groups > 1:
        return None
    if first.grid.blocks[1] > 1 or first.gpu.architecture != "sm90":
        return None
    sizes = [size for size in CLUSTER_BYTES if parts % size == 0 and (size == 1 or size in first.gpu.clusters)]
    best, least = None, sum(_cost((one,)) for one in own) + _LAUNCH_BYTES
    for cluster, tiles in itertools.product(sizes, range(1, sm90.MOST_WARPGROUPS + 1)):
        of_block = parts // cluster
        if tiles * of_block > sm90.MOST_WARPGROUPS:
            continue

        splits = [
            Split(
                cluster=cluster,
                parts=of_block,
                tiles=tiles,
                blocks=-(-rows // (tiles * TILE)),
                chunks=layout.split.chunks,
            )
            for layout, rows in zip(own, outputs, strict=True)
        ]
        one, other = (
            dataclasses.replace(layout, split=split, streams=False) for layout, split in zip(own, splits, strict=True)
        )
        pair = one, dataclasses.replace(other, first_block=one.grid.blocks[0])
        if _run_at_once(pair) and _cost(pair) < least:
            best, least = pair, _cost(pair)
    return best


def launch_pair(
    layouts: tuple[Layout, Layout], inputs: tuple[ProductInputs, ProductInputs], dtype: Any, *, simulate: bool
) -> tuple[jax.Array, jax.Array]:
    """Launch two products."""
    grids = [layout.grid for layout in layouts]
    return launch(
        functools.partial(_body, layouts=layouts),
        name="products",
        grid=Grid(
            blocks=(sum(grid.blocks[0] for grid in grids), grids[0].blocks[1]),
            warpgroups=grids[0].warpgroups,
            cluster=grids[0].cluster,
            shared_bytes=max(grid.shared_bytes for grid in grids),
        ),
        inputs=inputs,
        state=tuple(
            jax.ShapeDtypeStruct((layout.rows, given.weight.shape[0]), dtype)
            for layout, given in zip(layouts, inputs, strict=True)
        ),
        simulate=simulate,
    )


def _body(machine: TensorCores, inputs: Any, out: Any, *, layouts: tuple[Layout, Layout]) -> None:
    is_first = machine.block(0) < layouts[1].first_block
    taken = most = machine.shared_bytes
    for layout, given, result, mine in zip(layouts, inputs, out, (is_first, negate(is_first)), strict=True):
        machine.shared_bytes = taken  # a block computes one of the products
        with machine.when(mine):
            sm90.body(machine, given, result, layout=layout)
        most = max(most, machine.shared_bytes)
    machine.shared_bytes = most
