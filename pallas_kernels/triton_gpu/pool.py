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

from typing import NamedTuple

import triton
import triton.language as tl

from pallas_kernels.triton_gpu.operands import Batch, Both, CSATail, Leaf, Pooled, Streams, Tokens


class Request(NamedTuple):
    """The request of a block."""

    number: Leaf  # i64, in the batch
    slot: Leaf
    place: Leaf  # i64, of its slot in a stack [layers, requests]
    start: Leaf
    num_new: Leaf  # 0 if the request stores nothing


@triton.jit
def request_of(batch: Batch, most: tl.constexpr, requests: tl.constexpr):
    """The request of this block, which has at most ``most`` new tokens or entries."""
    number = tl.program_id(0)
    slot, start, num_new = tl.load(batch.slots + number), tl.load(batch.start + number), tl.load(batch.num_new + number)
    live = (slot >= 0) & (slot < requests) & (start >= 0) & (num_new > 0) & (num_new <= most)
    slot = tl.where(live, slot, 0)
    place = tl.load(batch.layer).to(tl.int64) * requests + slot
    return Request(number.to(tl.int64), slot, place, start, tl.where(live, num_new, 0))


@triton.jit
def _stream(new, at, there, tail, tail_at, from_tail, empty: tl.constexpr):
    """Rows from the new tokens or from the tail, f32; ``empty`` where neither has one."""
    fresh = tl.load(new + at, mask=there, other=empty)
    old = tl.load(tail + tail_at, mask=from_tail, other=empty).to(tl.float32)
    return tl.where(from_tail, old, fresh)


@triton.jit
def _pool_group(
    group,
    request: Request,
    streams: Streams,
    tail: CSATail,
    pooled,
    sizes: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
):
    """Pool one group of CSA. ``size`` is the power of two that holds ``dim``."""
    ratio: tl.constexpr = sizes.ratio
    row, channel = tl.arange(0, sizes.padded_ratio)[:, None], tl.arange(0, size)[None, :]
    inside = (row < ratio) & (channel < dim)
    old = (request.place * ratio + row) * dim + channel
    token = group * ratio + row - request.start % ratio
    at = (request.number * sizes.tokens + token) * (2 * dim) + dim + channel
    there, from_tail = inside & (token >= 0) & (token < request.num_new), inside & (token < 0)
    keys_a = _stream(streams.k, at, there, tail.ka, old, from_tail, 0.0)
    gates_a = _stream(streams.z, at, there, tail.za, old, from_tail, -1e9)
    # The group before: in the tail under another name if the call begins with this one.
    token -= ratio
    at -= ratio * (2 * dim) + dim
    there, from_tail = inside & (token >= 0) & (token < request.num_new), inside & (token < 0)
    if group == 0:
        keys_b = tl.load(tail.kb + old, mask=inside, other=0.0).to(tl.float32)
        gates_b = tl.load(tail.zb + old, mask=inside, other=-1e9).to(tl.float32)
    else:
        keys_b = _stream(streams.k, at, there, tail.kb_next, old, from_tail, 0.0)
        gates_b = _stream(streams.z, at, there, tail.zb_next, old, from_tail, -1e9)
    # Rows past the ratio must not count, not even where all others are empty.
    gates_a = tl.where(row < ratio, gates_a, float("-inf"))
    gates_b = tl.where(row < ratio, gates_b, float("-inf"))
    peak = tl.maximum(tl.max(gates_a, 0), tl.max(gates_b, 0))[None, :]
    weights_a, weights_b = tl.exp(gates_a - peak), tl.exp(gates_b - peak)
    total = tl.sum(weights_a, 0) + tl.sum(weights_b, 0)
    weighted = tl.sum(weights_a * keys_a, 0) + tl.sum(weights_b * keys_b, 0)
    channel = tl.arange(0, size)
    at = (request.number * sizes.max_entries + group) * dim + channel
    tl.store(pooled + at, tl.div_rn(weighted, total), mask=channel < dim)


@triton.jit
def cache_step_pool_csa(
    tokens: Tokens,
    tails: Both,  # each a CSATail
    pooled: Both,  # f32 [B, max_entries, dim], and key_dim of keys
    sizes: tl.constexpr,
    formats: tl.constexpr,
):
    request = request_of(tokens.batch, sizes.tokens, sizes.requests)
    group = tl.program_id(1)
    if group < (request.start % sizes.ratio + request.num_new) // sizes.ratio:
        if tl.program_id(2) == 0:
            _pool_group(group, request, tokens.entry, tails.entry, pooled.entry, sizes, formats.dim, formats.size)
        else:
            _pool_group(group, request, tokens.key, tails.key, pooled.key, sizes, formats.key_dim, formats.key_dim)


@triton.jit
def cache_step_pool_hca(
    tokens: Tokens,
    tail,  # a RingTail, or an OnlineTail
    pooled: Pooled,  # its rows are those of max_entries groups of a ring, or of max_groups online
    sizes: tl.constexpr,
    formats: tl.constexpr,
    channels: tl.constexpr,  # of a block
    rows: tl.constexpr,  # that a block loads at once
):
    online: tl.constexpr = pooled.running is not None
    groups: tl.constexpr = sizes.max_groups if online else sizes.max_entries
    ratio: tl.constexpr = sizes.ratio
    dim: tl.constexpr = formats.dim
    request = request_of(tokens.batch, sizes.tokens, sizes.requests)
    num_new, group = request.num_new, tl.program_id(1)
    phase = request.start % ratio
    complete, last = (phase + num_new) // ratio, (phase + tl.maximum(num_new, 1) - 1) // ratio
    needed = (group < complete) | (online & (group == last))
    channel = tl.program_id(2) * channels + tl.arange(0, channels)
    inside = channel < dim
    peak = tl.full((channels,), -1e9, tl.float32)
    total, weighted = tl.zeros((channels,), tl.float32), tl.zeros((channels,), tl.float32)
    if online:
        carried = inside & needed & (group == 0) & (num_new > 0)
        peak = tl.load(tail.peak + request.place * dim + channel, mask=carried, other=-1e9)
        total = tl.load(tail.total + request.place * dim + channel, mask=carried, other=0.0)
        weighted = tl.load(tail.weighted + request.place * dim + channel, mask=carried, other=0.0)
    begin_row = tl.where(group == 0, phase, 0) if online else 0
    end_row = tl.where(needed & (num_new > 0), tl.minimum(ratio, phase + num_new - group * ratio), 0)
    for some in tl.range(begin_row, end_row, rows):
        row = some + tl.arange(0, rows)[:, None]
        token = group * ratio + row - phase
        there = (row < end_row) & inside[None, :] & (token >= 0)
        at = (request.number * sizes.tokens + token) * dim + channel[None, :]
        if online:
            keys = tl.load(tokens.entry.k + at, mask=there, other=0.0)
            gates = tl.load(tokens.entry.z + at, mask=there, other=-1e9)
        else:
            from_tail = (row < end_row) & inside[None, :] & (token < 0)
            old = (request.place * ratio + row) * dim + channel[None, :]
            keys = _stream(tokens.entry.k, at, there, tail.ka, old, from_tail, 0.0)
            gates = _stream(tokens.entry.z, at, there, tail.za, old, from_tail, -1e9)
        new_peak = tl.maximum(peak, tl.max(gates, 0))
        kept = tl.exp(peak - new_peak)
        # An empty row weighs nothing, not even beside an empty peak.
        weights = tl.where(gates <= -5e8, 0.0, tl.exp(gates - new_peak[None, :]))
        total = total * kept + tl.sum(weights, 0)
        weighted = weighted * kept + tl.sum(weights * keys, 0)
        peak = new_peak
    at = (request.number * groups + group) * dim + channel
    result = tl.div_rn(weighted, tl.where(total > 0, total, 1.0))
    tl.store(pooled.rows + at, tl.where(total != total, total, result), mask=inside & (group < complete))
    if online:
        at = request.number * 3 * dim + channel
        left = inside & (group == last) & (num_new > 0)
        # The softmax of a group that is complete begins anew.
        is_over = group < complete
        tl.store(pooled.running + at, tl.where(is_over, -1e9, peak), mask=left)
        tl.store(pooled.running + at + dim, tl.where(is_over, 0.0, total), mask=left)
        tl.store(pooled.running + at + 2 * dim, tl.where(is_over, 0.0, weighted), mask=left)
