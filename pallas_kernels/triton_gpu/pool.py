"""Pooling of a compressor's rows, the first launch of a cache update: what finished entries are made of.

    CSA  sum softmax(Z) * K over 2m rows, per channel: the b-stream of group g - 1, then the a-stream of group g
    HCA  sum softmax(Z) * K over the rows of group g

A request's tokens are divided into groups of ``ratio`` tokens, each of which becomes one entry. A call touches groups
0, 1 and so on of a request; the first ``phase`` tokens of group 0 came before the call, and are in the tail. These
kernels only read, so that the second launch may change the tails.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of(layer, slots, start, num_new, tokens: tl.constexpr, requests: tl.constexpr):
    """The request of this block: (place of its slot in a stack [layers, requests], slot, start, number of tokens).

    The number is 0 if the request stores nothing.
    """
    batch = tl.program_id(0)
    slot, begin, count = tl.load(slots + batch), tl.load(start + batch), tl.load(num_new + batch)
    live = (slot >= 0) & (slot < requests) & (begin >= 0) & (count > 0) & (count <= tokens)
    slot = tl.where(live, slot, 0)
    return tl.load(layer).to(tl.int64) * requests + slot, slot, begin, tl.where(live, count, 0)


@triton.jit
def _stream(new, at, there, tail, tail_at, from_tail, empty: tl.constexpr):
    """Rows from the new tokens or from the tail, f32; ``empty`` where neither has one."""
    fresh = tl.load(new + at, mask=there, other=empty)
    old = tl.load(tail + tail_at, mask=from_tail, other=empty).to(tl.float32)
    return tl.where(from_tail, old, fresh)


@triton.jit
def _pool_group(
    group,
    place,
    phase,
    count,
    streams,  # k, z
    tails,  # ka, za, kb_next, zb_next, kb, zb
    pooled,
    tokens: tl.constexpr,
    groups: tl.constexpr,
    ratio: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
):
    """Pool one group of CSA. ``rows`` and ``size`` are the powers of two that hold ``ratio`` and ``dim``."""
    k, z = streams
    ka, za, kb_next, zb_next, kb, zb = tails
    row, channel = tl.arange(0, rows)[:, None], tl.arange(0, size)[None, :]
    batch = tl.program_id(0).to(tl.int64)
    inside = (row < ratio) & (channel < dim)
    old = (place * ratio + row) * dim + channel
    token = group * ratio + row - phase
    at = (batch * tokens + token) * (2 * dim) + dim + channel
    there, from_tail = inside & (token >= 0) & (token < count), inside & (token < 0)
    keys_a = _stream(k, at, there, ka, old, from_tail, 0.0)
    gates_a = _stream(z, at, there, za, old, from_tail, -1e9)
    # The group before: in the tail under another name if the call begins with this one.
    token -= ratio
    at -= ratio * (2 * dim) + dim
    there, from_tail = inside & (token >= 0) & (token < count), inside & (token < 0)
    if group == 0:
        keys_b = tl.load(kb + old, mask=inside, other=0.0).to(tl.float32)
        gates_b = tl.load(zb + old, mask=inside, other=-1e9).to(tl.float32)
    else:
        keys_b = _stream(k, at, there, kb_next, old, from_tail, 0.0)
        gates_b = _stream(z, at, there, zb_next, old, from_tail, -1e9)
    # Rows past the ratio must not count, not even where all others are empty.
    gates_a = tl.where(row < ratio, gates_a, float("-inf"))
    gates_b = tl.where(row < ratio, gates_b, float("-inf"))
    peak = tl.maximum(tl.max(gates_a, 0), tl.max(gates_b, 0))[None, :]
    weights_a, weights_b = tl.exp(gates_a - peak), tl.exp(gates_b - peak)
    total = tl.sum(weights_a, 0) + tl.sum(weights_b, 0)
    weighted = tl.sum(weights_a * keys_a, 0) + tl.sum(weights_b * keys_b, 0)
    channel = tl.arange(0, size)
    tl.store(pooled + (batch * groups + group) * dim + channel, tl.div_rn(weighted, total), mask=channel < dim)


@triton.jit
def cache_step_pool_csa(
    layer,  # i32 [1]
    slots,  # i32 [B]
    start,  # i32 [B]
    num_new,  # i32 [B]
    k,  # f32 [B, T, 2 dim]
    z,
    key_k,  # f32 [B, T, 2 key_dim]
    key_z,
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
    pooled,  # f32 [B, groups, dim]
    key_pooled,  # f32 [B, groups, key_dim]
    tokens: tl.constexpr,
    requests: tl.constexpr,
    groups: tl.constexpr,  # that a call can complete
    ratio: tl.constexpr,
    dim: tl.constexpr,
    key_dim: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
    key_size: tl.constexpr,
):
    place, _, begin, count = request_of(layer, slots, start, num_new, tokens, requests)
    phase, group = begin % ratio, tl.program_id(1)
    if group < (phase + count) // ratio:
        if tl.program_id(2) == 0:
            tails = (ka, za, kb_next, zb_next, kb, zb)
            _pool_group(group, place, phase, count, (k, z), tails, pooled, tokens, groups, ratio, dim, rows, size)
        else:
            tails = (key_ka, key_za, key_kb_next, key_zb_next, key_kb, key_zb)
            _pool_group(
                group,
                place,
                phase,
                count,
                (key_k, key_z),
                tails,
                key_pooled,
                tokens,
                groups,
                ratio,
                key_dim,
                rows,
                key_size,
            )


@triton.jit
def cache_step_pool_hca(
    layer,  # i32 [1]
    slots,  # i32 [B]
    start,  # i32 [B]
    num_new,  # i32 [B]
    k,  # f32 [B, T, dim]
    z,
    first,  # ring: ka [layers, requests, ratio, dim]. online: the peak f32 [layers, requests, dim]
    second,  # ring: za. online: the total
    third,  # online: the weighted sum
    pooled,  # f32 [B, groups, dim]
    running,  # f32 [B, 3, dim], the running softmax of the last group; of the online form
    tokens: tl.constexpr,
    requests: tl.constexpr,
    groups: tl.constexpr,  # that a call can touch
    ratio: tl.constexpr,
    dim: tl.constexpr,
    online: tl.constexpr,
    channels: tl.constexpr,  # of a block
    rows: tl.constexpr,  # that a block loads at once
):
    place, _, begin, count = request_of(layer, slots, start, num_new, tokens, requests)
    batch, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    phase = begin % ratio
    complete, last = (phase + count) // ratio, (phase + tl.maximum(count, 1) - 1) // ratio
    needed = (group < complete) | (online & (group == last))
    channel = tl.program_id(2) * channels + tl.arange(0, channels)
    inside = channel < dim
    peak = tl.full((channels,), -1e9, tl.float32)
    total, weighted = tl.zeros((channels,), tl.float32), tl.zeros((channels,), tl.float32)
    if online:
        carried = inside & needed & (group == 0) & (count > 0)
        peak = tl.load(first + place * dim + channel, mask=carried, other=-1e9)
        total = tl.load(second + place * dim + channel, mask=carried, other=0.0)
        weighted = tl.load(third + place * dim + channel, mask=carried, other=0.0)
    begin_row = tl.where(group == 0, phase, 0) if online else 0
    end_row = tl.where(needed & (count > 0), tl.minimum(ratio, phase + count - group * ratio), 0)
    for some in tl.range(begin_row, end_row, rows):
        row = some + tl.arange(0, rows)[:, None]
        token = group * ratio + row - phase
        there = (row < end_row) & inside[None, :] & (token >= 0)
        at = (batch * tokens + token) * dim + channel[None, :]
        if online:
            keys = tl.load(k + at, mask=there, other=0.0)
            gates = tl.load(z + at, mask=there, other=-1e9)
        else:
            from_tail = (row < end_row) & inside[None, :] & (token < 0)
            old = (place * ratio + row) * dim + channel[None, :]
            keys = _stream(k, at, there, first, old, from_tail, 0.0)
            gates = _stream(z, at, there, second, old, from_tail, -1e9)
        new_peak = tl.maximum(peak, tl.max(gates, 0))
        kept = tl.exp(peak - new_peak)
        # An empty row weighs nothing, not even beside an empty peak.
        weights = tl.where(gates <= -5e8, 0.0, tl.exp(gates - new_peak[None, :]))
        total = total * kept + tl.sum(weights, 0)
        weighted = weighted * kept + tl.sum(weights * keys, 0)
        peak = new_peak
    at = (batch * groups + group) * dim + channel
    result = tl.div_rn(weighted, tl.where(total > 0, total, 1.0))
    tl.store(pooled + at, tl.where(total != total, total, result), mask=inside & (group < complete))
    if online:
        at = batch * 3 * dim + channel
        left = inside & (group == last) & (count > 0)
        # The softmax of a group that is complete begins anew.
        is_over = group < complete
        tl.store(running + at, tl.where(is_over, -1e9, peak), mask=left)
        tl.store(running + at + dim, tl.where(is_over, 0.0, total), mask=left)
        tl.store(running + at + 2 * dim, tl.where(is_over, 0.0, weighted), mask=left)
