"""What the kernels for many queries share on Hopper and Blackwell, in the order in which a block needs it.

    Block         the work of a block on one query, with its layout and its shared memory
    load_tiles    the role that loads: stored rows are converted to f16 tiles of 64 keys, in two stages
    Softmax       a running softmax, in powers of two, over the rows of products of heads (rows) and keys (columns)
    finish_output merging the parts of a cluster, the inverse rope, storing

A block has 64 rows, for as many heads of a query. Where a query has fewer heads left, the other rows are computed of
whatever was loaded for them, and are not stored: no row of a product depends on another one. One or two warpgroups
load. In two other warpgroups the output ends up, half of its channels in each. How queries are loaded and what is
multiplied when are specific to the architecture.

If there are too few queries to fill the GPU, a cluster of blocks shares the tiles of one query and merges the results.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax

from pallas_kernels.activations import GROUP, SEGMENT, OperandRows, RoundedRows
from pallas_kernels.attention.inputs import HEAD_DIM, NOPE_DIM, ROPE_DIM
from pallas_kernels.attention.keys import KEYS, STAGED_LOADS, KeyLoader, Query, StoredRow, staging_bytes
from pallas_kernels.attention.layout import AttentionLayout, Outputs, Scratch
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.fragment import QUAD, Fragment, PerColumn, PerRow
from pallas_kernels.language.lanes import Buffer, add, fold, maximum, quad_transposed
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.pipeline import Pipeline
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.language.values import Condition, Index, Value, select

HEADS = 64  # rows of a block
LEAST_HEADS = 8  # a query has a multiple of so many: a warp stores a row of each quad at once
STAGES = 2  # one tile of keys is multiplied while the next is loaded
CONSUMERS = 2  # warpgroups that at the end hold half of the output's channels each
HALF = HEAD_DIM // CONSUMERS
WARPS = WARPGROUP // WARP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout(AttentionLayout):
    """A layout with heads in groups of 64, of which the last may have fewer, and any number of tiles."""

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

    def scratch(self, queries: int, groups: int) -> Scratch[jax.ShapeDtypeStruct] | None:
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
    factors: Shared  # f32 [STAGES, KEYS], as of ``KeyLoader.store``
    pipe: Pipeline  # a stage is full when its keys are loaded, and free when all products with them are complete


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
class Rows:
    """The heads of a query that are the rows of a block's products."""

    machine: TensorCores
    query: Query
    first_head: Value

    @property
    def have_sinks(self) -> Condition:
        """Whether the block's sums include the sinks."""
        return True

    def has_head(self, head: Value) -> Condition:
        """Return whether a lane's row has a head, given its number: rows of a query's last block may have none."""
        heads = self.query.inputs.sinks.shape[0]
        return True if heads % HEADS == 0 else head < heads

    def have_heads(self, head: Value) -> Condition:
        """Return whether the rows of a warp's quads have heads, of which ``LEAST_HEADS`` all exist or none.

        The whole warp branches alike, and is told so by an instruction: else ptxas keeps a second copy of each shuffle
        for warps that are divided, and spills.
        """
        heads = self.query.inputs.sinks.shape[0]
        return True if heads % HEADS == 0 else self.machine.reduce_warp("min", head) < heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block(Rows):
    """The work of a block on one query, as seen by one of its roles."""

    memory: Memory
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
    def have_sinks(self) -> Condition:
        return True if self.cluster == 1 else self.rank == 0

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
        keys, factors = memory.keys.copy(stage), memory.factors[stage]
        use = memory.pipe.use_of(stage, block.uses(stage) + i // STAGES)
        use.acquire()
        if loader.loads_ahead:
            machine.wait_copies()
        for which, row in enumerate(ahead.rows):
            if not isinstance(row, StoredRow):
                row = loader.load(tile(i), which, row)
                machine.wait_copies()
            loader.store(which, row, keys, factors)
            machine.keep_order()  # with the work on both rows interleaved, there are too few registers
        machine.fence_shared()
        use.commit()
        # Issue loads in the order in which their results are needed. That also uses the addresses first that were found
        # first.
        rows = load(tile(i + 1), loader.resolve(tile(i + 1), ahead.numbers, ahead.looked_up))
        looked_up = loader.look_up(tile(i + 2), ahead.later_numbers)
        later_numbers = loader.find(tile(i + 3))
        return _Ahead(numbers=ahead.later_numbers, looked_up=looked_up, later_numbers=later_numbers, rows=rows)

    machine.loop(
        block.tiles, step, _Ahead(numbers=numbers[1], looked_up=looked_up, later_numbers=numbers[2], rows=rows)
    )
    if loader.loads_ahead:
        machine.wait_copies()  # of a tile that does not exist: those of the next query go to the same places
    if block.cluster > 1:  # all lanes of the cluster must arrive at the barrier in ``_merge_parts``
        machine.barrier("cluster")


# Softmax.
LOG2E = 1 / math.log(2)
LOGIT_SCALE = HEAD_DIM**-0.5 * LOG2E
LOWEST = -1e30  # used instead of -inf, since -inf - -inf is NaN
GROWTH = 8.0  # powers of two by which logits must exceed a peak before it is raised, and sums are rescaled
_ROUNDS = 1.5 * 2**23  # added to an f32 and taken from it again, this leaves a whole number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The softmax of the rows so far."""

    peak: PerRow  # is subtracted from logits, which exceed it little
    total: PerRow  # sum of the weights: this lane's part of it

    @classmethod
    def of_sinks(cls, block: Rows) -> Softmax:
        """Return the softmax before any key, which contains only the sinks.

        Of blocks that share a query's keys only one includes them.
        """
        machine, sinks = block.machine, block.query.inputs.sinks
        row = machine.hold(product_row(machine))  # for each query anew, because there are no registers to keep it in

        def load(head: Value) -> Value:
            (sink,) = sinks.load_floats(head, count=1, where=block.has_head(head))
            return sink * LOG2E

        logits = PerRow([load(block.first_head + row + n) for n in (0, 8)])
        logits = logits.map(lambda logit: logit.maximum(LOWEST))
        peak, counts = logits.map(whole), machine.thread % QUAD == 0
        if (included := block.have_sinks) is not True:
            peak = peak.map(lambda value: select(included, value, LOWEST))
            counts = counts & included
        return cls(peak, logits.map(lambda a, b: select(counts, machine.exp2(a - b), 0.0), peak))

    def times(self, factors: PerRow) -> Softmax:
        """Return this with totals that are multiplied by a factor for each row, and the peak as it is."""
        return Softmax(self.peak, self.total.map(lambda total, factor: total * factor, factors))

    def over_quads(self) -> Softmax:
        """Return this with the sums of whole rows in each lane."""
        return Softmax(self.peak, self.total.over_quad(add))


def whole(peak: Value) -> Value:
    """Round a peak to a whole number: then sums and weights in f16 are rescaled by powers of two, which is exact."""
    return peak + _ROUNDS - _ROUNDS


def scale_logits(machine: TensorCores, logits: Fragment, factors: PerRow | PerColumn) -> Fragment:
    """Convert q . k to logits in powers of two, with the factors of keys from ``KeyLoader.store``.

    The logits of a missing key are -inf.
    """

    def scaled(logit: Value, factor: Value) -> Value:
        bias = select(factor >= 0.0, machine.constant(0.0, "f32"), -math.inf)
        return machine.fma(logit, factor * LOGIT_SCALE, bias)

    return logits.map(scaled, factors)  # the compiler computes each bias once


def raised(machine: TensorCores, peak: PerRow, logits: Fragment) -> PerRow:
    """Return the peaks of the rows, higher ones where logits of a tile exceed them by far."""
    tops = logits.lane_over_rows(maximum)

    def rise(peak: PerRow) -> PerRow:
        of_rows = tops.over_quad(maximum)
        return of_rows.map(whole_if_raised, peak)

    one, other = tops.map(lambda top, old: top > old + GROWTH, peak).values
    return machine.branch_warp(one | other, rise, peak)


def whole_if_raised(top: Value, peak: Value) -> Value:
    """Return a head's peak after a tile whose largest logit is ``top``."""
    return select(top > peak + GROWTH, whole(top), peak)


def weigh(machine: TensorCores, logits: Fragment, peak: PerRow) -> tuple[Fragment, Softmax]:
    """Return a tile's weights relative to a peak, and the softmax of this tile alone."""
    weights = logits.map(lambda logit, top: machine.exp2(logit - top), peak)
    return weights, Softmax(peak, weights.lane_over_rows(add))


# The output.
_STORED = 32  # channels of a row that are stored at once
_TURNED_FROM = NOPE_DIM - HALF  # first channel with rope, within the second half


def finish_output(block: Block, outputs: Outputs[Buffer], sums: Fragment, softmax: Softmax, half: Value) -> None:
    """Divide the sums of weighted keys by the sums of weights, and store the result.

    Args:
      block: the block's work on its query.
      outputs: buffers.
      sums: the warpgroup's half of the channels, not divided yet.
      softmax: with the sums of whole rows.
      half: which half of the channels.
    """
    if block.cluster == 1:
        means, first = sums.scale_rows(softmax.total.map(block.machine.reciprocal)), 0
    else:
        assert outputs.scratch is not None
        means = _merge_parts(block, outputs.scratch, sums, softmax)
        first = block.rank * (HALF // block.cluster)
    store_output(block, outputs.out, means, half, first, turns_of(block, means.columns, half, first))


def _merge_parts(block: Block, scratch: Scratch[Buffer], sums: Fragment, softmax: Softmax) -> Fragment:
    """Merge the parts of all blocks of a cluster. Each block returns 1 / cluster of the channels.

    Parts are exchanged as means, in f16, which is the precision of the weights they were computed with.
    """
    machine, cluster, rows = block.machine, block.cluster, PerRow.numbers(block.machine).values
    rank, lane, query, group = block.rank, machine.thread, block.query.number, machine.block(1)
    for row, *pair in zip(rows, softmax.peak.values, softmax.total.values, strict=True):
        where = (lane % QUAD == 0) & (lane < WARPGROUP)
        scratch.stats.store_floats(pair, query, group, rank, row, 0, where=where)
    means = sums.scale_rows(softmax.total.map(lambda x: machine.reciprocal(x.maximum(2.0**-126))))  # 0 without a key
    for to, part in enumerate(means.parts(HALF // cluster)):
        words = part.operand("f16").words
        for n in range(0, len(words), 4):
            scratch.parts.store_words(words[n : n + 4], query, group, to, rank, n // 4, lane, 0)
    machine.barrier("cluster")
    sources = range(cluster)
    found = [[scratch.stats.load_floats(query, group, source, row, 0, count=2) for source in sources] for row in rows]
    loads = HALF // cluster // 16
    parts = [
        [scratch.parts.load_words(query, group, rank, source, n, lane, 0, count=8) for n in range(loads)]
        for source in sources
    ]
    shares = []
    for pairs in found:
        top = fold(maximum, [peak for peak, _ in pairs])
        weights = [total * machine.exp2(peak - top) for peak, total in pairs]
        inverse_sum = machine.reciprocal(fold(add, weights))
        shares.append([weight * inverse_sum for weight in weights])
    merged = Fragment.zeros(machine, HALF // cluster)
    for part, *share in zip(parts, *shares, strict=True):
        halves = Fragment([half for words in part for word in words for half in machine.from_f16(word)])
        merged = halves.map(machine.fma, PerRow(share), merged)
    return merged


def store_output(
    block: Rows,
    out: Buffer | RoundedRows[Buffer] | OperandRows[Buffer],
    means: Fragment,
    half: Value,
    first: Index,
    turns: dict[int, Turn],
) -> None:
    """Store the channels from ``first`` on of each warpgroup's half, with the inverse rope applied to RoPE channels.

    ``turns`` are those of ``turns_of`` for these channels.

    The lanes of a quad have two adjacent channels each of every eight. In bf16 they are less than a sector of device
    memory, so quads exchange them first: of 32 channels, each lane stores eight. Operand rows have an order in which
    they need not.
    """
    machine, query = block.machine, block.query
    thread = machine.hold(machine.thread)  # no places are known before, as there are no registers to keep them in
    lane, warp = thread % WARP, thread // WARP
    head = block.first_head + warp % 4 * 16 + lane // QUAD
    together = min({RoundedRows: GROUP, OperandRows: SEGMENT}.get(type(out), _STORED), means.columns)
    have_heads = [block.have_heads(head + 8 * i) for i in range(2)]
    for start, part in zip(range(0, means.columns, together), means.parts(together), strict=True):
        for i in range(2):
            with machine.when(have_heads[i]):
                values = part.of_row(i)
                row = [values[n : n + 2] for n in range(0, len(values), 2)]
                row = [turns[at].back(pair) if (at := start + 8 * n) in turns else pair for n, pair in enumerate(row)]
                channel = half * HALF + (first + start)
                if isinstance(out, RoundedRows):
                    group = (head + 8 * i) * (HEAD_DIM // GROUP) + channel // GROUP
                    out.store_group(machine, row, query.number, group)
                elif isinstance(out, OperandRows):
                    words = [machine.to_bf16(*pair) for pair in row]
                    out.store_product(machine, words, query.number, (head + 8 * i) * HEAD_DIM + channel)
                elif out.dtype.itemsize == 2:
                    words = [machine.to_bf16(*pair) for pair in row]
                    channel = lane % QUAD * 8 + channel
                    out.store_words([*quad_transposed(machine, words)], query.batch, query.token, head + 8 * i, channel)
                else:
                    for n, pair in enumerate(row):
                        place = lane % QUAD * 2 + channel + 8 * n
                        out.store_floats(pair, query.batch, query.token, head + 8 * i, place)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An angle by which a lane's pairs of channels are turned back, where they have a rope."""

    where: Value
    cos: Value
    sin: Value

    def back(self, pair: list[Value]) -> list[Value]:
        """Rotate a pair by minus the angle."""
        a, b = pair
        turned = a * self.cos + b * self.sin, b * self.cos - a * self.sin
        return [select(self.where, new, old) for new, old in zip(turned, pair, strict=True)]


def turns_of(block: Rows, columns: int, half: Value, first: Index) -> dict[int, Turn]:
    """Load the angles of all channels with rope, at once. Returns those of every eight columns by the first of them."""
    machine, query, angles = block.machine, block.query, block.query.inputs.angles
    turns: dict[int, Turn] = {}
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
        turns[column] = Turn(where, *(value for (value,) in parts))
    return turns
