"""Scores of the lightning indexer, from keys in blocks of the pool.

    I_s = sum over heads h of w_h relu(q_h . k_s)

A block scores tiles of entries for one query, whose heads it loads once. Values of 4-bit formats are multiplied in f16.
With ``nvfp4`` they are exact there, divided by 2^7. With ``mxfp4`` a value is divided by the largest scale of its row,
which multiplies the score in f32. A group whose scale is more than 2^23 times smaller than the largest is then rounded
to multiples of 2^-24. Keys of f32 and bf16 are multiplied with three TF32 products each, which is nearly f32.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.scores.inputs import ScoreInputs
from pallas_kernels.triton_gpu import device
from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.numbers import e4m3_to_f16, from_ue8m0
from pallas_kernels.triton_gpu.operands import Keys, Leaf, Paging, next_power_of_2

KEY_FORMATS = ("f32", "bf16", "nvfp4", "mxfp4")
ENTRIES = {"f32": 32, "bf16": 32, "nvfp4": 64, "mxfp4": 64}  # of a tile


class Inputs(NamedTuple):
    """Q queries of B requests, and where the keys are found that they are compared with."""

    queries: Keys  # codes [Q, heads, dim / 2] with their scales, or f32 [Q, heads, dim]
    weights: Leaf  # f32 [Q, heads]
    keys: Keys  # [layers, num_blocks, per_block, ...]
    layer: Leaf  # i32 [1]
    block_table: Leaf  # i32 [requests, max_blocks]
    slots: Leaf  # i32 [B]
    visible: Leaf  # i32 [Q]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSizes:
    """Sizes of a call, and how its work is divided."""

    tokens: int  # queries of a request
    num_heads: int
    dim: int
    key_format: str
    entries: int  # of a tile
    tiles: int  # of a block

    @property
    def heads(self) -> int:
        """The power of two, at least 16, that holds ``num_heads``."""
        return max(16, next_power_of_2(self.num_heads))


@triton.jit
def _values(given: Keys, row, there, sizes: tl.constexpr):
    """4-bit rows in f16, [rows, dim], and the factors [rows] by which these are to be multiplied; 0 where not there.

    All rows have their channels in the same order, which is not that of the codes. A word of eight codes becomes four
    pairs: shifted by 12 - 4 i, its codes i and i + 4 have their signs where two f16 have them, so that a pair takes a
    few operations on 32 bits.
    """
    rows: tl.constexpr = row.shape[0]
    dim: tl.constexpr = sizes.dim
    width: tl.constexpr = 2 if sizes.key_format == "nvfp4" else 4  # words that share a scale
    groups: tl.constexpr = dim // (8 * width)
    group, word = tl.arange(0, groups)[None, :], tl.arange(0, dim // 8)[None, :]
    codes = given.codes.to(tl.pointer_type(tl.int32))
    words = tl.load(codes + row[:, None] * (dim // 8) + word, mask=there[:, None], other=0)
    byte = tl.load(given.scale + row[:, None] * groups + group, mask=there[:, None], other=0)
    if sizes.key_format == "nvfp4":
        step = e4m3_to_f16(byte) * 32768.0
        factor = tl.full((rows,), 128.0, tl.float32)
    else:
        exponent = byte.to(tl.int32)
        largest = tl.max(exponent, 1)
        # 2^14 times the scale over the largest of the row.
        step = tl.maximum(exponent - largest[:, None] + (127 + 14), 0) << 23
        step = step.to(tl.float32, bitcast=True)
        factor = from_ue8m0(largest)
    step = step.to(tl.float16)[:, :, None]
    p0 = _pairs(words << 12, step, rows, dim)
    p1 = _pairs(words << 8, step, rows, dim)
    p2 = _pairs(words << 4, step, rows, dim)
    p3 = _pairs(words, step, rows, dim)
    return tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (rows, dim)), factor


@triton.jit
def _pairs(words, step, rows: tl.constexpr, dim: tl.constexpr):
    bits = (words & -2147450880) | ((words & 0x70007000) >> 3)
    low = bits.to(tl.int16).to(tl.float16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    values = tl.reshape(tl.join(low, high), (rows, step.shape[1], dim // 4 // step.shape[1]))
    return tl.reshape(values * step, (rows, dim // 4))


@triton.jit
def indexer_scores_kernel(
    inputs: Inputs,
    out,  # f32 [Q, max_blocks * per_block]
    sizes: tl.constexpr,
    paging: tl.constexpr,
):
    dim: tl.constexpr = sizes.dim
    per_block: tl.constexpr = paging.per_block
    most: tl.constexpr = paging.max_blocks * per_block
    query = tl.program_id(0)
    slot = tl.load(inputs.slots + query // sizes.tokens)
    live = (slot >= 0) & (slot < paging.requests)
    seen = tl.where(live, tl.minimum(tl.load(inputs.visible + query), most), 0)
    first = tl.program_id(1) * sizes.tiles * sizes.entries
    if first < seen:
        head = tl.arange(0, sizes.heads)
        is_head = head < sizes.num_heads
        at = query.to(tl.int64) * sizes.num_heads + head
        weight = tl.load(inputs.weights + at, mask=is_head, other=0.0)[None, :]
        is_packed: tl.constexpr = sizes.key_format == "nvfp4" or sizes.key_format == "mxfp4"
        if is_packed:
            q_all, q_factor = _values(inputs.queries, at, is_head, sizes)
            q_all, weight = tl.trans(q_all), weight * q_factor[None, :]
        else:
            q_all = inputs.queries.codes + at[:, None] * dim + tl.arange(0, dim)[None, :]
            q_all = tl.trans(tl.load(q_all, mask=is_head[:, None], other=0.0))
        pool = tl.load(inputs.layer).to(tl.int64) * paging.num_blocks * per_block
        for begin in tl.range(first, tl.minimum(first + sizes.tiles * sizes.entries, seen), sizes.entries):
            entry = begin + tl.arange(0, sizes.entries)
            there = entry < seen
            table = inputs.block_table + slot * paging.max_blocks
            block = tl.load(table + entry // per_block, mask=there, other=-1)
            there = there & (block >= 0) & (block < paging.num_blocks)
            row = pool + tl.where(there, block * per_block + entry % per_block, 0)
            if is_packed:
                key, factor = _values(inputs.keys, row, there, sizes)
                dots = tl.dot(key, q_all)
            else:
                key = inputs.keys.codes + row[:, None] * dim + tl.arange(0, dim)[None, :]
                key = tl.load(key, mask=there[:, None], other=0.0).to(tl.float32)
                dots = tl.dot(key, q_all, input_precision="tf32x3")
            positive = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(positive * weight, 1)
            if is_packed:
                score = score * factor
            # NaN ranks first. A score of -infinity would rank with those of entries that are not visible.
            score = tl.where(score == score, tl.maximum(score, -3.4028234663852886e38), float("inf"))
            tl.store(out + query.to(tl.int64) * most + entry, score, mask=entry < seen)


def unsupported_scores(*, key_format: str, heads: int, key_dim: int, entries_per_block: int) -> str | None:
    """Return why the kernel does not support these formats and sizes, or None if it does."""
    if key_format not in KEY_FORMATS:
        return f"key_format must be one of {KEY_FORMATS}, got {key_format!r}"
    if key_dim not in (32, 64, 128):
        return f"key_dim must be 32, 64 or 128, got {key_dim}"
    if heads > 128:
        return f"heads must be at most 128, got {heads}"
    del entries_per_block  # any will do
    return None


def indexer_scores(inputs: ScoreInputs[jax.Array], *, key_format: str) -> jax.Array:
    """Compute the scores of the entries that queries see.

    Args:
      inputs: queries, head weights, and the tables in which keys are found, as ``pallas_kernels.ScoreInputs``. Queries
        of the formats "f32" and "bf16" are an array f32 [B, T, heads, key_dim].
      key_format: of queries and keys: "f32", "bf16", "nvfp4" or "mxfp4".

    Returns:
      f32 [B, T, max_blocks * entries_per_block]. Scores from ``visible`` on, and those of a slot that is not there, are
      undefined. A NaN is +inf; all others are at least the lowest finite number.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not support this format or these sizes.
    """
    weights, codes = inputs.weights, inputs.keys.codes
    chex.assert_rank([weights, codes, inputs.visible], [3, 4, 2])
    is_packed = key_format in ("nvfp4", "mxfp4")
    batch, tokens, num_heads = weights.shape
    dim, per_block = codes.shape[-1] * (2 if is_packed else 1), codes.shape[2]
    sizes = dict(heads=num_heads, key_dim=dim, entries_per_block=per_block)
    if reason := unsupported_scores(key_format=key_format, **sizes):
        raise ValueError(reason)
    queries = Keys.of(inputs.queries) if is_packed else Keys(inputs.queries, None)
    chex.assert_shape(queries.codes, (batch, tokens, num_heads, codes.shape[-1]))
    chex.assert_type(queries.codes, codes.dtype if is_packed else jnp.float32)
    chex.assert_type(
        [weights, inputs.layer, inputs.block_table, inputs.slots, inputs.visible], [jnp.float32] + 4 * [jnp.int32]
    )
    paging, count = Paging.of(codes, inputs.block_table), batch * tokens
    most = paging.max_blocks * per_block
    if not count * most:
        return jnp.zeros((batch, tokens, most), jnp.float32)
    entries = ENTRIES[key_format]
    all_tiles = -(-most // entries)
    # Each block loads the query's heads, so it does several tiles once each multiprocessor has the four blocks that it
    # can run at once.
    tiles = -(-count * all_tiles // (4 * device.multiprocessors()))
    sizes = ScoreSizes(tokens=tokens, num_heads=num_heads, dim=dim, key_format=key_format, entries=entries, tiles=tiles)
    config = Config(grid=(count, -(-all_tiles // tiles)), constants=dict(sizes=sizes, paging=paging))
    given = Inputs(
        queries=queries,
        weights=weights,
        keys=Keys.of(inputs.keys) if is_packed else Keys(codes, None),
        layer=inputs.layer,
        block_table=inputs.block_table,
        slots=inputs.slots,
        visible=inputs.visible,
    )
    out = jax.ShapeDtypeStruct((batch, tokens, most), jnp.float32)
    return launch(indexer_scores_kernel, config, [given], [out])[0]
