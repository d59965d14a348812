"""The entries that new tokens complete, each alone, and running sums to which tokens are added one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.pool import ExactEntries
from dsv4jax.indexing import Batch, quotient, read_slots, remainder
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.call import LayerCall, Normed
from dsv4jax.layer.compressor import finish_entries
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.layer.tiles import apart, each, map_rows
from dsv4jax.layer.update import XLACacheUpdate
from dsv4jax.tails import EMPTY_GATE, HCAOnlineTail, Streams, Tail, softmax_pool


class InvariantCacheUpdate(XLACacheUpdate):
    """The update with the sums of each entry in the order of its tokens, however calls cut them."""

    def completed(self, call: LayerCall, normed: Normed, tail: Tail) -> ExactEntries:
        (streams, norm), phase, num_new = normed, call.phase, call.batch.num_new
        rows = read_slots(tail, call.index, call.batch.slots)
        if isinstance(rows, HCAOnlineTail):
            found = (_in_order(rows, streams, phase, num_new, call.ratio).entry,)
        else:
            found = rows.slots(streams, phase, num_new, call.ratio)
        blocks = found[0].shape[1]
        number = call.first_entry[:, None] + jnp.arange(blocks, dtype=jnp.int32)[None]

        def finished(block: tuple[tuple[jax.Array, ...], jax.Array]) -> jax.Array:
            found, number = block
            pooled = found[0] if len(found) == 1 else softmax_pool(*found)
            return finish_entries(pooled[:, None], norm, number, call.kind, call.plan.cfg)[:, 0]

        entries = map_rows(finished, (found, number), 1, axes=2)
        return ExactEntries(rows=entries, first=call.first_entry, count=quotient(phase + num_new, call.ratio))

    def appended(self, tail: Tail, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> Tail:
        if not isinstance(tail, HCAOnlineTail):
            return super().appended(tail, index, streams, batch, ratio)
        phase, old = remainder(batch.start, ratio), read_slots(tail, index, batch.slots)
        blocks = _in_order(old, streams, phase, batch.num_new, ratio)
        return tail.with_running(index, batch, blocks.of_last_token(phase, batch.num_new, ratio))


def _in_order(tail: HCAOnlineTail, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> HCAOnlineTail:
    """The running softmax of every block that the new tokens touch, leaves [B, N, dim], after one token at a time.

    A token that is not there changes nothing.
    """
    k, z = tail.slots(streams, phase, num_new, ratio)
    batch, blocks = k.shape[:2]
    empty = HCAOnlineTail(
        peak=jnp.full_like(k[:, 1:, 0], EMPTY_GATE),
        total=jnp.zeros_like(k[:, 1:, 0]),
        weighted=jnp.zeros_like(k[:, 1:, 0]),
    )
    before = jax.tree.map(lambda old, new: jnp.concatenate([old[:, None], new], axis=1), tail, empty)

    def of_block(given: tuple[HCAOnlineTail, jax.Array, jax.Array]) -> HCAOnlineTail:
        before, k, z = given

        def add(i: jax.Array | int, state: HCAOnlineTail) -> HCAOnlineTail:
            return apart(lambda given: _with_token(*given), (state, k[i], z[i]))

        return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(k.shape[0])), add, before)  # as in ``each``

    flat = jax.tree.map(lambda leaf: leaf.reshape(batch * blocks, *leaf.shape[2:]), (before, k, z))
    return jax.tree.map(lambda leaf: leaf.reshape(batch, blocks, -1), each(of_block, flat))


def _with_token(state: HCAOnlineTail, k: jax.Array, z: jax.Array) -> HCAOnlineTail:
    """Add a token's key and gate f32 [dim] to a running softmax of leaves [dim]."""
    peak = jnp.maximum(state.peak, z)
    carried, weight = jnp.exp(state.peak - peak), jnp.where(z == EMPTY_GATE, 0.0, jnp.exp(z - peak))
    return HCAOnlineTail(
        peak=peak, total=state.total * carried + weight, weighted=state.weighted * carried + weight * k
    )


CACHE_UPDATE.register_invariant(XLA, InvariantCacheUpdate())
