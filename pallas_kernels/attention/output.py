"""The last steps of attention: merge the sums of a cluster's blocks, apply the inverse rope, and store the output.

In a block, each of the two multiplying warpgroups holds half of the channels of 64 heads. They are spread over its
lanes like any product of tensor cores.
"""

from __future__ import annotations

from pallas_kernels.attention.block import HALF, STAGES, Block
from pallas_kernels.attention.inputs import NOPE_DIM
from pallas_kernels.attention.layout import Outputs, Scratch
from pallas_kernels.attention.softmax import QUAD, Softmax, row_of
from pallas_kernels.language.lanes import Buffer, add, fold, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP, Index, Value, select
from pallas_kernels.language.tensor_cores import product_row

_STORED_BYTES = 256  # bytes of a row that are stored at once
_PADDING = 16  # bytes between rows, which spread the rows over the banks of shared memory
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
    rank, lane, query, group = block.rank, machine.thread, machine.block(0), machine.block(1)
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


def _store(block: Block, out: Buffer, means: list[Value], half: Value, first: Index) -> None:
    """Store the channels from ``first`` on of each warpgroup's half, with the inverse rope applied to RoPE channels.

    Each warp's rows go through shared memory, so that they are stored to device memory in whole sectors. The memory
    used is the stage of the last tile but one, which nobody reads any more.
    """
    machine, query, memory = block.machine, block.query, block.memory
    next_stage = block.tiles % STAGES
    memory.free.copy(next_stage).wait((block.tiles // STAGES & 1) ^ 1)
    lane, warp = machine.thread % WARP, machine.thread // WARP
    columns, size = len(means) * 2, out.dtype.itemsize  # columns of a warp's 16 rows
    width = min(columns, _STORED_BYTES // size)  # columns that are stored at once
    stride = width * size + _PADDING  # bytes from a row to the next
    rows = warp * (16 * stride) + memory.keys.copy(next_stage).offset  # address of the warp's first row
    for start in range(0, columns, width):
        for column in range(start, start + width, 8):
            pairs = [means[column // 2 : column // 2 + 2], means[column // 2 + 2 : column // 2 + 4]]
            if query.inputs.angles is not None and column + HALF - columns >= _TURNED_FROM:
                channel = (lane % QUAD * 2 + column + first) - _TURNED_FROM  # number among the RoPE channels
                pairs = _turn_back(block, pairs, channel, (half == 1) & (channel >= 0))
            for i, values in enumerate(pairs):
                words = [machine.to_bf16(*values)] if size == 2 else [machine.bits(value) for value in values]
                at = (lane // QUAD + 8 * i) * stride + lane % QUAD * (2 * size) + (rows + (column - start) * size)
                machine.store_shared(at, words, 2 * size, True)
        machine.barrier("warp")
        units = width * size // 16  # per row
        for n in range(16 * units // WARP):
            row, unit = (lane + n * WARP) // units, (lane + n * WARP) % units
            words = machine.load_shared(row * stride + unit * 16 + rows, 16)
            head = block.first_head + warp % 4 * 16 + row
            channel = half * HALF + unit * (16 // size) + (first + start)
            out.store_words(words, query.batch, query.token, head, channel)
        machine.barrier("warp")


def _turn_back(block: Block, pairs: list[list[Value]], channel: Value, turns: Value) -> list[list[Value]]:
    """Rotate pairs of two rows by minus the angles of the RoPE channels from ``channel`` on, where ``turns``."""
    pair = select(turns, channel, 0) // 2
    cos, sin = (block.memory.angles.load_floats(part, pair, count=1)[0] for part in range(2))
    return [[select(turns, a * cos + b * sin, a), select(turns, b * cos - a * sin, b)] for a, b in pairs]
