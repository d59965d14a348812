"""What the kernels for many queries share on Hopper and Blackwell, in the order in which a block needs it.

    Block         the work of a block on one query, with its layout and its shared memory
    load_tiles    the role that loads: stored rows are converted to f16 tiles of 64 keys, in two stages
    Softmax       a running softmax, in powers of two, over the rows of products of heads (rows) and keys (columns)
    finish_output merging the parts of a cluster, the inverse rope, storing

A block computes 64 heads of a query. One or two warpgroups load. In two other warpgroups the output ends up, half of
its channels in each. How queries are loaded and what is multiplied when are specific to the architecture.

If there are too few queries to fill the GPU, a cluster of blocks shares the tiles of one query and merges the results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pallas_kernels.attention.inputs import HEAD_DIM, NOPE_DIM, ROPE_DIM
from pallas_kernels.attention.keys import KEYS, STAGED_LOADS, KeyLoader, Query, StoredRow, staging_bytes
from pallas_kernels.attention.layout import AttentionLayout, Outputs, Scratch
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Op, add, fold, fold_tree, maximum, quad_transposed
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.language.values import Index, Value, select
from pallas_kernels.operand_rows import SEGMENT, OperandRows, store_product
from pallas_kernels.rounding import GROUP, RoundedRows, store_group

HEADS = 64
STAGES = 2  # one tile of keys is multiplied while the next is loaded
CONSUMERS = 2  # warpgroups that at the end hold half of the output's channels each
HALF = HEAD_DIM // CONSUMERS
WARPS = WARPGROUP // WARP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout(AttentionLayout):
    """A layout with heads in groups of 64, and any number of tiles."""

    heads: int = dataclasses.field(default=HEADS, init=False)
    cluster: int = 1

    reduces: ClassVar[bool] = False  # all shared memory is taken

    @property
    def loaders(self) -> int:
        """Number of warpgroups that load keys."""
        return 1

    @property
    def staged_loads(self) -> int:
        """Number of loads of stored rows per lane that have a place in shared memory."""
        return STAGED_LOADS

    @property
    def warpgroups(self) -> int:
        return CONSUMERS + self.loaders

    @property
    def common_bytes(self) -> int:
        """Shared memory that both kernels need, without barriers."""
        tiles = (HEADS + STAGES * KEYS) * HEAD_DIM * 2
        return tiles + staging_bytes(self.staged_loads, self.loaders) + STAGES * KEYS * 4

    def scratch(self, queries: int, groups: int) -> Scratch | None:
        if self.cluster == 1:
            return None
        lanes = CONSUMERS * WARPGROUP
        loads = HEADS * HEAD_DIM // (self.cluster * lanes * 8)
        return Scratch.of(self, queries, groups, part=(loads, lanes, 8))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Shared memory of a block, through which its roles communicate.

    Each kernel has a subclass with further fields, which also determines the order in memory.
    """

    keys: Tile  # [KEYS, HEAD_DIM]; copies: stages
    staging: Shared | None  # u8, from ``take_staging``; None if rows are only copied
    of_keys: Shared  # f32 [STAGES, KEYS]: factors from ``KeyLoader.store``, or biases if rows are only copied
    full: Barrier  # per stage: its keys are loaded
    free: Barrier  # per stage: all products with its keys are complete


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """How often a block has used what its queries share, before one of its queries."""

    queries: Value
    firsts: Value  # tiles in the first stage
    seconds: Value  # tiles in the second stage

    @classmethod
    def none(cls, machine: TensorCores) -> Before:
        zero = machine.constant(0, "i32")
        return cls(queries=zero, firsts=zero, seconds=zero)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The work of a block on one query, as seen by one of its roles."""

    machine: TensorCores
    memory: Memory
    query: Query
    first_head: Value
    cluster: int
    rank: Value  # the block's number in its cluster
    tiles: Value  # number of tiles for this block, at least one, which may have no keys
    before: Before

    @classmethod
    def of(
        cls,
        machine: TensorCores,
        memory: Memory,
        query: Query,
        cluster: int,
        before: Before,
        tiles: Value | None = None,
    ) -> Block:
        """Return the work on a query. ``tiles`` is given if its number is known from before."""
        rank, computed = query.share(cluster)
        tiles = computed if tiles is None else tiles
        return cls(
            machine=machine,
            memory=memory,
            query=query,
            first_head=machine.block(1) * HEADS,
            cluster=cluster,
            rank=rank,
            tiles=tiles,
            before=before,
        )

    @property
    def after(self) -> Before:
        """What was used before the block's next query."""
        before = self.before
        return Before(
            queries=before.queries + 1,
            firsts=before.firsts + (self.tiles + 1) // STAGES,
            seconds=before.seconds + self.tiles // STAGES,
        )

    def uses(self, stage: Value) -> Value:
        """Return how many tiles a stage has had before this query's."""
        return select(stage == 0, self.before.firsts, self.before.seconds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """What the loader knows about tiles i, i + 1 and i + 2 when it is about to store tile i.

    Each lane handles one or two rows of each tile.
    """

    numbers: list[Value]  # key numbers of tile i + 1
    looked_up: list[Value]  # of tile i + 1
    later_numbers: list[Value]  # key numbers of tile i + 2
    rows: list[StoredRow] | list[Value]  # tile i: rows being loaded, or, if there is no room for both, their indices


def load_tiles(block: Block, form: AttendedFormat, loaders: int = 1) -> None:
    """Load tile after tile. Bytes are requested one tile ahead, and their addresses two and three tiles ahead."""
    machine, memory = block.machine, block.memory
    loader = KeyLoader(block.query, form, memory.staging, loaders)

    def tile(i: Index) -> Value:
        """Return the number of the block's i-th tile.

        The blocks of a cluster take tiles in turn. Thus blocks that get two of ten tiles begin with those of the
        window.
        """
        return block.rank + i * block.cluster

    def load(tile: Value, indices: list[Value]) -> list[StoredRow] | list[Value]:
        return [loader.load(tile, n, indices[n]) for n in range(len(indices))] if loader.loads_ahead else indices

    numbers = [loader.find(tile(i)) for i in range(3)]
    rows = load(tile(0), loader.resolve(tile(0), numbers[0], loader.look_up(tile(0), numbers[0])))
    looked_up = loader.look_up(tile(1), numbers[1])

    def step(i: Value, ahead: _Ahead) -> _Ahead:
        stage = i % STAGES
        keys, factors = memory.keys.copy(stage), memory.of_keys[stage]
        memory.free.copy(stage).wait((block.uses(stage) + i // STAGES & 1) ^ 1)
        if loader.loads_ahead:
            machine.wait_copies()
        for which, row in enumerate(ahead.rows):
            if not isinstance(row, StoredRow):
                row = loader.load(tile(i), which, row)
                machine.wait_copies()
            loader.store(which, row, keys, factors)
            machine.keep_order()  # with the work on both rows interleaved, there are too few registers
        machine.fence_shared()
        memory.full.copy(stage).arrive()
        # Issue loads in the order in which their results are needed. That also uses the addresses first that were found
        # first.
        rows = load(tile(i + 1), loader.resolve(tile(i + 1), ahead.numbers, ahead.looked_up))
        looked_up = loader.look_up(tile(i + 2), ahead.later_numbers)
        later_numbers = loader.find(tile(i + 3))
        return _Ahead(numbers=ahead.later_numbers, looked_up=looked_up, later_numbers=later_numbers, rows=rows)

    machine.loop(
        block.tiles, step, _Ahead(numbers=numbers[1], looked_up=looked_up, later_numbers=numbers[2], rows=rows)
    )
    if block.cluster > 1:  # all lanes of the cluster must arrive at the barrier in ``_merge_parts``
        machine.barrier("cluster")


# Softmax.
LOG2E = 1 / math.log(2)
LOGIT_SCALE = HEAD_DIM**-0.5 * LOG2E
LOWEST = -1e30  # used instead of -inf, since -inf - -inf is NaN
GROWTH = 8.0  # powers of two by which logits must exceed a peak before it is raised, and sums are rescaled
_ROUNDS = 1.5 * 2**23  # added to an f32 and taken from it again, this leaves a whole number
QUAD = 4  # lanes that hold a row of a product: each has two adjacent columns of every eight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The softmax of a lane's two rows so far."""

    peak: list[Value]  # is subtracted from logits, which exceed it little; the same in the four lanes of a quad
    total: list[Value]  # sum of the weights: this lane's part of it

    @classmethod
    def of_sinks(cls, block: Block) -> Softmax:
        """Return the softmax before any key, which contains only the sinks.

        In a cluster only one block includes them.
        """
        machine, sinks = block.machine, block.query.inputs.sinks
        row = machine.hold(product_row(machine))  # for each query anew, because there are no registers to keep it in
        logits = [sinks.load_floats(block.first_head + row + 8 * i, count=1)[0] * LOG2E for i in range(2)]
        logits = [logit.maximum(LOWEST) for logit in logits]
        peak, counts = [whole(logit) for logit in logits], machine.thread % QUAD == 0
        if block.cluster > 1:
            peak = [select(block.rank == 0, value, LOWEST) for value in peak]
            counts = counts & (block.rank == 0)
        return cls(peak, [select(counts, machine.exp2(a - b), 0.0) for a, b in zip(logits, peak, strict=True)])

    def times(self, factors: list[Value]) -> Softmax:
        """Return this with totals that are multiplied by a factor for each row, and the peak as it is."""
        return Softmax(self.peak, [total * factor for total, factor in zip(self.total, factors, strict=True)])

    def over_quads(self, machine: TensorCores) -> Softmax:
        """Return this with the sums of whole rows in each lane."""
        return Softmax(self.peak, [over_quad(machine, add, value) for value in self.total])


def over_quad(machine: TensorCores, op: Op, value: Value) -> Value:
    """Reduce ``value`` over the lanes that hold a row. All of them get the result."""
    for distance in (1, 2):
        value = op(value, machine.shuffle_xor(value, distance))
    return value


def whole(peak: Value) -> Value:
    """Round a peak to a whole number: then sums and weights in f16 are rescaled by powers of two, which is exact."""
    return peak + _ROUNDS - _ROUNDS


def any_of_warp(machine: TensorCores, condition: Value) -> Value:
    """Return an i32: 1 if the condition holds in any lane of the warp, else 0."""
    return machine.reduce_warp("max", select(condition, machine.constant(1, "i32"), 0))


def row_of(n: int) -> int:
    """Return which of a lane's two rows element n of a product belongs to."""
    return n // 2 % 2


def column_of(n: int) -> int:
    """Return which of a lane's columns element n of a product belongs to: two of every eight columns are its own."""
    return n // 4 * 2 + n % 2


def load_of_keys(machine: TensorCores, numbers: Shared) -> list[Value]:
    """Load the numbers f32 [keys] of a lane's columns."""
    pairs = numbers.view((numbers.shape[0] // 8, QUAD, 2), "f32")
    return [x for j in range(pairs.shape[0]) for x in pairs.load_floats(j, machine.thread % QUAD, 0, count=2)]


def scale_logits(
    machine: TensorCores, logits: list[Value], factors: list[Value], key_of: Callable[[int], int] = column_of
) -> list[Value]:
    """Convert q . k to logits in powers of two, with the factors of a lane's keys, from ``KeyLoader.store``.

    ``key_of`` says which of them an element of the product belongs to. The logits of a missing key are -inf.
    """
    scaled = list(logits)
    for key, factor in enumerate(factors):  # one after the other, because there are few registers
        scale, bias = factor * LOGIT_SCALE, select(factor >= 0.0, machine.constant(0.0, "f32"), -math.inf)
        for n in (n for n in range(len(logits)) if key_of(n) == key):
            scaled[n] = machine.fma(logits[n], scale, bias)
    return scaled


def scale_without_factors(machine: TensorCores, logits: list[Value], biases: list[Value]) -> list[Value]:
    """Convert q . k to logits in powers of two, with the biases of a lane's columns, where all factors are 1."""
    scale = machine.constant(LOGIT_SCALE, "f32")
    return [machine.fma(x, scale, biases[column_of(n)]) for n, x in enumerate(logits)]


def raised(machine: TensorCores, peak: list[Value], logits: list[Value]) -> list[Value]:
    """Return the peaks of a lane's two rows, higher ones where logits of a tile exceed them by far."""
    tops = _over_rows(maximum, logits)

    def rise(_: Value, peak: list[Value]) -> list[Value]:
        of_rows = [over_quad(machine, maximum, top) for top in tops]
        return [select(top > old + GROWTH, whole(top), old) for top, old in zip(of_rows, peak, strict=True)]

    exceeds = (tops[0] > peak[0] + GROWTH) | (tops[1] > peak[1] + GROWTH)
    return machine.loop(any_of_warp(machine, exceeds), rise, peak)


def weigh(machine: TensorCores, logits: list[Value], peak: list[Value]) -> tuple[list[Value], Softmax]:
    """Return a tile's weights relative to a peak, and the softmax of this tile alone."""
    weights = [machine.exp2(logit - peak[row_of(n)]) for n, logit in enumerate(logits)]
    return weights, Softmax(peak, _over_rows(add, weights))


def _over_rows(op: Op, values: list[Value]) -> list[Value]:
    """Reduce a lane's elements of each of its two rows."""
    return [fold_tree(op, [value for n, value in enumerate(values) if row_of(n) == row]) for row in range(2)]


# The output.
_STORED = 32  # channels of a row that are stored at once
_TURNED_FROM = NOPE_DIM - HALF  # first channel with rope, within the second half


def finish_output(block: Block, outputs: Outputs, sums: list[Value], softmax: Softmax, half: Value) -> None:
    """Divide the sums of weighted keys by the sums of weights, and store the result.

    Args:
      outputs: buffers.
      sums: the warpgroup's half of the channels, not divided yet.
      softmax: with the sums of whole rows.
      half: which half of the channels.
    """
    if block.cluster == 1:
        inverse = [block.machine.reciprocal(value) for value in softmax.total]
        means, first = [value * inverse[row_of(n)] for n, value in enumerate(sums)], 0
    else:
        assert outputs.scratch is not None
        means = _merge_parts(block, outputs.scratch, sums, softmax)
        first = block.rank * (HALF // block.cluster)
    _store(block, outputs.out, means, half, first)


def _merge_parts(block: Block, scratch: Scratch, sums: list[Value], softmax: Softmax) -> list[Value]:
    """Merge the parts of all blocks of a cluster. Each block returns 1 / cluster of the channels.

    Parts are exchanged as means, in f16, which is the precision of the weights they were computed with.
    """
    machine, cluster, row = block.machine, block.cluster, product_row(block.machine)
    rank, lane, query, group = block.rank, machine.thread, block.query.number, machine.block(1)
    for i in range(2):
        pair = [softmax.peak[i], softmax.total[i]]
        where = (lane % QUAD == 0) & (lane < WARPGROUP)
        scratch.stats.store_floats(pair, query, group, rank, row + 8 * i, 0, where=where)
    inverse = [machine.reciprocal(value.maximum(2.0**-126)) for value in softmax.total]  # 0 if there was no key
    means = [value * inverse[row_of(n)] for n, value in enumerate(sums)]
    part = len(sums) // cluster  # number of a lane's values that go to one block
    for to in range(cluster):
        mine = [machine.to_f16(*means[n : n + 2]) for n in range(to * part, (to + 1) * part, 2)]
        for n in range(0, len(mine), 4):
            scratch.parts.store_words(mine[n : n + 4], query, group, to, rank, n // 4, lane, 0)
    machine.barrier("cluster")
    found = [
        [scratch.stats.load_floats(query, group, source, row + 8 * i, 0, count=2) for source in range(cluster)]
        for i in range(2)
    ]
    words = [
        [
            word
            for n in range(part // 8)
            for word in scratch.parts.load_words(query, group, rank, source, n, lane, 0, count=8)
        ]
        for source in range(cluster)
    ]
    shares = []
    for pairs in found:
        top = fold(maximum, [peak for peak, _ in pairs])
        weights = [total * machine.exp2(peak - top) for peak, total in pairs]
        inverse_sum = machine.reciprocal(fold(add, weights))
        shares.append([weight * inverse_sum for weight in weights])
    merged = [machine.constant(0.0, "f32")] * part
    for source in range(cluster):
        for n, word in enumerate(words[source]):
            for i, value in enumerate(machine.from_f16(word)):
                merged[2 * n + i] = machine.fma(value, shares[n % 2][source], merged[2 * n + i])
    return merged


def _store(block: Block, out: Any, means: list[Value], half: Value, first: Index) -> None:
    """Store the channels from ``first`` on of each warpgroup's half, with the inverse rope applied to RoPE channels.

    The lanes of a quad have two adjacent channels each of every eight. In bf16 they are less than a sector of device
    memory, so quads exchange them first: of 32 channels, each lane stores eight. Operand rows have an order in which
    they need not.
    """
    machine, query = block.machine, block.query
    thread = machine.hold(machine.thread)  # no places are known before, as there are no registers to keep them in
    lane, warp = thread % WARP, thread // WARP
    columns = len(means) * 2  # of a warp's 16 rows
    head = block.first_head + warp % 4 * 16 + lane // QUAD
    turns = _turns(block, columns, half, first)
    together = min({RoundedRows: GROUP, OperandRows: SEGMENT}.get(type(out), _STORED), columns)
    for start in range(0, columns, together):
        of_rows: tuple[list[list[Value]], ...] = [], []  # pairs of f32, of a lane's two rows
        for column in range(start, start + together, 8):
            pairs = [means[column // 2 : column // 2 + 2], means[column // 2 + 2 : column // 2 + 4]]
            if column in turns:
                pairs = turns[column].back(pairs)
            for row, values in zip(of_rows, pairs, strict=True):
                row.append(values)
        for i, row in enumerate(of_rows):
            channel = half * HALF + (first + start)
            if isinstance(out, RoundedRows):
                group = (head + 8 * i) * (HEAD_DIM // GROUP) + channel // GROUP
                store_group(machine, out, row, query.number, group)
            elif isinstance(out, OperandRows):
                words = [machine.to_bf16(*pair) for pair in row]
                store_product(machine, out, words, query.number, (head + 8 * i) * HEAD_DIM + channel)
            elif out.dtype.itemsize == 2:
                words = [machine.to_bf16(*pair) for pair in row]
                channel = lane % QUAD * 8 + channel
                out.store_words([*quad_transposed(machine, words)], query.batch, query.token, head + 8 * i, channel)
            else:
                for n, pair in enumerate(row):
                    place = lane % QUAD * 2 + channel + 8 * n
                    out.store_floats(pair, query.batch, query.token, head + 8 * i, place)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """An angle by which a lane's pairs of channels are turned back, where they have a rope."""

    where: Value
    cos: Value
    sin: Value

    def back(self, pairs: list[list[Value]]) -> list[list[Value]]:
        """Rotate pairs of two rows by minus the angle."""
        return [
            [
                select(self.where, a * self.cos + b * self.sin, a),
                select(self.where, b * self.cos - a * self.sin, b),
            ]
            for a, b in pairs
        ]


def _turns(block: Block, columns: int, half: Value, first: Index) -> dict[int, _Turn]:
    """Load the angles of all channels with rope, at once. Returns those of every eight columns by the first of them."""
    machine, query, angles = block.machine, block.query, block.query.inputs.angles
    turns: dict[int, _Turn] = {}
    if angles is None:
        return turns
    for column in range(max(0, _TURNED_FROM + columns - HALF), columns, 8):
        channel = (machine.thread % QUAD * 2 + column + first) - _TURNED_FROM  # number among the RoPE channels
        where = (half == 1) & (channel >= 0)
        pair = select(where, channel, 0) // 2
        parts = (
            angles.load_floats(query.batch, query.token, pair + part, count=1, where=where)
            for part in (0, ROPE_DIM // 2)
        )
        turns[column] = _Turn(where, *(value for (value,) in parts))
    return turns
