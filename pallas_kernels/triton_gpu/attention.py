"""Decode attention over the stored cache, for heads of 448 NoPE and 64 RoPE channels with one shared key-value head.

    out_h = sum over keys of exp(l) k / (sum of exp(l) + exp(sink_h)),      l = q_h . k / sqrt(512)

A block computes some heads of one query. It walks over tiles of keys: first the rows of the window in the order of the
ring, then the entries. Each tile is converted to f16 once and serves as K and as V; sums are f32. To give a GPU enough
blocks when there are few queries, the tiles of a query are divided into parts, which a second kernel merges.

A row's scale is a power of two, by which its codes are multiplied in f16, times a factor in [1, 2), by which its logits
and weights are multiplied. So a stored value x becomes x (1 + e) + d with |e| <= 2^-10 and |d| <= 2^-24. Values above
65504 become infinite.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.attention.inputs import AttentionInputs, check_inputs
from pallas_kernels.formats import ATTENDED_FORMATS
from pallas_kernels.triton_gpu import device
from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.numbers import e4m3_to_f16, from_ue8m0

KV_FORMATS = ("bf16", "fp8_row", "fp8_tile64")
MAX_PARTS = 32  # that share a query: more take longer to merge than they save
SEARCHED = 256  # keys that a block looks up at once


@triton.jit
def _nope(row, tiles, power, there, first: tl.constexpr, kv_format: tl.constexpr, fp8: tl.constexpr):
    """NoPE channels [first, first + 128) of rows that begin at ``row``, times their power of two, in f16; 0 past 448.

    The power of two of a whole row is ``power``; ``tiles`` points to those of its tiles.
    """
    channel = first + tl.arange(0, 128)
    mask = there[:, None] & (channel < 448)[None, :]
    stored = tl.load(row[:, None] + channel[None, :], mask=mask, other=0)
    if kv_format == "bf16":
        values = stored.to(tl.float32).to(tl.float16)
    else:
        unit: tl.constexpr = 1.0 if fp8 else 256.0
        if fp8:  # noqa: SIM108  a GPU without conversions must not compile the first
            codes = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            codes = e4m3_to_f16(stored)
        if kv_format == "fp8_row":
            values = codes * (power * unit).to(tl.float16)[:, None]
        else:
            byte = tl.load(tiles + first // 64, mask=there, other=127)
            power = (from_ue8m0(byte) * unit).to(tl.float16)
            if first == 384:  # its second tile has RoPE channels
                values = codes * power[:, None]
            else:
                byte = tl.load(tiles + first // 64 + 1, mask=there, other=127)
                later = (from_ue8m0(byte) * unit).to(tl.float16)
                is_first = (tl.arange(0, 128) < 64)[None, :]
                values = codes * tl.where(is_first, power[:, None], later[:, None])
    return values


@triton.jit
def _rope(row, there):
    """RoPE channels of rows that begin at ``row`` as the last 64 of 128 channels, in f32; the others are 0."""
    channel = tl.arange(0, 128) - 64
    mask = there[:, None] & (channel >= 0)[None, :]
    return tl.load(row[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turned(values, angles):
    """Apply the inverse rope to the last 64 of [heads, 128] channels. ``angles``: 32 cosines, then 32 sines."""
    pair = tl.arange(0, 64) - 32
    is_rope = pair >= 0
    cos = tl.load(angles + pair, mask=is_rope, other=1.0)[None, :]
    sin = tl.load(angles + 32 + pair, mask=is_rope, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 64, 2)))
    turned = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (values.shape[0], 128))
    # Not the sum with a sine of 0: NaN would pass from one channel to the next.
    return tl.where((tl.arange(0, 128) >= 64)[None, :], turned, values)


@triton.jit
def decode_attention_kernel(
    q,  # f16 or bf16 [Q, H, 512], Q queries of B requests with T tokens each
    window_nope,  # [layers, requests, n_win, 448]
    window_rope,  # bf16 [..., 64]
    window_scale,  # f32 [...], u8 [..., 7] or not used
    fresh_nope,  # [B, F, 448]
    fresh_rope,
    fresh_scale,
    entry_nope,  # [layers, num_blocks, per_block, 448]
    entry_rope,
    entry_scale,
    pos,  # i32 [layers, requests, n_win]
    picks,  # i32 [Q, entries]
    block_table,  # i32 [requests, max_blocks]
    visible,  # i32 [Q]
    slots,  # i32 [B]
    start,  # i32 [B]
    positions,  # i32 [Q]
    sinks,  # f32 [H]
    angles,  # f32 [Q, 64]
    layer,  # i32 [1]
    out,  # [Q, H, 512]; of parts f32 [Q, parts, H, 512], not normalised
    rows,  # scratch i32 [Q, H / heads, padded], the keys of each block
    row_scales,  # scratch f32 of the same shape; for fp8_row
    stats,  # of parts f32 [Q, parts, 2, H]: largest logit, in units of log 2, and sum of weights
    tokens: tl.constexpr,
    num_heads: tl.constexpr,
    n_win: tl.constexpr,
    num_fresh: tl.constexpr,  # F; 0 without fresh rows
    requests: tl.constexpr,
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    max_blocks: tl.constexpr,
    entries: tl.constexpr,  # the most that a query can read
    picked: tl.constexpr,  # whether ``picks`` says which
    parts: tl.constexpr,
    heads: tl.constexpr,  # of a block
    keys: tl.constexpr,  # of a tile
    padded: tl.constexpr,  # keys of a query, as a multiple of those of a tile
    search: tl.constexpr,  # keys that are looked up at once
    stages: tl.constexpr,  # tiles that are loaded at once
    kv_format: tl.constexpr,
    fp8: tl.constexpr,  # whether the GPU converts E4M3
):
    groups: tl.constexpr = num_heads // heads
    window_tiles: tl.constexpr = (n_win + keys - 1) // keys
    unit: tl.constexpr = 0.06375871541  # of logits: log2(e) / sqrt(512)
    query, part = tl.program_id(0) // groups, tl.program_id(1)
    head = tl.program_id(0) % groups * heads + tl.arange(0, heads)
    request = query // tokens
    slot, begin, position = tl.load(slots + request), tl.load(start + request), tl.load(positions + query)
    live = (slot >= 0) & (slot < requests) & (position >= 0)
    slot, number = tl.where(live, slot, 0), tl.load(layer).to(tl.int64)
    at = q + (query.to(tl.int64) * num_heads + head)[:, None] * 512 + tl.arange(0, 128)[None, :]
    q0, q1 = tl.load(at).to(tl.float16), tl.load(at + 128).to(tl.float16)
    q2, q3 = tl.load(at + 256).to(tl.float16), tl.load(at + 384).to(tl.float16)

    num_seen = 0
    if entries > 0:
        num_seen = tl.minimum(tl.load(visible + query), max_blocks * per_block)
        num_read = entries if picked else tl.minimum(num_seen, entries)
    else:
        num_read = 0
    count = tl.where(live, window_tiles + (num_read + keys - 1) // keys, 0)
    share = (count + parts - 1) // parts
    first = part * share
    last = tl.minimum(first + share, count)

    # First find the keys: 0 to n_win - 1 are rows of the ring, from n_win on fresh rows; entries count from 0 again.
    found = rows + query.to(tl.int64) * groups * padded + tl.program_id(0) % groups * padded
    found_scale = row_scales + query.to(tl.int64) * groups * padded + tl.program_id(0) % groups * padded
    ring, pool = (number * requests + slot) * n_win, number * num_blocks * per_block
    for some in tl.range(first * keys, last * keys, search):
        n = some + tl.arange(0, search)
        in_window = n < n_win
        # The one position of the window that this row of the ring can hold; rows that hold another are stale.
        expected = position - (position - n + n_win) % n_win
        there = in_window & (expected >= 0) & (tl.load(pos + ring + n, mask=in_window, other=-1) == expected)
        row = tl.where(there, n, -1)
        if num_fresh > 0:
            is_fresh = in_window & (expected >= begin)
            row = tl.where(is_fresh, tl.where(expected - begin < num_fresh, n_win + expected - begin, -1), row)
        if entries > 0:
            e = n - window_tiles * keys
            is_entry = (e >= 0) & (e < num_read)
            if picked:
                e = tl.load(picks + query.to(tl.int64) * entries + e, mask=is_entry, other=-1)
                is_entry = is_entry & (e >= 0)
            is_entry = is_entry & (e < max_blocks * per_block)
            block = tl.load(block_table + slot * max_blocks + e // per_block, mask=is_entry, other=-1)
            is_entry = is_entry & (block >= 0) & (block < num_blocks)
            row = tl.where(is_entry, block * per_block + e % per_block, row)
        tl.store(found + n, row, mask=n < last * keys)
        if kv_format == "fp8_row":
            wide = row.to(tl.int64)
            scale = window_scale + ring + wide
            if num_fresh > 0:
                is_fresh = in_window & (row >= n_win)
                scale = tl.where(is_fresh, fresh_scale + request.to(tl.int64) * num_fresh + wide - n_win, scale)
            if entries > 0:
                scale = tl.where(is_entry, entry_scale + pool + wide, scale)
            scale = tl.load(scale, mask=row >= 0, other=0.0)  # which no row has
            tl.store(found_scale + n, scale, mask=n < last * keys)
    tl.debug_barrier()

    # A finite start: the difference of two infinities would be NaN.
    peak = tl.full((heads,), -1e30, tl.float32)
    total = tl.zeros((heads,), tl.float32)
    a0, a1 = tl.zeros((heads, 128), tl.float32), tl.zeros((heads, 128), tl.float32)
    a2, a3 = tl.zeros((heads, 128), tl.float32), tl.zeros((heads, 128), tl.float32)
    for i in tl.range(first, last, num_stages=stages):
        row = tl.load(found + i * keys + tl.arange(0, keys)).to(tl.int64)
        there = row >= 0
        if entries > 0:
            in_window = i < window_tiles
            nope = tl.where(in_window, window_nope + ring * 448, entry_nope + pool * 448) + row * 448
            rope = tl.where(in_window, window_rope + ring * 64, entry_rope + pool * 64) + row * 64
            tiles = tl.where(in_window, window_scale + ring * 7, entry_scale + pool * 7) + row * 7
        else:
            nope, rope = window_nope + (ring + row) * 448, window_rope + (ring + row) * 64
            tiles = window_scale + (ring + row) * 7
        if num_fresh > 0:
            is_fresh = (row >= n_win) & (i < window_tiles)
            row = request.to(tl.int64) * num_fresh + row - n_win
            nope = tl.where(is_fresh, fresh_nope + row * 448, nope)
            rope = tl.where(is_fresh, fresh_rope + row * 64, rope)
            tiles = tl.where(is_fresh, fresh_scale + row * 7, tiles)
        power = tl.full((keys,), 1.0, tl.float32)
        if kv_format == "fp8_row":
            bits = tl.load(found_scale + i * keys + tl.arange(0, keys)).to(tl.int32, bitcast=True)
            power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
            factor = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
            seen = bits != 0
        else:
            seen = there
        k0 = _nope(nope, tiles, power, there, 0, kv_format, fp8)
        k1 = _nope(nope, tiles, power, there, 128, kv_format, fp8)
        k2 = _nope(nope, tiles, power, there, 256, kv_format, fp8)
        k3 = _nope(nope, tiles, power, there, 384, kv_format, fp8)
        turned = _rope(rope, there)
        if kv_format == "fp8_row":
            turned = turned * (1.0 / factor)[:, None]
        k3 = tl.where((tl.arange(0, 128) >= 64)[None, :], turned.to(tl.float16), k3)
        logits = tl.dot(q0, tl.trans(k0))
        logits = tl.dot(q1, tl.trans(k1), logits)
        logits = tl.dot(q2, tl.trans(k2), logits)
        logits = tl.dot(q3, tl.trans(k3), logits)
        if kv_format == "fp8_row":
            logits = logits * factor[None, :]
        logits = tl.where(seen[None, :], logits * unit, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        kept, weights = tl.exp2(peak - new_peak), tl.exp2(logits - new_peak[:, None])
        total = total * kept + tl.sum(weights, 1)
        peak = new_peak
        if kv_format == "fp8_row":
            weights = weights * factor[None, :]
        weights = weights.to(tl.float16)
        a0 = tl.dot(weights, k0, a0 * kept[:, None])
        a1 = tl.dot(weights, k1, a1 * kept[:, None])
        a2 = tl.dot(weights, k2, a2 * kept[:, None])
        a3 = tl.dot(weights, k3, a3 * kept[:, None])

    if parts == 1:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        kept = tl.exp2(peak - new_peak)
        share = (kept / (total * kept + tl.exp2(sink - new_peak)))[:, None]
        at = out + (query.to(tl.int64) * num_heads + head)[:, None] * 512 + tl.arange(0, 128)[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(at, (a0 * share).to(dtype))
        tl.store(at + 128, (a1 * share).to(dtype))
        tl.store(at + 256, (a2 * share).to(dtype))
        tl.store(at + 384, _turned(a3 * share, angles + query * 64).to(dtype))
    else:
        row = query.to(tl.int64) * parts + part
        at = out + (row * num_heads + head)[:, None] * 512 + tl.arange(0, 128)[None, :]
        tl.store(at, a0)
        tl.store(at + 128, a1)
        tl.store(at + 256, a2)
        tl.store(at + 384, a3)
        at = stats + row * (2 * num_heads) + head
        tl.store(at, peak)
        tl.store(at + num_heads, total)


@triton.jit
def decode_attention_merge(
    partial,  # f32 [Q, parts, H, 512]
    stats,  # f32 [Q, parts, 2, H]
    sinks,  # f32 [H]
    angles,  # f32 [Q, 64]
    out,  # [Q, H, 512]
    num_heads: tl.constexpr,
    parts: tl.constexpr,
    padded: tl.constexpr,  # the power of two that is not below ``parts``
):
    query, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    part = tl.arange(0, padded)
    there = part < parts
    row = query.to(tl.int64) * parts + part
    peaks = tl.load(stats + row * (2 * num_heads) + head, mask=there, other=-1e30)
    totals = tl.load(stats + row * (2 * num_heads) + num_heads + head, mask=there, other=0.0)
    sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    peak = tl.maximum(tl.max(peaks, 0), sink)
    kept = tl.exp2(peaks - peak)
    kept = kept / (tl.sum(totals * kept, 0) + tl.exp2(sink - peak))
    channel = tl.arange(0, 512)
    at = partial + ((row * num_heads + head) * 512)[:, None] + channel[None, :]
    values = tl.sum(tl.load(at, mask=there[:, None], other=0.0) * kept[:, None], 0)
    values = tl.reshape(values, (4, 128))
    is_last = (tl.arange(0, 4) == 3)[:, None]
    values = tl.where(is_last, _turned(values, angles + query * 64), values)
    at = out + (query.to(tl.int64) * num_heads + head) * 512 + channel
    tl.store(at, tl.reshape(values, (512,)).to(out.dtype.element_ty))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a query's work is divided."""

    heads: int  # of a block
    keys: int  # of a tile
    warps: int
    parts: int  # blocks that share the keys of the same heads


def choose_tiles(queries: int, num_heads: int, num_keys: int, kv_format: str) -> Tiles:
    """Return a division that gives every multiprocessor a block, if there are enough keys.

    Args:
      queries: of all requests.
      num_heads: of each query.
      num_keys: the most that a query can have.
      kv_format: of the stored rows.
    """
    capability, units = device.capability() or 0, device.multiprocessors()
    keys = 16 if kv_format == "fp8_tile64" and capability not in device.MUCH_SHARED_MEMORY else 32
    if num_heads % 32 or 4 * queries * num_heads <= 16 * units:  # at least four parts for each 16 heads
        heads, warps = 16, 4
    elif capability == 90 and num_heads % 64 == 0:
        heads, warps = 64, 8  # as many as its tensor cores multiply at once
        keys = 32 if kv_format == "bf16" else 64
    else:
        heads, warps = 32, 8
    blocks = queries * num_heads // heads
    parts = max(1, min(units // blocks, -(-num_keys // keys), MAX_PARTS))
    return Tiles(heads=heads, keys=keys, warps=warps, parts=parts)


def unsupported_attention(*, kv_format: str, num_heads: int, nope_dim: int, rope_dim: int) -> str | None:
    """Return why the kernel does not support these formats and sizes, or None if it does."""
    if kv_format not in KV_FORMATS:
        return f"kv_format must be one of {KV_FORMATS}, got {kv_format!r}"
    if (nope_dim, rope_dim) != (448, 64):
        return f"a head must have 448 NoPE and 64 RoPE channels, got {nope_dim} and {rope_dim}"
    if num_heads % 16:
        return f"num_heads must be a multiple of 16, got {num_heads}"
    return None


def decode_attention(
    inputs: AttentionInputs, *, kv_format: str, dtype: Any = jnp.bfloat16, tiles: Tiles | None = None
) -> jax.Array:
    """Compute attention of each query over its own keys.

    Args:
      inputs: queries, and the rows and tables in which their keys are found.
      kv_format: of all stored rows: "bf16", "fp8_row" or "fp8_tile64".
      dtype: of the result, bf16 or f32.
      tiles: how the work is divided. None means as ``choose_tiles`` says.

    Returns:
      dtype [B, T, H, 512]; 0 for queries without a position.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not support this format or these sizes.
    """
    chex.assert_rank(inputs.q, 4)
    (batch, tokens, num_heads, dim), window = inputs.q.shape, inputs.window
    sizes = dict(num_heads=num_heads, nope_dim=window.nope.shape[-1], rope_dim=window.rope.shape[-1])
    if reason := unsupported_attention(kv_format=kv_format, **sizes):
        raise ValueError(reason)
    if inputs.q.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"q must be float16 or bfloat16, got {inputs.q.dtype}")
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype}")
    check_inputs(inputs, ATTENDED_FORMATS[kv_format])
    queries, n_win, has_entries = batch * tokens, inputs.pos.shape[2], inputs.entries is not None
    if not queries:
        return jnp.zeros(inputs.q.shape, dtype)
    most = inputs.max_entries
    tiles = tiles or choose_tiles(queries, num_heads, n_win + most, kv_format)
    # In the place of what a layer does not have stand other arrays, which the kernel does not touch.
    fresh = inputs.window if inputs.fresh is None else inputs.fresh
    entries = inputs.entries if has_entries else inputs.window
    angles = inputs.angles
    if angles is None:
        angles = jnp.repeat(jnp.asarray([1.0, 0.0]), dim // 16)[None] + jnp.zeros((queries, 1))
    rows = [part for rows in (inputs.window, fresh, entries) for part in (rows.nope, rows.rope, rows.scale)]
    parts = tiles.parts
    padded = sum(-(-count // tiles.keys) * tiles.keys for count in (n_win, most))
    shape = queries, num_heads // tiles.heads, padded
    results = [
        jax.ShapeDtypeStruct(inputs.q.shape, dtype),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape if kv_format == "fp8_row" else (1,), jnp.float32),
        jax.ShapeDtypeStruct((queries, parts, 2, num_heads) if parts > 1 else (1,), jnp.float32),
    ]
    if parts > 1:
        results[0] = jax.ShapeDtypeStruct((queries, parts, num_heads, dim), jnp.float32)
    sinks = inputs.sinks.astype(jnp.float32)
    config = Config(
        grid=(queries * num_heads // tiles.heads, parts),
        warps=tiles.warps,
        constants=dict(
            tokens=tokens,
            num_heads=num_heads,
            n_win=n_win,
            num_fresh=0 if inputs.fresh is None else fresh.nope.shape[1],
            requests=inputs.pos.shape[1],
            num_blocks=entries.nope.shape[1],
            per_block=entries.nope.shape[2],
            max_blocks=inputs.block_table.shape[1] if has_entries else 1,
            entries=most,
            picked=inputs.picks is not None,
            parts=parts,
            heads=tiles.heads,
            keys=tiles.keys,
            padded=padded,
            search=SEARCHED,
            stages=2,
            kv_format=kv_format,
            fp8=device.converts_fp8(),
        ),
    )
    given = [
        inputs.q,
        *(inputs.layer if part is None else part for part in rows),
        inputs.pos,
        *(inputs.layer if part is None else part for part in (inputs.picks, inputs.block_table, inputs.visible)),
        *(inputs.slots, inputs.start, inputs.positions, sinks, angles, inputs.layer),
    ]
    out, _, _, stats = launch(decode_attention_kernel, config, given, results)
    if parts == 1:
        return out
    config = Config(
        grid=(queries * num_heads,),
        constants=dict(num_heads=num_heads, parts=parts, padded=triton.next_power_of_2(parts)),
    )
    return launch(
        decode_attention_merge, config, [out, stats, sinks, angles], [jax.ShapeDtypeStruct(inputs.q.shape, dtype)]
    )[0]
