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

from typing import Any

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_gpu import device
from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.numbers import e4m3_to_f16, from_ue8m0

KEY_FORMATS = ("f32", "bf16", "nvfp4", "mxfp4")
ENTRIES = {"f32": 32, "bf16": 32, "nvfp4": 64, "mxfp4": 64}  # of a tile


@triton.jit
def _values(codes, scale, row, there, dim: tl.constexpr, key_format: tl.constexpr):
    """4-bit rows in f16, [rows, dim], and the factors [rows] by which these are to be multiplied; 0 where not there.

    All rows have their channels in the same order, which is not that of the codes. A word of eight codes becomes four
    pairs: shifted by 12 - 4 i, its codes i and i + 4 have their signs where two f16 have them, so that a pair takes a
    few operations on 32 bits.
    """
    rows: tl.constexpr = row.shape[0]
    width: tl.constexpr = 2 if key_format == "nvfp4" else 4  # words that share a scale
    groups: tl.constexpr = dim // (8 * width)
    group, word = tl.arange(0, groups)[None, :], tl.arange(0, dim // 8)[None, :]
    codes = codes.to(tl.pointer_type(tl.int32))
    words = tl.load(codes + row[:, None] * (dim // 8) + word, mask=there[:, None], other=0)
    byte = tl.load(scale + row[:, None] * groups + group, mask=there[:, None], other=0)
    if key_format == "nvfp4":
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
    q,  # of 4-bit formats codes [Q, heads, dim / 2], else f32 [Q, heads, dim]; Q queries of B requests
    q_scale,
    weights,  # f32 [Q, heads]
    keys,  # [layers, num_blocks, per_block, ...]
    keys_scale,
    layer,  # i32 [1]
    block_table,  # i32 [requests, max_blocks]
    slots,  # i32 [B]
    visible,  # i32 [Q]
    out,  # f32 [Q, max_blocks * per_block]
    tokens: tl.constexpr,
    requests: tl.constexpr,
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    max_blocks: tl.constexpr,
    num_heads: tl.constexpr,
    heads: tl.constexpr,  # the power of two, at least 16, that holds ``num_heads``
    dim: tl.constexpr,
    entries: tl.constexpr,  # of a tile
    tiles: tl.constexpr,  # of a block
    key_format: tl.constexpr,
):
    query = tl.program_id(0)
    slot = tl.load(slots + query // tokens)
    live = (slot >= 0) & (slot < requests)
    most: tl.constexpr = max_blocks * per_block
    seen = tl.where(live, tl.minimum(tl.load(visible + query), most), 0)
    first = tl.program_id(1) * tiles * entries
    if first < seen:
        head = tl.arange(0, heads)
        is_head = head < num_heads
        at = query.to(tl.int64) * num_heads + head
        weight = tl.load(weights + at, mask=is_head, other=0.0)[None, :]
        is_packed: tl.constexpr = key_format == "nvfp4" or key_format == "mxfp4"
        if is_packed:
            q_all, q_factor = _values(q, q_scale, at, is_head, dim, key_format)
            q_all, weight = tl.trans(q_all), weight * q_factor[None, :]
        else:
            q_all = q + at[:, None] * dim + tl.arange(0, dim)[None, :]
            q_all = tl.trans(tl.load(q_all, mask=is_head[:, None], other=0.0))
        pool = tl.load(layer).to(tl.int64) * num_blocks * per_block
        for begin in tl.range(first, tl.minimum(first + tiles * entries, seen), entries):
            entry = begin + tl.arange(0, entries)
            there = entry < seen
            block = tl.load(block_table + slot * max_blocks + entry // per_block, mask=there, other=-1)
            there = there & (block >= 0) & (block < num_blocks)
            row = pool + tl.where(there, block * per_block + entry % per_block, 0)
            if is_packed:
                key, factor = _values(keys, keys_scale, row, there, dim, key_format)
                dots = tl.dot(key, q_all)
            else:
                key = keys + row[:, None] * dim + tl.arange(0, dim)[None, :]
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


def indexer_scores(inputs: Any, *, key_format: str) -> jax.Array:
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
    q = inputs.queries.codes if is_packed else inputs.queries
    q_scale = inputs.queries.scale if is_packed else inputs.layer
    chex.assert_shape(q, (batch, tokens, num_heads, codes.shape[-1]))
    chex.assert_type(q, codes.dtype if is_packed else jnp.float32)
    chex.assert_type(
        [weights, inputs.layer, inputs.block_table, inputs.slots, inputs.visible], [jnp.float32] + 4 * [jnp.int32]
    )
    (requests, max_blocks), queries = inputs.block_table.shape, batch * tokens
    most = max_blocks * per_block
    if not queries * most:
        return jnp.zeros((batch, tokens, most), jnp.float32)
    entries = ENTRIES[key_format]
    all_tiles = -(-most // entries)
    # Each block loads the query's heads, so it does several tiles once each multiprocessor has the four blocks that it
    # can run at once.
    tiles = -(-queries * all_tiles // (4 * device.multiprocessors()))
    config = Config(
        grid=(queries, -(-all_tiles // tiles)),
        warps=4,
        constants=dict(
            tokens=tokens,
            requests=requests,
            num_blocks=codes.shape[1],
            per_block=per_block,
            max_blocks=max_blocks,
            num_heads=num_heads,
            heads=max(16, triton.next_power_of_2(num_heads)),
            dim=dim,
            entries=entries,
            tiles=tiles,
            key_format=key_format,
        ),
    )
    scale = inputs.keys.scale if is_packed else inputs.layer
    given = [q, q_scale, weights, codes, scale, inputs.layer, inputs.block_table, inputs.slots, inputs.visible]
    out = jax.ShapeDtypeStruct((batch, tokens, most), jnp.float32)
    return launch(indexer_scores_kernel, config, given, [out])[0]
