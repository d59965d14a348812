"""Which layout a product of few rows gets, and its launch: of one weight, of two side by side, or of two one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import ModuleType

import jax

from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows
from pallas_kernels.language import target
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import negate
from pallas_kernels.products.epilogues.both import BothQueries
from pallas_kernels.products.epilogues.faces import Made
from pallas_kernels.products.epilogues.store import Store
from pallas_kernels.products.few import sm90, sm100
from pallas_kernels.products.few.block import FewInputs
from pallas_kernels.products.few.layout import Layout
from pallas_kernels.products.few.split import Division, Split, columns_of
from pallas_kernels.products.few.staging import order_of
from pallas_kernels.products.problem import Epilogue, RowsSpec, Unsupported, WeightSpec
from pallas_kernels.products.weights import CHUNK_BYTES, MOST_ROWS, ROWS, TILE
from pallas_kernels.tuned import h200

_KERNELS: dict[target.Architecture, ModuleType] = {"sm90": sm90, "sm100": sm100}
_SM_BYTES = 227 << 10  # shared memory of a multiprocessor that its blocks divide
_RESERVED = 2 << 10  # of it, for each block: by the card, and for reductions
_MOST_TOGETHER = 2  # blocks on a multiprocessor, for whose registers there is room

type Weight = tuple[jax.Array, ...]  # a weight's array, or its codes and scales, as bytes


def fastest_layout(rows: RowsSpec, weight: WeightSpec, epilogue: Epilogue, gpu: target.GPU) -> Layout:
    """Return the layout of a launch of its own, of which sums are stored."""
    kernel, division = _KERNELS[gpu.architecture], _division(rows, weight, gpu, epilogue)
    split, columns = division.fastest()
    layout = Layout(
        gpu=gpu,
        split=split,
        weight=weight,
        epilogue=epilogue,
        rows=rows.count,
        columns=columns,
        inputs=division.inputs,
        operand_bytes=kernel.OPERAND_BYTES,
        order=order_of(rows, weight),
    )
    return layout.streamed(kernel.STREAMED_WARPGROUPS)


def _division(rows: RowsSpec, weight: WeightSpec, gpu: target.GPU, epilogue: Epilogue) -> Division:
    inputs = CHUNK_BYTES if weight.block is not None else CHUNK_BYTES // 2
    room = _KERNELS[gpu.architecture].ROOM[order_of(rows, weight)]
    return Division(weight=weight, inputs=inputs, rows=rows.count, room=room, gpu=gpu, most_parts=epilogue.most_parts)


def layout_of_heads(rows: RowsSpec, weight: WeightSpec, epilogue: Epilogue, gpu: target.GPU) -> Layout | Unsupported:
    """Return the layout for rows of x and outputs that are heads, of which a block has whole tiles.

    Sums have the same parts as those that are stored. So the result, and whether there is one, depend on the number of
    rows no more than they do there.
    """
    if gpu.architecture != "sm90":
        return Unsupported(kind="no kernel", reason="the GPU is no Hopper")
    layout = fastest_layout(rows, weight, Store(), gpu)
    tiles, parts = epilogue.tiles, layout.split.all_parts
    assert tiles is not None
    blocks, cluster = weight.outputs // (epilogue.blocks * tiles * TILE), parts * epilogue.blocks
    is_possible = (parts == 1 or epilogue.blocks == 1) and (cluster == 1 or cluster in gpu.clusters)
    if not is_possible or blocks * cluster <= gpu.multiprocessors // 2:
        reason = f"a weight of this shape, {weight.shape}, gives too few blocks of whole heads"
        return Unsupported(kind="slower", reason=reason)
    split, columns = _division(rows, weight, gpu, epilogue).fastest_of_heads(tiles, epilogue.blocks)
    found = dataclasses.replace(layout, split=split, epilogue=epilogue, columns=columns)
    return found.streamed(sm90.STREAMED_WARPGROUPS)


def layout_of_both(rows: RowsSpec, weight: WeightSpec, both: BothQueries, gpu: target.GPU) -> Layout | Unsupported:
    """Return the layout of attention's product, whose weight this is, with a tile of the indexer in each block."""
    alone = layout_of_heads(rows, weight, both.attention, gpu)
    if isinstance(alone, Unsupported):
        return alone
    most = sm90.ROOM[order_of(rows, weight)].most_warpgroups(ROWS)
    if both.tiles > most:
        reason = f"blocks have at most {most} tiles, both need {both.tiles}"
        return Unsupported(kind="no kernel", reason=reason)
    if rows.count > MOST_ROWS:
        reason = f"each of two launches has blocks of more rows, if there are more than {MOST_ROWS}, got {rows.count}"
        return Unsupported(kind="slower", reason=reason)
    split, columns = dataclasses.replace(alone.split, tiles=both.tiles), columns_of(rows.count, ROWS)
    return dataclasses.replace(alone, split=split, epilogue=both, columns=columns).streamed(sm90.STREAMED_WARPGROUPS)


def alone_in_a_block(layout: Layout, warpgroups: int) -> Layout:
    """Return the same product, with all parts of a tile in one block of so many warpgroups."""
    parts = layout.split.all_parts
    return _divided(layout, cluster=1, parts=parts, tiles=warpgroups // parts)


def _divided(layout: Layout, *, cluster: int, parts: int, tiles: int) -> Layout:
    """Return the same product with blocks of so many tiles and parts, which store x before they multiply."""
    split = Split(
        cluster=cluster,
        parts=parts,
        tiles=tiles,
        blocks=-(-layout.weight.outputs // (tiles * TILE)),
        chunks=layout.weight.inputs // layout.inputs // (cluster * parts),
    )
    return dataclasses.replace(layout, split=split, streams=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """A launch of one product, or with ``BothQueries`` of two whose tiles are side by side in a block."""

    layout: Layout

    def launch(
        self,
        x: ActivationRows,
        weights: list[Weight],
        extras: dict[str, jax.Array],
        needed: jax.Array | None,
        *,
        simulate: bool,
    ) -> list[Made]:
        """Return what is made. All rows are computed, needed or not."""
        layout, epilogue = self.layout, self.layout.epilogue
        made = launch(
            functools.partial(_KERNELS[layout.gpu.architecture].body, layout=layout),
            name=epilogue.name,
            grid=layout.grid,
            inputs=inputs_of(x, weights[0], extras, beside=weights[1] if epilogue.beside else None),
            state=epilogue.state(layout.rows, layout.weight.shape[0]),
            simulate=simulate,
        )
        finished = epilogue.finished(made, layout.rows)
        return list(finished) if epilogue.beside else [finished]


def inputs_of(
    x: ActivationRows, weight: Weight, extras: dict[str, jax.Array], beside: Weight | None = None
) -> FewInputs[jax.Array]:
    assert isinstance(x, PlainRows | OperandRows)
    codes, scales = _both(weight)
    return FewInputs(x=x, weight=codes, scales=scales, extras=extras, beside=None if beside is None else _both(beside))


def _both(weight: Weight) -> tuple[jax.Array, jax.Array | None]:
    """A weight or its codes, and its scales if it has any."""
    return weight[0], weight[1] if len(weight) > 1 else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A launch of two products with weights of different kinds: its first blocks compute one, and the others the other.

    A layer multiplies its input by a stored weight and by one of bf16. Each alone is too small to use the whole card
    for long, so that most of its time is the beginning and the end of a launch. Sums have the same parts as in launches
    of their own.
    """

    layouts: tuple[Layout, Layout]

    def launch(
        self,
        x: ActivationRows,
        weights: list[Weight],
        extras: dict[str, jax.Array],
        needed: jax.Array | None,
        *,
        simulate: bool,
    ) -> list[Made]:
        """Return what is made. All rows are computed, needed or not."""
        grids = [layout.grid for layout in self.layouts]
        made = launch(
            functools.partial(_pair_body, layouts=self.layouts),
            name="products",
            grid=Grid(
                blocks=(sum(grid.blocks[0] for grid in grids), grids[0].blocks[1]),
                warpgroups=grids[0].warpgroups,
                cluster=grids[0].cluster,
                shared_bytes=max(grid.shared_bytes for grid in grids),
            ),
            inputs=tuple(inputs_of(x, weight, extras) for weight in weights),
            state=tuple(layout.epilogue.state(layout.rows, layout.weight.shape[0]) for layout in self.layouts),
            simulate=simulate,
        )
        return [layout.epilogue.finished(one, layout.rows) for layout, one in zip(self.layouts, made, strict=True)]


def _pair_body(
    machine: TensorCores,
    inputs: tuple[FewInputs[Buffer], ...],
    out: tuple[Made, ...],
    *,
    layouts: tuple[Layout, Layout],
) -> None:
    is_first = machine.block(0) < layouts[1].first_block
    taken = most = machine.shared_bytes
    for layout, given, result, mine in zip(layouts, inputs, out, (is_first, negate(is_first)), strict=True):
        machine.shared_bytes = taken  # a block computes one of the products
        with machine.when(mine):
            sm90.body(machine, given, result, layout=layout)
        most = max(most, machine.shared_bytes)
    machine.shared_bytes = most


def fastest_pair(
    rows: RowsSpec, weights: tuple[WeightSpec, WeightSpec], epilogues: tuple[Epilogue, Epilogue], gpu: target.GPU
) -> Pair | Unsupported:
    """Return one launch for two products, the first of which is the larger one, if it is expected to be the faster."""
    if gpu.architecture != "sm90":
        return Unsupported(kind="no kernel", reason="the GPU is no Hopper")
    if rows.count > ROWS:
        reason = f"two products are one launch for at most {ROWS} rows, got {rows.count}"
        return Unsupported(kind="slower", reason=reason)
    first, second = own = tuple(
        fastest_layout(rows, weight, epilogue, gpu) for weight, epilogue in zip(weights, epilogues, strict=True)
    )
    shapes = weights[0].shape, weights[1].shape
    slower = Unsupported(kind="slower", reason=f"one launch of both, {shapes}, is not expected to be faster than two")
    parts = first.split.all_parts
    if parts != second.split.all_parts or weights[0].groups > 1 or weights[1].groups > 1:
        return slower
    sizes = [size for size in h200.CLUSTER_BYTES if parts % size == 0 and (size == 1 or size in gpu.clusters)]
    most = min(sm90.ROOM[layout.order].most_warpgroups(ROWS) for layout in own)
    best, least = None, sum(_cost((one,)) for one in own) + h200.LAUNCH_BYTES
    for cluster, tiles in itertools.product(sizes, range(1, most + 1)):
        of_block = parts // cluster
        if tiles * of_block > most:
            continue
        pair = pair_of((first, second), cluster=cluster, parts=of_block, tiles=tiles)
        if _run_at_once(pair) and _cost(pair) < least:
            best, least = pair, _cost(pair)
    return slower if best is None else Pair(layouts=best)


def pair_of(own: tuple[Layout, Layout], *, cluster: int, parts: int, tiles: int) -> tuple[Layout, Layout]:
    """Return the layouts of one launch of two products, whose blocks have so many tiles and parts."""
    one, other = (_divided(layout, cluster=cluster, parts=parts, tiles=tiles) for layout in own)
    return one, dataclasses.replace(other, first_block=one.grid.blocks[0])


def _cost(layouts: tuple[Layout, ...]) -> int:
    """What a launch of these takes, as the bytes that one multiprocessor reads; as ``Division`` counts one product."""
    gpu, blocks = layouts[0].gpu, sum(one.grid.blocks[0] * one.grid.cluster for one in layouts)
    waves = -(-blocks // gpu.multiprocessors)
    read = (one.split.parts * one.split.chunks * (one.split.tiles * TILE + one.columns) for one in layouts)
    return waves * max(read) * CHUNK_BYTES + h200.CLUSTER_BYTES[layouts[0].split.cluster]


def _run_at_once(layouts: tuple[Layout, ...]) -> bool:
    gpu, cluster = layouts[0].gpu, layouts[0].split.cluster
    shared = max(one.grid.shared_bytes for one in layouts) + _RESERVED
    together = min(_MOST_TOGETHER, _SM_BYTES // shared)
    room = gpu.multiprocessors if cluster == 1 else gpu.clusters[cluster] + h200.MORE_CLUSTERS.get(cluster, 0)
    return sum(one.grid.blocks[0] for one in layouts) <= room * together
