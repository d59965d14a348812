"""The steps of a cache update as separate kernels, each one launch, in place.

append_swa       writes window rows of new tokens, as ``cache_step`` does
flush_entries    encodes finished entries and their indexer keys, and writes them to the pool
rotate_csa       kb, zb <- kb_next, zb_next where a group is complete
reset_hca        empties the tail where a group is complete
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KEY_FORMATS, KV_FORMATS
from pallas_kernels.language.lanes import Buffer, Row, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.update.batch import NewEntries, NewTokens, Pool, Request, Stack
from pallas_kernels.update.call import append_chunk, update_of


def append_swa[Layers: Stack[jax.Array]](
    stack: Layers,
    layer: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    *,
    kv_format: str,
    simulate: bool = False,
) -> Layers:
    """Encode rows kv f32 [B, T, head_dim], and write the newest n_win of each request into its window.

    The arguments are those of ``append_chunk``; of ``stack`` only ``state`` is needed. Returns the updated stack.
    """
    tokens = NewTokens.of_window(layer, kv, slots, start, num_new)
    return append_chunk(stack, tokens, kv_format=kv_format, key_format="f32", ratio=None, eps=0.0, simulate=simulate)


def flush_entries[Entries: Pool[jax.Array]](
    pool: Entries, new: NewEntries[jax.Array], *, kv_format: str, key_format: str, simulate: bool = False
) -> Entries:
    """Encode finished entries and write them where the block table says.

    The launch is named ``flush_hca``, or with keys ``flush_csa``.

    Args:
      pool: pytree with ``entries`` (``nope rope scale``) and ``indexer_keys`` (``codes scale``), leaves [layers,
        num_pages, entries_per_page, ...].
      new: the entries. Those without a page are dropped.
      kv_format, key_format: of the stored rows, from ``formats.KV_FORMATS`` and ``formats.KEY_FORMATS``.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The updated pool.
    """
    batch, num_entries, head_dim = new.entries.shape
    chex.assert_type(new.entries, jnp.float32)
    chex.assert_shape([new.slots, new.first, new.count], (batch,))
    chex.assert_type([new.layer, new.slots, new.first, new.count, new.block_table], jnp.int32)
    if new.keys is not None:
        chex.assert_shape(new.keys, (batch, num_entries, None))
        chex.assert_type(new.keys, jnp.float32)
    if not batch * num_entries:
        return pool
    warps, rows_as, keys_as = WARPGROUP // WARP, KV_FORMATS[kv_format], KEY_FORMATS[key_format]

    def body(machine: Machine, new: NewEntries[Buffer], pool: Pool[Buffer]) -> None:
        table = new.block_table
        request = Request.load(
            machine,
            layer=new.layer,
            slots=new.slots,
            start=new.first,
            count=new.count,
            most=num_entries,
            num_slots=table.shape[0],
        )
        entry = machine.block(1) * warps + machine.thread // WARP
        there = request.live & (entry < request.count)
        number = request.start + entry
        row = Row(Team(machine, WARP), head_dim)
        page, at, stored = request.locate(table, pool.entries.nope, number, there)
        lead = request.layer, page, at
        values = row.load(new.entries, request.batch, entry, where=stored)
        with machine.when(stored):
            rows_as.store(row, values, pool.entries, *lead, where=True)
        if new.keys is not None:
            row = Row(Team(machine, WARP), new.keys.shape[-1])
            values = row.load(new.keys, request.batch, entry, where=stored)
            assert pool.indexer_keys is not None
            with machine.when(stored):
                keys_as.store(row, values, pool.indexer_keys, *lead, where=True)

    name = "flush_hca" if new.keys is None else "flush_csa"
    grid = batch, -(-num_entries // warps)
    return launch(body, name=name, grid=grid, inputs=new, state=pool, simulate=simulate)


def rotate_csa[Tail](
    tails: list[Tail], layer: jax.Array, slots: jax.Array, complete: jax.Array, *, simulate: bool = False
) -> list[Tail]:
    """Copy the current b-stream over the previous one for requests whose group is complete.

    Args:
      tails: list of pytrees ``ka za kb_next zb_next kb zb`` [layers, requests, m, dim].
      layer: int32 [1].
      slots, complete: int32 [B]; complete is 0 or 1.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The updated tails.
    """
    return _reset("rotate_csa", tails, (complete, layer, slots), simulate)


def reset_hca[Tail](
    tail: Tail, layer: jax.Array, slots: jax.Array, complete: jax.Array, *, simulate: bool = False
) -> Tail:
    """Empty the tail of requests whose group is complete.

    Args:
      tail: pytree ``ka za`` [layers, requests, m', dim] or ``peak total weighted`` [layers, requests, dim].
      layer, slots, complete, simulate: as for ``rotate_csa``.

    Returns:
      The updated tail.
    """
    return _reset("reset_hca", [tail], (complete, layer, slots), simulate)[0]


def _reset[Tail](
    name: str, tails: list[Tail], groups: tuple[jax.Array, jax.Array, jax.Array], simulate: bool
) -> list[Tail]:
    """Launch one warpgroup per request and row of the largest tail, which calls ``TailUpdate.reset`` for that row.

    ``groups`` says which requests have completed a group: ``complete``, ``layer`` and ``slots`` of ``rotate_csa``.
    """
    updates = [update_of(tail) for tail in tails]

    def body(machine: Machine, groups: tuple[Buffer, Buffer, Buffer], tails: list[object]) -> None:
        of_complete, layer, of_slots = groups
        slot, complete = (leaf.load_int(machine.block(0)) for leaf in (of_slots, of_complete))
        lead, j = (layer.load_int(0), slot), machine.block(1)
        for update, tail in zip(updates, tails, strict=True):
            _, requests, *_, dim = getattr(tail, update.leaves[0]).shape
            row = Row(Team(machine, WARPGROUP), dim)
            update.reset(row, tail, lead, j, (slot >= 0) & (slot < requests) & (complete == 1))

    rows = max(math.prod(leaf.shape[2:-1]) for leaf in jax.tree.leaves(tails))
    grid = groups[2].shape[0], rows
    return launch(body, name=name, grid=grid, inputs=groups, state=tails, simulate=simulate)
