"""The last steps of attention: merge the sums of a cluster's blocks, apply the inverse rope, and store the output.

In a block, each of the two multiplying warpgroups holds half of the channels of 64 heads. They are spread over its
lanes like any product of tensor cores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.attention.block import HALF, Block
from pallas_kernels.attention.inputs import HEAD_DIM, NOPE_DIM, ROPE_DIM
from pallas_kernels.attention.layout import Outputs, Scratch
from pallas_kernels.attention.softmax import QUAD, Softmax, row_of
from pallas_kernels.language.lanes import add, fold, maximum, quad_transposed
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import product_row
from pallas_kernels.language.values import Index, Value, select
from pallas_kernels.operand_rows import SEGMENT, OperandRows, store_product
from pallas_kernels.rounding import GROUP, RoundedRows, store_group

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
