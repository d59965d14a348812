"""Scores of the lightning indexer, from keys in blocks of the pool.

    I_s = sum over heads h of w_h relu(q_h . k_s)

A block scores tiles of entries for one query, whose heads it loads once. Values of 4-bit formats times their scale are
exact in bf16, so their products are those of the XLA form, up to the order of f32 sums. Keys of f32 and bf16 are
multiplied with three TF32 products each, which is nearly f32.
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
from pallas_kernels.triton_gpu.numbers import e2m1_to_f16, from_e4m3, from_ue8m0

KEY_FORMATS = ("f32", "bf16", "nvfp4", "mxfp4")
ENTRIES = {"f32": 32, "bf16": 32, "nvfp4": 128, "mxfp4": 128}  # of a tile


@triton.jit
def _halves(codes, scale, row, there, dim: tl.constexpr, key_format: tl.constexpr):
    """The even and the odd channels of 4-bit rows, in bf16 [rows, dim / 2] each; 0 where not ``there``."""
    rows: tl.constexpr = row.shape[0]
    width: tl.constexpr = 8 if key_format == "nvfp4" else 16  # bytes that share a scale
    groups: tl.constexpr = dim // (2 * width)
    group, byte = tl.arange(0, groups)[None, :], tl.arange(0, dim // 2)[None, :]
    pairs = tl.load(codes + row[:, None] * (dim // 2) + byte, mask=there[:, None], other=0)
    step = tl.load(scale + row[:, None] * groups + group, mask=there[:, None], other=0)
    step = from_e4m3(step) if key_format == "nvfp4" else from_ue8m0(step)
    step = (step * 16384.0)[:, :, None]
    pairs = tl.reshape(pairs, (rows, groups, width))
    low = tl.reshape((e2m1_to_f16(pairs).to(tl.float32) * step).to(tl.bfloat16), (rows, dim // 2))
    high = tl.reshape((e2m1_to_f16(pairs >> 4).to(tl.float32) * step).to(tl.bfloat16), (rows, dim // 2))
    return low, high


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
            q_low, q_high = _halves(q, q_scale, at, is_head, dim, key_format)
            q_low, q_high = tl.trans(q_low), tl.trans(q_high)
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
                low, high = _halves(keys, keys_scale, row, there, dim, key_format)
                dots = tl.dot(low, q_low)
                dots = tl.dot(high, q_high, dots)
            else:
                key = keys + row[:, None] * dim + tl.arange(0, dim)[None, :]
                key = tl.load(key, mask=there[:, None], other=0.0).to(tl.float32)
                dots = tl.dot(key, q_all, input_precision="tf32x3")
            positive = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(positive * weight, 1)
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
      f32 [B, T, max_blocks * entries_per_block]. Scores from ``visible`` on are undefined. A NaN is +inf; all others
      are at least the lowest finite number.

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
    # Each block loads the query's heads. Once there are some blocks for every multiprocessor, it does several tiles.
    tiles = max(1, queries * all_tiles // (4 * device.multiprocessors()))
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
