"""StateCache: what a layer keeps per request independently of its length, namely sliding window and compressor tails.

Position p of a request is kept in window row p mod n_win. Rows are not cleared: the next token that maps to a row
overwrites it. Where the next token goes in the window, and how many tokens are in a tail, follow from the request's
length modulo their sizes, so they are not stored. The tails are described in ``tails``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.checks import check_batch
from dsv4jax.derivatives import through_new_rows
from dsv4jax.formats import KVRows
from dsv4jax.indexing import put_in_all_layers, read_slots, remainder, take_tokens, unique_or_dropped
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan
from dsv4jax.tails import CSATail, Tail, empty_tail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """The state of all layers of one kind."""

    window: KVRows  # [layers, requests, n_win, ...] a ring of the newest n_win rows
    pos: jax.Array  # int32 [layers, requests, n_win] absolute position of each window row, -1 = empty
    tail: Tail | None  # None for SWA
    indexer_tail: CSATail | None  # CSA only


def empty_state(plan: CachePlan, kind: AttentionType, lead: tuple[int, ...]) -> StateCache:
    """Return the state of requests that have seen no token, with leading axes ``lead`` (layers, requests)."""
    n_win = plan.cfg.sliding_window
    tail, indexer_tail = plan.tail_specs(kind)
    return StateCache(
        window=jax.tree.map(lambda leaf: jnp.zeros((*lead, n_win, *leaf.shape), leaf.dtype), plan.row_spec),
        pos=jnp.full((*lead, n_win), -1, jnp.int32),
        tail=empty_tail(tail, lead),
        indexer_tail=empty_tail(indexer_tail, lead),
    )


def init_state(plan: CachePlan, kind: AttentionType) -> StateCache:
    """Return the empty state of all layers of a kind and all slots."""
    return empty_state(plan, kind, (len(plan.layers(kind)), plan.max_requests))


def reset_slots(state: StateCache, slots: jax.Array, *, plan: CachePlan, kind: AttentionType) -> StateCache:
    """Reset slots to empty in all layers of a kind.

    Args:
      state: the state of all layers of the kind.
      slots: int32 [B], -1 = no-op.
      plan: the cache's plan.
      kind: the kind of the layers.

    Returns:
      The updated state.

    Raises:
      AssertionError: (chex) the slots' shape or dtype is wrong.
    """
    check_batch(slots=slots)
    requests = state.pos.shape[1]
    target = unique_or_dropped(slots, slots >= 0, requests)
    empty = empty_state(plan, kind, (state.pos.shape[0], slots.shape[0]))
    return put_in_all_layers(state, target, empty)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """One layer's windows as seen by the requests of a batch, with rows looked up by position.

    The late tokens of a chunk overwrite ring rows that its early queries still see. A chunk's rows can therefore be
    passed separately, as ``fresh``, and be stored after they are read.
    """

    state: StateCache
    index: jax.Array | int  # the layer's index in its stack
    slots: jax.Array  # int32 [B]
    start: jax.Array  # int32 [B] position of the first fresh row; lower positions are read from the ring
    fresh: KVRows | None  # [B, F, ...] rows not stored yet; None if the ring holds all rows
    plan: CachePlan = dataclasses.field(metadata={"static": True})
    exact: jax.Array | None = None  # f32 [B, F, head_dim] rows from start on before rounding, for derivatives

    def rows(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Read the rows at positions int32 [B, K]: f32 [B, K, head_dim], and bool [B, K], which of them exist.

        Rows that do not exist are zero.
        """
        slots = self.slots[:, None]
        row = remainder(position, self.plan.cfg.sliding_window)  # a negative position is masked below
        rows, pos = read_slots((self.state.window, self.state.pos), self.index, slots, row)
        held = pos == position
        if self.fresh is not None:
            number = position - self.start[:, None]
            count, is_fresh = self.fresh.nope.shape[1], number >= 0
            held = jnp.where(is_fresh, number < count, held)
            token = jnp.clip(number, 0, count - 1)

            def newest(old: jax.Array, fresh: jax.Array) -> jax.Array:
                new = take_tokens(fresh, token)
                return jnp.where(is_fresh.reshape(*number.shape, *(1,) * (new.ndim - 2)), new, old)

            rows = jax.tree.map(newest, rows, self.fresh)
        held &= (position >= 0) & (slots >= 0)
        values = self.plan.rows.decode(rows)
        if self.exact is not None:
            number = position - self.start[:, None]
            values = through_new_rows(values, self.exact, number, self.exact.shape[1])
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
    """Return the window of each request as dense rows, oldest first.

    Args:
      state: the state of all layers of a kind.
      index: the layer's index in its stack, an int or int32 [].
      slots, seq_lens: int32 [B], each request and its length. The window of slot -1 is empty.
      plan: the cache's plan.

    Returns:
      Rows f32 [B, n_win, head_dim], zero where empty; positions int32 [B, n_win], -1 where empty. Row j holds position
      seq_len - n_win + j.

    Raises:
      AssertionError: (chex) an argument's shape or dtype is wrong.
    """
    check_batch(slots=slots, seq_lens=seq_lens)
    window = SlidingWindow(state=state, index=index, slots=slots, start=seq_lens, fresh=None, plan=plan)
    return window.newest(seq_lens)
