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
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from pallas_kernels.attention.inputs import AttentionInputs, check_inputs
from pallas_kernels.formats import ATTENDED_FORMATS
from pallas_kernels.triton_gpu import device
from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.numbers import e4m3_to_f16, from_ue8m0
from pallas_kernels.triton_gpu.operands import Leaf, Paging, Rows, Window, next_power_of_2

KV_FORMATS = ("bf16", "fp8_row", "fp8_tile64")
MAX_PARTS = 32  # that share a query: more take longer to merge than they save


class Inputs(NamedTuple):
    """Q queries of B requests with T tokens each, and where their keys are found."""

    q: Leaf  # f16 or bf16 [Q, H, 512]
    window: Window
    fresh: Rows | None  # [B, F, ...]
    entries: Rows | None  # [layers, num_blocks, per_block, ...]
    picks: Leaf  # i32 [Q, K]; None: a query reads all that it sees
    block_table: Leaf  # i32 [requests, max_blocks]; None without entries
    visible: Leaf  # i32 [Q]; None without entries
    slots: Leaf  # i32 [B]
    start: Leaf  # i32 [B]
    positions: Leaf  # i32 [Q]
    sinks: Leaf  # f32 [H]
    angles: Leaf  # f32 [Q, 64]
    layer: Leaf  # i32 [1]


class Found(NamedTuple):
    """The keys of each block, where it has found them."""

    rows: Leaf  # i32 [Q, H / heads, padded]
    scales: Leaf  # f32 of the same shape; None except for fp8_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a query's work is divided."""

    heads: int  # of a block
    keys: int  # of a tile
    warps: int
    parts: int  # blocks that share the keys of the same heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of an attention call, and what its GPU can do."""

    tokens: int
    num_heads: int
    n_win: int
    requests: int
    num_fresh: int  # F
    most: int  # entries that a query can read
    padded: int  # keys of a query, as a multiple of those of a tile
    kv_format: str
    fp8: bool  # whether the GPU converts E4M3
    searched: int = 256  # keys that a block looks up at once
    stages: int = 2  # tiles that it loads at once


@triton.jit
def _nope(row, tiles, power, there, first: tl.constexpr, sizes: tl.constexpr):
    """NoPE channels [first, first + 128) of rows that begin at ``row``, times their power of two, in f16; 0 past 448.

    The power of two of a whole row is ``power``; ``tiles`` points to those of its tiles, if it has any.
    """
    channel = first + tl.arange(0, 128)
    mask = there[:, None] & (channel < 448)[None, :]
    stored = tl.load(row[:, None] + channel[None, :], mask=mask, other=0)
    if sizes.kv_format == "bf16":
        values = stored.to(tl.float32).to(tl.float16)
    else:
        unit: tl.constexpr = 1.0 if sizes.fp8 else 256.0
        if sizes.fp8:  # noqa: SIM108  a GPU without conversions must not compile the first
            codes = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            codes = e4m3_to_f16(stored)
        if sizes.kv_format == "fp8_row":
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
    inputs: Inputs,
    out,  # [Q, H, 512]; of parts f32 [Q, parts, H, 512], not normalised
    found: Found,  # scratch
    stats,  # of parts f32 [Q, parts, 2, H]: largest logit, in units of log 2, and sum of weights; or None
    sizes: tl.constexpr,
    tiles: tl.constexpr,
    paging: tl.constexpr,  # None without entries
):
    heads: tl.constexpr = tiles.heads
    keys: tl.constexpr = tiles.keys
    n_win: tl.constexpr = sizes.n_win
    num_heads: tl.constexpr = sizes.num_heads
    is_fp8_row: tl.constexpr = sizes.kv_format == "fp8_row"
    has_tiles: tl.constexpr = sizes.kv_format == "fp8_tile64"
    groups: tl.constexpr = num_heads // heads
    window_tiles: tl.constexpr = (n_win + keys - 1) // keys
    unit: tl.constexpr = 0.06375871541  # of logits: log2(e) / sqrt(512)
    window, fresh, entries = inputs.window.rows, inputs.fresh, inputs.entries
    query, part = tl.program_id(0) // groups, tl.program_id(1)
    group = tl.program_id(0) % groups
    head = group * heads + tl.arange(0, heads)
    request = query // sizes.tokens
    slot, position = tl.load(inputs.slots + request), tl.load(inputs.positions + query)
    begin = tl.load(inputs.start + request)
    live = (slot >= 0) & (slot < sizes.requests) & (position >= 0)
    slot, number = tl.where(live, slot, 0), tl.load(inputs.layer).to(tl.int64)
    at = inputs.q + (query.to(tl.int64) * num_heads + head)[:, None] * 512 + tl.arange(0, 128)[None, :]
    q0, q1 = tl.load(at).to(tl.float16), tl.load(at + 128).to(tl.float16)
    q2, q3 = tl.load(at + 256).to(tl.float16), tl.load(at + 384).to(tl.float16)

    if sizes.most > 0:
        most: tl.constexpr = paging.max_blocks * paging.per_block
        num_read = sizes.most
        if inputs.picks is None:
            num_read = tl.minimum(tl.minimum(tl.load(inputs.visible + query), most), sizes.most)
    else:
        num_read = 0
    count = tl.where(live, window_tiles + (num_read + keys - 1) // keys, 0)
    share = (count + tiles.parts - 1) // tiles.parts
    first = part * share
    last = tl.minimum(first + share, count)

    # First find the keys: 0 to n_win - 1 are rows of the ring, from n_win on fresh rows; entries count from 0 again.
    at = query.to(tl.int64) * groups * sizes.padded + group * sizes.padded
    found_rows = found.rows + at
    ring = (number * sizes.requests + slot) * n_win
    if sizes.most > 0:
        pool = number * paging.num_blocks * paging.per_block
    if is_fp8_row:
        found_scales = found.scales + at
    for some in tl.range(first * keys, last * keys, sizes.searched):
        n = some + tl.arange(0, sizes.searched)
        in_window = n < n_win
        # The one position of the window that this row of the ring can hold; rows that hold another are stale.
        expected = position - (position - n + n_win) % n_win
        there = (
            in_window & (expected >= 0) & (tl.load(inputs.window.pos + ring + n, mask=in_window, other=-1) == expected)
        )
        row = tl.where(there, n, -1)
        if sizes.num_fresh > 0:
            is_fresh = in_window & (expected >= begin)
            row = tl.where(is_fresh, tl.where(expected - begin < sizes.num_fresh, n_win + expected - begin, -1), row)
        if sizes.most > 0:
            e = n - window_tiles * keys
            is_entry = (e >= 0) & (e < num_read)
            if inputs.picks is not None:
                e = tl.load(inputs.picks + query.to(tl.int64) * sizes.most + e, mask=is_entry, other=-1)
                is_entry = is_entry & (e >= 0)
            is_entry = is_entry & (e < most)
            table = inputs.block_table + slot * paging.max_blocks
            block = tl.load(table + e // paging.per_block, mask=is_entry, other=-1)
            is_entry = is_entry & (block >= 0) & (block < paging.num_blocks)
            row = tl.where(is_entry, block * paging.per_block + e % paging.per_block, row)
        tl.store(found_rows + n, row, mask=n < last * keys)
        if is_fp8_row:
            wide = row.to(tl.int64)
            scale = window.scale + ring + wide
            if sizes.num_fresh > 0:
                is_fresh = in_window & (row >= n_win)
                scale = tl.where(is_fresh, fresh.scale + request.to(tl.int64) * sizes.num_fresh + wide - n_win, scale)
            if sizes.most > 0:
                scale = tl.where(is_entry, entries.scale + pool + wide, scale)
            scale = tl.load(scale, mask=row >= 0, other=0.0)  # which no row has
            tl.store(found_scales + n, scale, mask=n < last * keys)
    tl.debug_barrier()

    # A finite start: the difference of two infinities would be NaN.
    peak = tl.full((heads,), -1e30, tl.float32)
    total = tl.zeros((heads,), tl.float32)
    a0, a1 = tl.zeros((heads, 128), tl.float32), tl.zeros((heads, 128), tl.float32)
    a2, a3 = tl.zeros((heads, 128), tl.float32), tl.zeros((heads, 128), tl.float32)
    for i in tl.range(first, last, num_stages=sizes.stages):
        row = tl.load(found_rows + i * keys + tl.arange(0, keys)).to(tl.int64)
        there = row >= 0
        scales = None
        if sizes.most > 0:
            in_window = i < window_tiles
            nope = tl.where(in_window, window.nope + ring * 448, entries.nope + pool * 448) + row * 448
            rope = tl.where(in_window, window.rope + ring * 64, entries.rope + pool * 64) + row * 64
            if has_tiles:
                scales = tl.where(in_window, window.scale + ring * 7, entries.scale + pool * 7) + row * 7
        else:
            nope, rope = window.nope + (ring + row) * 448, window.rope + (ring + row) * 64
            if has_tiles:
                scales = window.scale + (ring + row) * 7
        if sizes.num_fresh > 0:
            is_fresh = (row >= n_win) & (i < window_tiles)
            row = request.to(tl.int64) * sizes.num_fresh + row - n_win
            nope = tl.where(is_fresh, fresh.nope + row * 448, nope)
            rope = tl.where(is_fresh, fresh.rope + row * 64, rope)
            if has_tiles:
                scales = tl.where(is_fresh, fresh.scale + row * 7, scales)
        power = tl.full((keys,), 1.0, tl.float32)
        if is_fp8_row:
            bits = tl.load(found_scales + i * keys + tl.arange(0, keys)).to(tl.int32, bitcast=True)
            power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
            factor = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
            seen = bits != 0
        else:
            seen = there
        k0 = _nope(nope, scales, power, there, 0, sizes)
        k1 = _nope(nope, scales, power, there, 128, sizes)
        k2 = _nope(nope, scales, power, there, 256, sizes)
        k3 = _nope(nope, scales, power, there, 384, sizes)
        turned = _rope(rope, there)
        if is_fp8_row:
            turned = turned * (1.0 / factor)[:, None]
        k3 = tl.where((tl.arange(0, 128) >= 64)[None, :], turned.to(tl.float16), k3)
        logits = tl.dot(q0, tl.trans(k0))
        logits = tl.dot(q1, tl.trans(k1), logits)
        logits = tl.dot(q2, tl.trans(k2), logits)
        logits = tl.dot(q3, tl.trans(k3), logits)
        if is_fp8_row:
            logits = logits * factor[None, :]
        logits = tl.where(seen[None, :], logits * unit, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        kept, weights = tl.exp2(peak - new_peak), tl.exp2(logits - new_peak[:, None])
        total = total * kept + tl.sum(weights, 1)
        peak = new_peak
        if is_fp8_row:
            weights = weights * factor[None, :]
        weights = weights.to(tl.float16)
        a0 = tl.dot(weights, k0, a0 * kept[:, None])
        a1 = tl.dot(weights, k1, a1 * kept[:, None])
        a2 = tl.dot(weights, k2, a2 * kept[:, None])
        a3 = tl.dot(weights, k3, a3 * kept[:, None])

    if stats is None:
        sink = tl.load(inputs.sinks + head).to(tl.float32) * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        kept = tl.exp2(peak - new_peak)
        share = (kept / (total * kept + tl.exp2(sink - new_peak)))[:, None]
        at = out + (query.to(tl.int64) * num_heads + head)[:, None] * 512 + tl.arange(0, 128)[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(at, (a0 * share).to(dtype))
        tl.store(at + 128, (a1 * share).to(dtype))
        tl.store(at + 256, (a2 * share).to(dtype))
        tl.store(at + 384, _turned(a3 * share, inputs.angles + query * 64).to(dtype))
    else:
        row = query.to(tl.int64) * tiles.parts + part
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
    inputs: AttentionInputs[jax.Array], *, kv_format: str, dtype: DTypeLike = jnp.bfloat16, tiles: Tiles | None = None
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
    queries = batch * tokens
    if not queries:
        return jnp.zeros(inputs.q.shape, dtype)
    angles = inputs.angles
    if angles is None:
        angles = jnp.repeat(jnp.asarray([1.0, 0.0]), dim // 16)[None] + jnp.zeros((queries, 1))
    most, n_win = inputs.max_entries, inputs.pos.shape[2]
    entries = None if not most else Rows.of(inputs.entries)
    fresh = None if inputs.fresh is None or not inputs.fresh.nope.shape[1] else Rows.of(inputs.fresh)
    given = Inputs(
        q=inputs.q,
        window=Window(Rows.of(inputs.window), inputs.pos),
        fresh=fresh,
        entries=entries,
        picks=inputs.picks if most else None,
        block_table=inputs.block_table if most else None,
        visible=inputs.visible if most else None,
        slots=inputs.slots,
        start=inputs.start,
        positions=inputs.positions,
        sinks=inputs.sinks.astype(jnp.float32),
        angles=angles,
        layer=inputs.layer,
    )
    tiles = tiles or choose_tiles(queries, num_heads, n_win + most, kv_format)
    parts, padded = tiles.parts, sum(-(-count // tiles.keys) * tiles.keys for count in (n_win, most))
    sizes = AttentionSizes(
        tokens=tokens,
        num_heads=num_heads,
        n_win=n_win,
        requests=inputs.pos.shape[1],
        num_fresh=0 if fresh is None else fresh.nope.shape[1],
        most=most,
        padded=padded,
        kv_format=kv_format,
        fp8=device.converts_fp8(),
    )
    paging = None if entries is None else Paging.of(entries.nope, inputs.block_table)
    config = Config(
        grid=(queries * num_heads // tiles.heads, parts),
        warps=tiles.warps,
        constants=dict(sizes=sizes, tiles=tiles, paging=paging),
    )
    rows, scales = (
        jax.ShapeDtypeStruct((queries, num_heads // tiles.heads, padded), each) for each in (jnp.int32, jnp.float32)
    )
    found, out = Found(rows, scales if kv_format == "fp8_row" else None), jax.ShapeDtypeStruct(inputs.q.shape, dtype)
    if parts == 1:
        return launch(decode_attention_kernel, config, [given], [out, found, None])[0]
    partial = jax.ShapeDtypeStruct((queries, parts, num_heads, dim), jnp.float32)
    stats = jax.ShapeDtypeStruct((queries, parts, 2, num_heads), jnp.float32)
    partial, _, stats = launch(decode_attention_kernel, config, [given], [partial, found, stats])
    config = Config(
        grid=(queries * num_heads,),
        constants=dict(num_heads=num_heads, parts=parts, padded=next_power_of_2(parts)),
    )
    return launch(decode_attention_merge, config, [partial, stats, given.sinks, angles], [out])[0]
