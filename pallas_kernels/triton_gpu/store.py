"""Stores of a cache update, its second launch: window rows, finished entries, and the tails of compressors.

    pooled row -> norm -> rope -> (indexer: Hadamard transform) -> encode -> pool row
    kv -> encode -> window row p mod n_win
    k, z -> tails; at the end of a group: rotate or reset them

Each block of the grid [B, units] does one thing: first the entries, then the tails, then the window rows.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_gpu.operands import Batch, Both, CSATail, Pooled, Rows, Streams, Tokens, Window
from pallas_kernels.triton_gpu.pool import Request, request_of
from pallas_kernels.triton_gpu.rows import hadamard, norm_and_rope, store_key, store_row


@triton.jit
def _store_window_row(number, request: Request, kv, window: Window, sizes: tl.constexpr, formats: tl.constexpr):
    """Store the ``number``-th of the newest rows that the window has room for."""
    token = request.num_new - sizes.window_rows + number
    stored = (request.num_new > 0) & (token >= 0)
    channel = tl.arange(0, formats.size)
    row = request.number * sizes.tokens + token
    y = tl.load(kv + row * formats.dim + channel, mask=stored & (channel < formats.dim), other=0.0)
    at = request.place * sizes.n_win + (request.start + token) % sizes.n_win
    store_row(y, window.rows, at, stored, formats)
    tl.store(window.pos + at, request.start + token, mask=stored)


@triton.jit
def _find(entry, request: Request, batch: Batch, paging: tl.constexpr):
    """(the row of an entry in the pool of all layers, whether its block exists)."""
    column = entry // paging.per_block
    table = batch.block_table + request.slot * paging.max_blocks
    block = tl.load(table + column, mask=column < paging.max_blocks, other=-1)
    there = (block >= 0) & (block < paging.num_blocks)
    block = tl.load(batch.layer).to(tl.int64) * paging.num_blocks + block
    return block * paging.per_block + entry % paging.per_block, there


@triton.jit
def _store_entry(pooled, norm, angles, rows: Rows, at, there, eps: tl.constexpr, formats: tl.constexpr):
    """Apply norm and rope to a pooled row, and store it as row ``at`` of the pool, if ``there``."""
    channel = tl.arange(0, formats.size)
    y = tl.load(pooled + channel, mask=channel < formats.dim, other=0.0)
    y = norm_and_rope(y, norm, angles, formats.dim, formats.rope_dim, eps)
    store_row(y, rows, at, there, formats)


@triton.jit
def _store_csa_tail(
    request: Request, streams: Streams, tail: CSATail, sizes: tl.constexpr, dim: tl.constexpr, size: tl.constexpr
):
    """Write the new tokens into one tail of CSA, and its b-stream of the group before the unfinished one."""
    ratio: tl.constexpr = sizes.ratio
    dtype: tl.constexpr = tail.ka.dtype.element_ty
    row, channel = tl.arange(0, sizes.padded_ratio)[:, None], tl.arange(0, size)[None, :]
    inside = (row < ratio) & (channel < dim) & (request.num_new > 0)
    at = (request.place * ratio + row) * dim + channel
    phase, first = request.start % ratio, request.number * sizes.tokens
    end = phase + request.num_new
    # The group before the one of the next token. Its rows are new tokens, or come before the call.
    group = end // ratio
    token = (group - 1) * ratio + row - phase
    moved = inside & (group > 0)
    new = (first + token) * (2 * dim) + channel
    old_k = tl.load(tail.kb_next + at, mask=moved & (token < 0), other=0.0)
    old_z = tl.load(tail.zb_next + at, mask=moved & (token < 0), other=0.0)
    new_k = tl.load(streams.k + new, mask=moved & (token >= 0), other=0.0).to(dtype)
    new_z = tl.load(streams.z + new, mask=moved & (token >= 0), other=0.0).to(dtype)
    before_k, before_z = tl.where(token < 0, old_k, new_k), tl.where(token < 0, old_z, new_z)
    # The newest token that maps to each row.
    position = end - 1 - (end - 1 - row + ratio) % ratio
    token = position - phase
    fresh = inside & (position >= 0) & (token >= 0)
    new = (first + token) * (2 * dim) + channel
    k_b, z_b = tl.load(streams.k + new, mask=fresh, other=0.0), tl.load(streams.z + new, mask=fresh, other=0.0)
    new += dim
    k_a, z_a = tl.load(streams.k + new, mask=fresh, other=0.0), tl.load(streams.z + new, mask=fresh, other=0.0)
    tl.debug_barrier()  # every read comes before the first write
    tl.store(tail.kb + at, before_k, mask=moved)
    tl.store(tail.zb + at, before_z, mask=moved)
    tl.store(tail.ka + at, k_a.to(dtype), mask=fresh)
    tl.store(tail.za + at, z_a.to(dtype), mask=fresh)
    tl.store(tail.kb_next + at, k_b.to(dtype), mask=fresh)
    tl.store(tail.zb_next + at, z_b.to(dtype), mask=fresh)


@triton.jit
def _store_hca_tail(
    number, request: Request, tokens: Tokens, pooled: Pooled, tail, sizes: tl.constexpr, formats: tl.constexpr
):
    """Store the running softmax, or the row of the ``number``-th of the newest tokens that a ring has room for."""
    dim: tl.constexpr = formats.dim
    channel = tl.arange(0, formats.size)
    inside = channel < dim
    if pooled.running is not None:
        if request.num_new > 0:
            new, at = pooled.running + request.number * 3 * dim + channel, request.place * dim + channel
            tl.store(tail.peak + at, tl.load(new, mask=inside), mask=inside)
            tl.store(tail.total + at, tl.load(new + dim, mask=inside), mask=inside)
            tl.store(tail.weighted + at, tl.load(new + 2 * dim, mask=inside), mask=inside)
    else:
        token = request.num_new - sizes.tail_units + number
        inside = inside & (request.num_new > 0) & (token >= 0)
        at = (request.place * sizes.ratio + (request.start + token) % sizes.ratio) * dim + channel
        new = (request.number * sizes.tokens + token) * dim + channel
        dtype: tl.constexpr = tail.ka.dtype.element_ty
        tl.store(tail.ka + at, tl.load(tokens.entry.k + new, mask=inside, other=0.0).to(dtype), mask=inside)
        tl.store(tail.za + at, tl.load(tokens.entry.z + new, mask=inside, other=0.0).to(dtype), mask=inside)


@triton.jit
def cache_step_store_csa(
    tokens: Tokens,
    pooled: Both,  # f32 [B, max_entries, dim], and key_dim of keys
    window: Window,  # None to keep it
    pool: Both,  # Rows and Keys [layers, num_blocks, per_block, ...]
    tails: Both,  # each a CSATail; None to keep them
    sizes: tl.constexpr,
    formats: tl.constexpr,
    paging: tl.constexpr,
):
    groups: tl.constexpr = sizes.max_entries
    key_dim: tl.constexpr = formats.key_dim
    request = request_of(tokens.batch, sizes.tokens, sizes.requests)
    unit, phase = tl.program_id(1), request.start % sizes.ratio
    if unit < 2 * groups:
        group = unit % groups
        if group < (phase + request.num_new) // sizes.ratio:
            at, there = _find(request.start // sizes.ratio + group, request, tokens.batch, paging)
            angles = tokens.rope + (request.number * sizes.max_groups + group) * formats.rope_dim
            row = request.number * groups + group
            if unit < groups:
                new, norm = pooled.entry + row * formats.dim, tokens.entry.norm
                _store_entry(new, norm, angles, pool.entry, at, there, sizes.eps, formats)
            else:
                key = tl.load(pooled.key + row * key_dim + tl.arange(0, key_dim))
                key = norm_and_rope(key, tokens.key.norm, angles, key_dim, formats.rope_dim, sizes.eps)
                store_key(hadamard(key, formats.key_bits), pool.key, at, there, formats)
    elif unit < 2 * groups + sizes.tail_units:
        if sizes.tail_units > 0:
            if unit == 2 * groups:
                _store_csa_tail(request, tokens.entry, tails.entry, sizes, formats.dim, formats.size)
            else:
                _store_csa_tail(request, tokens.key, tails.key, sizes, key_dim, key_dim)
    elif tokens.kv is not None:
        unit -= 2 * groups + sizes.tail_units
        _store_window_row(unit, request, tokens.kv, window, sizes, formats)


@triton.jit
def cache_step_store_hca(
    tokens: Tokens,
    pooled: Pooled,
    window: Window,  # None to keep it
    entries: Rows,  # [layers, num_blocks, per_block, ...]
    tail,  # a RingTail or an OnlineTail; None to keep it
    sizes: tl.constexpr,
    formats: tl.constexpr,
    paging: tl.constexpr,
):
    most: tl.constexpr = sizes.max_entries
    groups: tl.constexpr = most if pooled.running is None else sizes.max_groups
    request = request_of(tokens.batch, sizes.tokens, sizes.requests)
    unit, phase = tl.program_id(1), request.start % sizes.ratio
    if unit < most:
        if unit < (phase + request.num_new) // sizes.ratio:
            at, there = _find(request.start // sizes.ratio + unit, request, tokens.batch, paging)
            angles = tokens.rope + (request.number * sizes.max_groups + unit) * formats.rope_dim
            row = pooled.rows + (request.number * groups + unit) * formats.dim
            _store_entry(row, tokens.entry.norm, angles, entries, at, there, sizes.eps, formats)
    elif unit < most + sizes.tail_units:
        if sizes.tail_units > 0:
            _store_hca_tail(unit - most, request, tokens, pooled, tail, sizes, formats)
    elif tokens.kv is not None:
        unit -= most + sizes.tail_units
        _store_window_row(unit, request, tokens.kv, window, sizes, formats)


@triton.jit
def cache_step_window(tokens: Tokens, window: Window, sizes: tl.constexpr, formats: tl.constexpr):
    request = request_of(tokens.batch, sizes.tokens, sizes.requests)
    _store_window_row(tl.program_id(1), request, tokens.kv, window, sizes, formats)


@triton.jit
def flush_entries_kernel(
    batch: Batch,
    new: Both,  # f32 [B, most, dim], after norm and rope; keys too, after the Hadamard transform, or None
    pool: Both,  # Rows and Keys [layers, num_blocks, per_block, ...]; None without keys
    most: tl.constexpr,  # new entries of a request
    formats: tl.constexpr,
    paging: tl.constexpr,
):
    request = request_of(batch, most, paging.requests)
    number = tl.program_id(1)
    if number < request.num_new:
        at, there = _find(request.start + number, request, batch, paging)
        row = request.number * most + number
        channel = tl.arange(0, formats.size)
        y = tl.load(new.entry + row * formats.dim + channel, mask=channel < formats.dim, other=0.0)
        store_row(y, pool.entry, at, there, formats)
        if new.key is not None:
            key = tl.load(new.key + row * formats.key_dim + tl.arange(0, formats.key_dim))
            store_key(key, pool.key, at, there, formats)
