"""Stores of a cache update, its second launch: window rows, finished entries, and the tails of compressors.

    pooled row -> norm -> rope -> (indexer: Hadamard transform) -> encode -> pool row
    kv -> encode -> window row p mod n_win
    k, z -> tails; at the end of a group: rotate or reset them

Each block of the grid [B, units] does one thing: first the entries, then the tails, then the window rows.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_gpu.pool import request_of
from pallas_kernels.triton_gpu.rows import hadamard, norm_and_rope, store_key, store_row


@triton.jit
def _window_row(
    number,
    place,
    begin,
    count,
    kv,
    window,  # nope, rope, scale
    pos,
    tokens: tl.constexpr,
    n_win: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    size: tl.constexpr,
    kv_format: tl.constexpr,
):
    """Store the ``number``-th of the newest rows that the window has room for."""
    nope, rope, scale = window
    width: tl.constexpr = tokens if tokens < n_win else n_win
    token = count - width + number
    stored = (count > 0) & (token >= 0)
    channel = tl.arange(0, size)
    row = tl.program_id(0).to(tl.int64) * tokens + token
    y = tl.load(kv + row * (nope_dim + rope_dim) + channel, mask=stored & (channel < nope_dim + rope_dim), other=0.0)
    at = place * n_win + (begin + token) % n_win
    store_row(y, nope, rope, scale, at, stored, nope_dim, rope_dim, kv_format)
    tl.store(pos + at, begin + token, mask=stored)


@triton.jit
def _find(entry, slot, layer, block_table, max_blocks: tl.constexpr, num_blocks: tl.constexpr, per_block: tl.constexpr):
    """(the row of an entry in the pool of all layers, whether its block exists)."""
    column = entry // per_block
    block = tl.load(block_table + slot * max_blocks + column, mask=column < max_blocks, other=-1)
    there = (block >= 0) & (block < num_blocks)
    row = (tl.load(layer).to(tl.int64) * num_blocks + block) * per_block + entry % per_block
    return row, there


@triton.jit
def _rotate(
    place,
    phase,
    count,
    streams,  # k, z
    tails,  # ka, za, kb_next, zb_next, kb, zb
    tokens: tl.constexpr,
    ratio: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
):
    """Write the new tokens into one tail of CSA, and its b-stream of the group before the unfinished one."""
    k, z = streams
    ka, za, kb_next, zb_next, kb, zb = tails
    dtype: tl.constexpr = ka.dtype.element_ty
    row, channel = tl.arange(0, rows)[:, None], tl.arange(0, size)[None, :]
    inside = (row < ratio) & (channel < dim) & (count > 0)
    batch = tl.program_id(0).to(tl.int64)
    at = (place * ratio + row) * dim + channel
    # The group before the one of the next token. Its rows are new tokens, or come before the call.
    group = (phase + count) // ratio
    token = (group - 1) * ratio + row - phase
    moved = inside & (group > 0)
    new = (batch * tokens + token) * (2 * dim) + channel
    old_k = tl.load(kb_next + at, mask=moved & (token < 0), other=0.0)
    old_z = tl.load(zb_next + at, mask=moved & (token < 0), other=0.0)
    before_k = tl.where(token < 0, old_k, tl.load(k + new, mask=moved & (token >= 0), other=0.0).to(dtype))
    before_z = tl.where(token < 0, old_z, tl.load(z + new, mask=moved & (token >= 0), other=0.0).to(dtype))
    # The newest token that maps to each row.
    end = phase + count
    position = end - 1 - (end - 1 - row + ratio) % ratio
    token = position - phase
    fresh = inside & (position >= 0) & (token >= 0)
    new = (batch * tokens + token) * (2 * dim) + channel
    k_b, z_b = tl.load(k + new, mask=fresh, other=0.0), tl.load(z + new, mask=fresh, other=0.0)
    k_a, z_a = tl.load(k + new + dim, mask=fresh, other=0.0), tl.load(z + new + dim, mask=fresh, other=0.0)
    tl.debug_barrier()  # every read comes before the first write
    tl.store(kb + at, before_k, mask=moved)
    tl.store(zb + at, before_z, mask=moved)
    tl.store(ka + at, k_a.to(dtype), mask=fresh)
    tl.store(za + at, z_a.to(dtype), mask=fresh)
    tl.store(kb_next + at, k_b.to(dtype), mask=fresh)
    tl.store(zb_next + at, z_b.to(dtype), mask=fresh)


@triton.jit
def cache_step_store_csa(
    layer,  # i32 [1]
    slots,  # i32 [B]
    start,  # i32 [B]
    num_new,  # i32 [B]
    block_table,  # i32 [requests, max_blocks]
    kv,  # f32 [B, T, dim]; not used without a window
    pooled,  # f32 [B, groups, dim]
    key_pooled,  # f32 [B, groups, key_dim]
    norm,  # [dim]
    key_norm,  # [key_dim]
    angles,  # f32 [B, all groups, rope_dim]
    k,  # f32 [B, T, 2 dim]
    z,
    key_k,  # f32 [B, T, 2 key_dim]
    key_z,
    window_nope,  # [layers, requests, n_win, nope_dim]
    window_rope,
    window_scale,
    pos,  # i32 [layers, requests, n_win]
    entry_nope,  # [layers, num_blocks, per_block, nope_dim]
    entry_rope,
    entry_scale,
    codes,  # [layers, num_blocks, per_block, ...]
    codes_scale,
    ka,  # [layers, requests, ratio, dim]
    za,
    kb_next,
    zb_next,
    kb,
    zb,
    key_ka,  # [layers, requests, ratio, key_dim]
    key_za,
    key_kb_next,
    key_zb_next,
    key_kb,
    key_zb,
    _0, _1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12, _13, _14, _15, _16, _17, _18, _19, _20,
    tokens: tl.constexpr,
    requests: tl.constexpr,
    n_win: tl.constexpr,
    max_blocks: tl.constexpr,
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    groups: tl.constexpr,  # that a call can complete
    all_groups: tl.constexpr,  # that a call can touch
    keep_tails: tl.constexpr,
    ratio: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    key_dim: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
    key_size: tl.constexpr,
    key_bits: tl.constexpr,
    eps: tl.constexpr,
    kv_format: tl.constexpr,
    key_format: tl.constexpr,
):  # fmt: skip
    place, slot, begin, count = request_of(layer, slots, start, num_new, tokens, requests)
    unit, phase, batch = tl.program_id(1), begin % ratio, tl.program_id(0).to(tl.int64)
    dim: tl.constexpr = nope_dim + rope_dim
    tail_units: tl.constexpr = 0 if keep_tails else 2
    if unit < 2 * groups:
        group = unit % groups
        if group < (phase + count) // ratio:
            row, there = _find(begin // ratio + group, slot, layer, block_table, max_blocks, num_blocks, per_block)
            turn = angles + (batch * all_groups + group) * rope_dim
            if unit < groups:
                channel = tl.arange(0, size)
                y = tl.load(pooled + (batch * groups + group) * dim + channel, mask=channel < dim, other=0.0)
                y = norm_and_rope(y, norm, turn, dim, rope_dim, eps)
                store_row(y, entry_nope, entry_rope, entry_scale, row, there, nope_dim, rope_dim, kv_format)
            else:
                key = tl.load(key_pooled + (batch * groups + group) * key_dim + tl.arange(0, key_dim))
                key = hadamard(norm_and_rope(key, key_norm, turn, key_dim, rope_dim, eps), key_bits)
                store_key(key, codes, codes_scale, row, there, key_dim, key_format)
    elif unit < 2 * groups + tail_units:
        if unit == 2 * groups:
            tails = (ka, za, kb_next, zb_next, kb, zb)
            _rotate(place, phase, count, (k, z), tails, tokens, ratio, dim, rows, size)
        else:
            tails = (key_ka, key_za, key_kb_next, key_zb_next, key_kb, key_zb)
            _rotate(place, phase, count, (key_k, key_z), tails, tokens, ratio, key_dim, rows, key_size)
    else:
        window = (window_nope, window_rope, window_scale)
        unit -= 2 * groups + tail_units
        _window_row(unit, place, begin, count, kv, window, pos, tokens, n_win, nope_dim, rope_dim, size, kv_format)


@triton.jit
def cache_step_store_hca(
    layer,  # i32 [1]
    slots,  # i32 [B]
    start,  # i32 [B]
    num_new,  # i32 [B]
    block_table,  # i32 [requests, max_blocks]
    kv,  # f32 [B, T, dim]; not used without a window
    pooled,  # f32 [B, groups, dim]
    norm,  # [dim]
    angles,  # f32 [B, all groups, rope_dim]
    k,  # f32 [B, T, dim]
    z,
    running,  # f32 [B, 3, dim]; of the online form
    window_nope,  # [layers, requests, n_win, nope_dim]
    window_rope,
    window_scale,
    pos,  # i32 [layers, requests, n_win]
    entry_nope,  # [layers, num_blocks, per_block, nope_dim]
    entry_rope,
    entry_scale,
    first,  # ring: ka [layers, requests, ratio, dim]. online: the peak f32 [layers, requests, dim]
    second,  # ring: za. online: the total
    third,  # online: the weighted sum
    _0, _1, _2, _3, _4, _5, _6, _7, _8, _9,
    tokens: tl.constexpr,
    requests: tl.constexpr,
    n_win: tl.constexpr,
    max_blocks: tl.constexpr,
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    groups: tl.constexpr,  # of ``pooled``
    entries: tl.constexpr,  # that a call can complete
    all_groups: tl.constexpr,  # that a call can touch
    tail_units: tl.constexpr,  # rows of the ring, or 1 for the online form; 0 to keep the tails
    online: tl.constexpr,
    ratio: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    size: tl.constexpr,
    eps: tl.constexpr,
    kv_format: tl.constexpr,
):  # fmt: skip
    place, slot, begin, count = request_of(layer, slots, start, num_new, tokens, requests)
    unit, phase, batch = tl.program_id(1), begin % ratio, tl.program_id(0).to(tl.int64)
    dim: tl.constexpr = nope_dim + rope_dim
    channel = tl.arange(0, size)
    inside = channel < dim
    if unit < entries:
        if unit < (phase + count) // ratio:
            row, there = _find(begin // ratio + unit, slot, layer, block_table, max_blocks, num_blocks, per_block)
            y = tl.load(pooled + (batch * groups + unit) * dim + channel, mask=inside, other=0.0)
            y = norm_and_rope(y, norm, angles + (batch * all_groups + unit) * rope_dim, dim, rope_dim, eps)
            store_row(y, entry_nope, entry_rope, entry_scale, row, there, nope_dim, rope_dim, kv_format)
    elif unit < entries + tail_units:
        if online:
            if count > 0:
                at = running + batch * 3 * dim + channel
                tl.store(first + place * dim + channel, tl.load(at, mask=inside), mask=inside)
                tl.store(second + place * dim + channel, tl.load(at + dim, mask=inside), mask=inside)
                tl.store(third + place * dim + channel, tl.load(at + 2 * dim, mask=inside), mask=inside)
        else:
            token = count - tail_units + unit - entries
            inside = inside & (count > 0) & (token >= 0)
            at = (place * ratio + (begin + token) % ratio) * dim + channel
            new = (batch * tokens + token) * dim + channel
            dtype: tl.constexpr = first.dtype.element_ty
            tl.store(first + at, tl.load(k + new, mask=inside, other=0.0).to(dtype), mask=inside)
            tl.store(second + at, tl.load(z + new, mask=inside, other=0.0).to(dtype), mask=inside)
    else:
        window = (window_nope, window_rope, window_scale)
        unit -= entries + tail_units
        _window_row(unit, place, begin, count, kv, window, pos, tokens, n_win, nope_dim, rope_dim, size, kv_format)


@triton.jit
def cache_step_window(
    layer,  # i32 [1]
    slots,  # i32 [B]
    start,  # i32 [B]
    num_new,  # i32 [B]
    kv,  # f32 [B, T, dim]
    nope,  # [layers, requests, n_win, nope_dim]
    rope,
    scale,
    pos,  # i32 [layers, requests, n_win]
    _0, _1, _2, _3,
    tokens: tl.constexpr,
    requests: tl.constexpr,
    n_win: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    size: tl.constexpr,
    kv_format: tl.constexpr,
):  # fmt: skip
    place, _, begin, count = request_of(layer, slots, start, num_new, tokens, requests)
    window = (nope, rope, scale)
    _window_row(
        tl.program_id(1), place, begin, count, kv, window, pos, tokens, n_win, nope_dim, rope_dim, size, kv_format
    )


@triton.jit
def flush_entries_kernel(
    layer,  # i32 [1]
    slots,  # i32 [B]
    first,  # i32 [B]
    counts,  # i32 [B]
    block_table,  # i32 [requests, max_blocks]
    rows,  # f32 [B, E, dim], after norm and rope
    keys,  # f32 [B, E, key_dim], after norm, rope and Hadamard transform
    nope,  # [layers, num_blocks, per_block, nope_dim]
    rope,
    scale,
    codes,  # [layers, num_blocks, per_block, ...]
    codes_scale,
    _0, _1, _2, _3, _4,
    entries: tl.constexpr,  # E
    requests: tl.constexpr,
    max_blocks: tl.constexpr,
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    key_dim: tl.constexpr,  # 0 without keys
    size: tl.constexpr,
    kv_format: tl.constexpr,
    key_format: tl.constexpr,
):  # fmt: skip
    _, slot, begin, count = request_of(layer, slots, first, counts, entries, requests)
    number = tl.program_id(1)
    dim: tl.constexpr = nope_dim + rope_dim
    if number < count:
        row, there = _find(begin + number, slot, layer, block_table, max_blocks, num_blocks, per_block)
        at = tl.program_id(0).to(tl.int64) * entries + number
        channel = tl.arange(0, size)
        y = tl.load(rows + at * dim + channel, mask=channel < dim, other=0.0)
        store_row(y, nope, rope, scale, row, there, nope_dim, rope_dim, kv_format)
        if key_dim > 0:
            key = tl.load(keys + at * key_dim + tl.arange(0, key_dim))
            store_key(key, codes, codes_scale, row, there, key_dim, key_format)
