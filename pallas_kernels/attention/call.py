"""Decode attention over the cache in place: window, and entries picked by the indexer or all that are visible.

    out_h = sum over keys of exp(l) k / (sum of exp(l) + exp(sink_h)),      l = q_h . k / sqrt(512)

One shared key-value head (K = V). Stored rows are read where they lie and widened to f16 on the way to the tensor
cores: a stored value x becomes x (1 + e) + d, |e| <= 2^-10, |d| <= 2^-24; one above 65504 is infinite.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.attention import sm90, sm90_few, sm100
from pallas_kernels.attention.keys import FORMATS, HEAD_DIM, KEYS, NOPE_DIM, ROPE_DIM, Inputs
from pallas_kernels.language import target
from pallas_kernels.language.launch import launch

Layout = sm90.Layout | sm90_few.Layout | sm100.Layout

# Blocks that share a query, and up to how many groups of heads: as many clusters as an H200 holds at once.
_CLUSTERS = {8: 13, 4: 32, 2: 66}
# Heads of a block of the kernel for few queries, and how many tiles the block must have: with fewer warpgroups than
# that, more heads were slower than the kernel for many queries.
_FEW_HEADS = {8: 1, 16: 1, 32: 2}


def unsupported_attention(*, kv_format: str, num_heads: int, nope_dim: int, rope_dim: int) -> str | None:
    """Why the kernel cannot serve these formats and sizes, or None where it can."""
    if kv_format not in FORMATS:
        return f"kv_format must be one of {FORMATS}, got {kv_format!r}"
    if (nope_dim, rope_dim) != (NOPE_DIM, ROPE_DIM):
        return f"a head must have {NOPE_DIM} NoPE and {ROPE_DIM} RoPE channels, got {nope_dim} and {rope_dim}"
    if num_heads % sm90.HEADS:
        return f"num_heads must be a multiple of {sm90.HEADS}, got {num_heads}"
    return None


def decode_attention(
    q: jax.Array,
    window: Any,
    pos: jax.Array,
    fresh: Any,
    entries: Any,
    picks: jax.Array | None,
    block_table: jax.Array | None,
    slots: jax.Array,
    start: jax.Array,
    positions: jax.Array,
    visible: jax.Array | None,
    sinks: jax.Array,
    angles: jax.Array | None,
    layer: jax.Array,
    *,
    kv_format: str,
    dtype: Any = jnp.bfloat16,
    layout: Layout | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Attention of each query over its own keys.

    Args:
      q: f16 or bf16 [B, T, H, 512].
      window: rows [layers, requests, n_win, ...] with leaves ``nope rope scale``; position p sits in row p % n_win.
      pos: int32 [layers, requests, n_win], the position that a ring's row holds; others are no keys.
      fresh: rows [B, F, ...] of positions start .. start + F - 1, in place of the ring's; or None.
      entries: rows [layers, num_blocks, entries_per_block, ...], or None.
      picks: int32 [B, T, K] entry numbers, -1 = none, or None: all below visible.
      block_table: int32 [requests, max_blocks], -1 = none; None without entries.
      slots, start: int32 [B]; slot -1 = none.
      positions: int32 [B, T], -1 = none: the output is 0. A query sees positions max(0, p - n_win + 1) .. p.
      visible: int32 [B, T] entries that a query may see; None without entries.
      sinks: f32 [H].
      angles: f32 [B, T, 64] cosines, then sines, that the output's RoPE channels are turned back by; or None.
      layer: int32 [1].
      dtype: of the result, bf16 or f32.
      layout: which kernel, and how it shares a query's work; None for the device's fastest, from ``choose_layout``.

    Returns:
      dtype [B, T, H, 512].
    """
    chex.assert_rank([q, positions, pos], [4, 2, 3])
    batch, tokens, heads, head_dim = q.shape
    reason = unsupported_attention(
        kv_format=kv_format,
        num_heads=heads,
        nope_dim=window.nope.shape[-1],
        rope_dim=window.rope.shape[-1],
    )
    if reason is not None:
        raise ValueError(reason)
    for rows in (window, entries):
        if rows is not None and math.prod(rows.nope.shape[:-1]) >= 2**31:
            raise ValueError(f"an array may have 2^31 - 1 rows, got {rows.nope.shape[:-1]}")
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"q must be float16 or bfloat16, got {q.dtype}")
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype}")
    chex.assert_shape(q, (batch, tokens, heads, HEAD_DIM))
    chex.assert_shape(window.nope, (*pos.shape, NOPE_DIM))
    if angles is not None:
        chex.assert_shape(angles, (batch, tokens, ROPE_DIM))
        chex.assert_type(angles, jnp.float32)
    chex.assert_type([pos, slots, start, positions, layer], jnp.int32)
    chex.assert_shape([slots, start], (batch,))
    chex.assert_shape(positions, (batch, tokens))
    chex.assert_shape(sinks, (heads,))
    keys = 0  # entries of a query, at most
    if entries is not None:
        assert block_table is not None, "entries are found through a block table"
        keys = picks.shape[2] if picks is not None else block_table.shape[1] * entries.nope.shape[2]
        chex.assert_shape(visible, (batch, tokens))
        chex.assert_type([visible, block_table], jnp.int32)
        chex.assert_shape(block_table, (pos.shape[1], None))
        chex.assert_shape(entries.nope, (pos.shape[0], None, None, NOPE_DIM))
    if fresh is not None:
        chex.assert_shape(fresh.nope, (batch, None, NOPE_DIM))
    if picks is not None:
        chex.assert_shape(picks, (batch, tokens, None))
        chex.assert_type(picks, jnp.int32)
    inputs = Inputs(
        q=q,
        window=window,
        pos=pos,
        fresh=fresh,
        entries=entries,
        picks=picks,
        block_table=block_table if entries is not None else None,
        slots=slots,
        start=start,
        positions=positions,
        visible=visible if entries is not None else None,
        sinks=sinks.astype(jnp.float32),
        angles=angles,
        layer=layer,
    )
    tiles = -(-pos.shape[2] // KEYS) - (-keys // KEYS)
    if layout is None:
        layout = choose_layout(target.architecture(), batch * tokens, heads, tiles)
    layout.check(heads, tiles)
    groups = heads // layout.heads
    out = jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), dtype)
    out, _ = launch(
        functools.partial(layout.body, kv_format=kv_format),
        name="decode_attention",
        grid=(batch * tokens, groups),
        inputs=inputs,
        state=(out, layout.scratch(batch * tokens, groups)),
        warpgroups=layout.warpgroups,
        cluster=layout.cluster,
        shared_bytes=layout.shared_bytes,
        simulate=simulate,
    )
    return out


def choose_layout(architecture: str, queries: int, heads: int, tiles: int) -> Layout:
    """The fastest one: as many blocks as fill the chip once, and have a tile each.

    Args:
      architecture: "sm90" or "sm100".
      tiles: of ``KEYS`` keys that a query may have.
    """
    cluster = next((n for n, most in _CLUSTERS.items() if queries * heads <= most * sm90.HEADS and n <= tiles), 1)
    if architecture != "sm90":
        return sm100.Layout(cluster=cluster)
    for some, least in _FEW_HEADS.items() if cluster > 1 else ():
        few = sm90_few.Layout(heads=some, cluster=cluster, tiles=-(-tiles // cluster))
        if queries * heads <= some * _CLUSTERS[cluster] and few.tiles >= least and few.fits:
            return few
    return sm90.Layout(cluster=cluster)
