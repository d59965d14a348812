"""StateCache: what a layer keeps per request whatever its length. Sliding window and compressor tails.

Position p of a request sits in window row p mod n_win. Nothing is cleared on the way: a row is overwritten by the next
token that maps to it. The write heads of the window and the fill of a tail are the request's length modulo their sizes,
so they are not stored. ``tails`` says what the tails are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.checks import check_batch
from dsv4jax.derivatives import straight_through
from dsv4jax.formats import KVRows
from dsv4jax.indexing import put_in_all_layers, unique_or_dropped
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan
from dsv4jax.tails import CSATail, Tail, empty_tail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """State of all layers of one kind."""

    window: KVRows  # [layers, requests, n_win, ...] the newest n_win rows, a ring
    pos: jax.Array  # int32 [layers, requests, n_win] absolute position of a window row, -1 = empty
    tail: Tail | None  # None for SWA
    indexer_tail: CSATail | None  # CSA only


def empty_state(plan: CachePlan, kind: AttentionType, lead: tuple[int, ...]) -> StateCache:
    """The state of requests that have seen no token, with leading axes ``lead`` (layers, requests)."""
    n_win = plan.cfg.sliding_window
    tail, indexer_tail = plan.tail_specs(kind)
    return StateCache(
        window=jax.tree.map(lambda leaf: jnp.zeros((*lead, n_win, *leaf.shape), leaf.dtype), plan.row_spec),
        pos=jnp.full((*lead, n_win), -1, jnp.int32),
        tail=empty_tail(tail, lead),
        indexer_tail=empty_tail(indexer_tail, lead),
    )


def init_state(plan: CachePlan, kind: AttentionType) -> StateCache:
    """Empty state of every layer of a kind and every slot."""
    return empty_state(plan, kind, (len(plan.layers(kind)), plan.max_requests))


def reset_slots(state: StateCache, slots: jax.Array, *, plan: CachePlan, kind: AttentionType) -> StateCache:
    """Make slots [B] empty in all layers of a kind at once, as ``init_state`` made them; -1 is a no-op."""
    check_batch(slots=slots)
    requests = state.pos.shape[1]
    target = unique_or_dropped(slots, slots >= 0, requests)
    empty = empty_state(plan, kind, (state.pos.shape[0], slots.shape[0]))
    return put_in_all_layers(state, target, empty)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """One layer's windows as the requests of a batch see them: rows by position.

    A chunk's late tokens overwrite ring rows that its early queries see. So its rows can be given beside the ring, as
    ``fresh``, and be stored afterwards.
    """

    state: StateCache
    index: jax.Array | int  # layer's place in its stack
    slots: jax.Array  # int32 [B]
    start: jax.Array  # int32 [B] position of the first fresh row; the ring is read below it
    fresh: KVRows | None  # [B, F, ...] rows not stored yet; None: the ring holds all
    plan: CachePlan = dataclasses.field(metadata={"static": True})
    exact: jax.Array | None = (
        None  # f32 [B, F, head_dim] rows from ``start`` on as they were before rounding: derivatives
    )

    def rows(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows at int32 [B, K] positions, f32 [B, K, head_dim], zero where there is none; and bool [B, K], where."""
        slots = self.slots[:, None]
        row = jnp.remainder(position, self.plan.cfg.sliding_window)  # of a negative position too: in range, then masked
        stored = self.state.window, self.state.pos
        rows, pos = jax.tree.map(lambda leaf: leaf.at[self.index, slots, row].get(mode="clip"), stored)
        held = pos == position
        if self.fresh is not None:
            number = position - self.start[:, None]
            count, is_fresh = self.fresh.nope.shape[1], number >= 0
            held = jnp.where(is_fresh, number < count, held)

            def newest(old: jax.Array, fresh: jax.Array) -> jax.Array:
                at, new = (
                    x.reshape(x.shape + (1,) * (fresh.ndim - 2)) for x in (jnp.clip(number, 0, count - 1), is_fresh)
                )
                return jnp.where(new, jnp.take_along_axis(fresh, at, axis=1), old)

            rows = jax.tree.map(newest, rows, self.fresh)
        held &= (position >= 0) & (slots >= 0)
        values = self.plan.rows.decode(rows)
        if self.exact is not None:
            number, count = position - self.start[:, None], self.exact.shape[1]
            exact = jnp.take_along_axis(self.exact, jnp.clip(number, 0, count - 1)[..., None], axis=1)
            is_new = (number >= 0) & (number < count)
            values = jnp.where(is_new[..., None], straight_through(values, exact), values)
        return jnp.where(held[..., None], values, 0.0), held

    def newest(self, seq_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``gather_swa`` of requests of these lengths, int32 [B]."""
        n_win = self.plan.cfg.sliding_window
        position = seq_lens[:, None] - n_win + jnp.arange(n_win, dtype=jnp.int32)[None]
        rows, held = self.rows(position)
        return rows, jnp.where(held, position, -1)


def gather_swa(
    state: StateCache, index: jax.Array | int, slots: jax.Array, seq_lens: jax.Array, *, plan: CachePlan
) -> tuple[jax.Array, jax.Array]:
    """The window of each request as dense rows, oldest first.

    Args:
      index: layer's place in its stack.
      slots, seq_lens: int32 [B]; the request and its length. Slot -1 has an empty window.

    Returns:
      rows f32 [B, n_win, head_dim], zero where empty; positions int32 [B, n_win], -1 where empty. Row j holds position
      seq_len - n_win + j.
    """
    check_batch(slots=slots, seq_lens=seq_lens)
    window = SlidingWindow(state=state, index=index, slots=slots, start=seq_lens, fresh=None, plan=plan)
    return window.newest(seq_lens)
