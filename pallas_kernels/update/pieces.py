"""The parts of a cache update, each callable alone: one launch each, in place.

append_swa       window rows of new tokens, as ``cache_step`` writes them
flush_entries    finished entries, and their indexer keys, -> number format -> pool rows
rotate_csa       kb, zb <- kb_next, zb_next where a block is complete
reset_hca        an empty tail where a block is complete
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.rows import store_key, store_kv
from pallas_kernels.update import hca
from pallas_kernels.update.batch import NewTokens, Request, locate_entry
from pallas_kernels.update.call import append_chunk, tail_kind


def append_swa(
    stack: Any,
    layer: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    *,
    kv_format: str,
    simulate: bool = False,
) -> Any:
    """Encode rows kv f32 [B, T, head_dim] and write the newest n_win of each request into its window.

    Args: as of ``cache_update.append_chunk``; stack needs its ``state`` only. Returns the updated stack.
    """
    tokens = NewTokens(
        layer=layer, slots=slots, start=start, num_new=num_new, block_table=None, kv=kv, entry=None, key=None, rope=None
    )
    return append_chunk(stack, tokens, kv_format=kv_format, key_format="f32", ratio=None, eps=0.0, simulate=simulate)


def flush_entries(
    pool: Any,
    layer: jax.Array,
    entries: jax.Array,
    keys: jax.Array | None,
    block_table: jax.Array,
    slots: jax.Array,
    first: jax.Array,
    count: jax.Array,
    *,
    kv_format: str,
    key_format: str,
    simulate: bool = False,
) -> Any:
    """Encode finished entries and write them where the block table says.

    The launch is named ``flush_hca``, and with keys ``flush_csa``, as the library's functions are.

    Args:
      pool: pytree with ``entries`` (``nope rope scale``) and ``indexer_keys`` (``codes scale``).
      layer: int32 [1].
      entries: f32 [B, E, head_dim], normed and roped; row e of request b is its entry first[b] + e.
      keys: f32 [B, E, indexer_head_dim] or None.
      slots, first, count: int32 [B]; an entry without a block is dropped.
    """
    batch, num_entries, head_dim = entries.shape
    chex.assert_type(entries, jnp.float32)
    if keys is not None:
        chex.assert_shape(keys, (batch, num_entries, None))
        chex.assert_type(keys, jnp.float32)
    if not batch * num_entries:
        return pool
    where = NewTokens(
        layer=layer,
        slots=slots,
        start=first,
        num_new=count,
        block_table=block_table,
        kv=None,
        entry=None,
        key=None,
        rope=None,
    )
    warps = WARPGROUP // WARP

    def body(machine: Machine, given: Any, pool: Any) -> None:
        where, entries, keys = given
        request = Request.of_block(machine, where, num_entries, where.block_table.shape[0])
        entry = machine.block(1) * warps + machine.thread // WARP
        there = request.live & (entry < request.count)
        number = request.start + entry
        row = Row(Team(machine, WARP), head_dim)
        block, at, stored = locate_entry(request, pool.entries.nope, number, there)
        lead = request.layer, block, at
        values = row.load(entries, request.batch, entry, where=stored)
        with machine.when(stored):
            store_kv(row, values, pool.entries, *lead, kv_format=kv_format, where=True)
        if keys is not None:
            row = Row(Team(machine, WARP), keys.shape[-1])
            values = row.load(keys, request.batch, entry, where=stored)
            with machine.when(stored):
                store_key(row, values, pool.indexer_keys, *lead, key_format=key_format, where=True)

    name = "flush_hca" if keys is None else "flush_csa"
    grid = batch, -(-num_entries // warps)
    return launch(body, name=name, grid=grid, inputs=(where, entries, keys), state=pool, simulate=simulate)


def rotate_csa(tails: Any, layer: jax.Array, slots: jax.Array, complete: jax.Array, *, simulate: bool = False) -> Any:
    """Previous b-stream <- current b-stream of the requests whose block is complete.

    Args:
      tails: list of pytrees ``ka za kb_next zb_next kb zb`` [layers, requests, m, dim].
      layer: int32 [1].
      slots, complete: int32 [B]; complete is 0 or 1.
    """
    ratio = max(tail.kb.shape[2] for tail in tails)

    def body(machine: Machine, inputs: Any, tails: Any) -> None:
        slot, wanted = (inputs[name].load_int(machine.block(0)) for name in ("slots", "complete"))
        index, j = inputs["layer"].load_int(0), machine.block(1)
        for tail in tails:
            row = Row(Team(machine, WARPGROUP), tail.kb.shape[-1])
            moved = (slot >= 0) & (slot < tail.kb.shape[1]) & wanted.equals(1) & (j < tail.kb.shape[2])
            for source, target in ((tail.kb_next, tail.kb), (tail.zb_next, tail.zb)):
                row.store(target, row.load(source, index, slot, j, where=moved), index, slot, j, where=moved)

    inputs = {"layer": layer, "slots": slots, "complete": complete}
    grid = slots.shape[0], ratio
    return launch(body, name="rotate_csa", grid=grid, inputs=inputs, state=tails, simulate=simulate)


def reset_hca(tail: Any, layer: jax.Array, slots: jax.Array, complete: jax.Array, *, simulate: bool = False) -> Any:
    """Empty the tail of the requests whose block is complete.

    Args:
      tail: pytree ``ka za`` [layers, requests, m', dim] or ``peak total weighted`` [layers, requests, dim].
      layer, slots, complete: as of ``rotate_csa``.
    """
    kind = tail_kind(tail)
    fill = {"ka": 0.0, "za": hca.EMPTY_GATE, "peak": hca.EMPTY_GATE, "total": 0.0, "weighted": 0.0}

    def body(machine: Machine, inputs: Any, tail: Any) -> None:
        slot, wanted = (inputs[name].load_int(machine.block(0)) for name in ("slots", "complete"))
        index, j = inputs["layer"].load_int(0), machine.block(1)
        for name in ("ka", "za") if kind == "ring" else ("peak", "total", "weighted"):
            leaf = getattr(tail, name)
            row = Row(Team(machine, WARPGROUP), leaf.shape[-1])
            emptied = (slot >= 0) & (slot < leaf.shape[1]) & wanted.equals(1)
            lead = (index, slot, j) if kind == "ring" else (index, slot)
            row.store(leaf, row.constant(fill[name]), *lead, where=emptied)

    inputs = {"layer": layer, "slots": slots, "complete": complete}
    grid = slots.shape[0], tail.ka.shape[2] if kind == "ring" else 1
    return launch(body, name="reset_hca", grid=grid, inputs=inputs, state=tail, simulate=simulate)
