"""StateCache: what a layer keeps per request whatever its length. Sliding window and compressor tails.

Position p of a request sits in window row p mod n_win and in tail row p mod ratio. Nothing is cleared on the way: a row
is overwritten by the next token that maps to it, and a tail row is never read between the end of its block and that
write. The write heads of the window and the fill of a tail are the request's length modulo their sizes, so they are not
stored.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv4jax.checks import check_batch, donating
from dsv4jax.config import AttentionType
from dsv4jax.formats import KVRows
from dsv4jax.plan import CachePlan

EMPTY_GATE = -1e9  # a gate logit that vanishes in the softmax; finite, so that an all-empty softmax is no NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CSATail:
    """Streams a CSA compressor keeps between steps. A token has TWO learned streams of key rows k and gate logits z:

    its a-stream enters the entry of its own block, its b-stream the NEXT block's entry, as the overlap half.
    """

    ka: jax.Array  # [layers, requests, m, dim] a-stream of the current block
    za: jax.Array  # [layers, requests, m, dim]
    kb_next: jax.Array  # [layers, requests, m, dim] b-stream of the current block
    zb_next: jax.Array  # [layers, requests, m, dim]
    kb: jax.Array  # [layers, requests, m, dim] b-stream of the previous block
    zb: jax.Array  # [layers, requests, m, dim]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HCATail:
    """The one stream of an HCA compressor: the rows of the current block."""

    ka: jax.Array  # [layers, requests, m', head_dim]
    za: jax.Array  # [layers, requests, m', head_dim]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HCAOnlineTail:
    """The current HCA block as a running softmax per channel: entry = weighted / total once the block is full."""

    peak: jax.Array  # [layers, requests, head_dim] largest gate logit so far
    total: jax.Array  # [layers, requests, head_dim] sum of exp(z - peak)
    weighted: jax.Array  # [layers, requests, head_dim] sum of exp(z - peak) * k


Tail = CSATail | HCATail | HCAOnlineTail


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
    cfg, dtype = plan.cfg, plan.tail_dtype
    row = plan.rows.row(cfg.head_dim - cfg.rope_dim, cfg.rope_dim)
    window = jax.tree.map(lambda leaf: jnp.zeros((*lead, cfg.sliding_window, *leaf.shape), leaf.dtype), row)
    pos = jnp.full((*lead, cfg.sliding_window), -1, jnp.int32)

    def keys(*shape: int) -> jax.Array:  # a fresh array each: leaves that share one buffer cannot be donated
        return jnp.zeros((*lead, *shape), dtype)

    def gates(*shape: int) -> jax.Array:
        return jnp.full((*lead, *shape), EMPTY_GATE, dtype)

    def csa_tail(dim: int) -> CSATail:
        shape = cfg.csa_compression_ratio, dim
        return CSATail(
            ka=keys(*shape),
            za=gates(*shape),
            kb_next=keys(*shape),
            zb_next=gates(*shape),
            kb=keys(*shape),
            zb=gates(*shape),
        )

    tail: Tail | None = None
    indexer_tail = None
    if kind == AttentionType.CSA:
        tail, indexer_tail = csa_tail(cfg.head_dim), csa_tail(cfg.indexer_head_dim)
    elif kind == AttentionType.HCA and plan.hca_tail == "ring":
        shape = cfg.hca_compression_ratio, cfg.head_dim
        tail = HCATail(ka=keys(*shape), za=gates(*shape))
    elif kind == AttentionType.HCA:
        shape = (*lead, cfg.head_dim)
        tail = HCAOnlineTail(
            peak=jnp.full(shape, EMPTY_GATE, jnp.float32),
            total=jnp.zeros(shape, jnp.float32),
            weighted=jnp.zeros(shape, jnp.float32),
        )
    return StateCache(window=window, pos=pos, tail=tail, indexer_tail=indexer_tail)


def init_state(plan: CachePlan, kind: AttentionType) -> StateCache:
    """Empty state of every layer of a kind and every slot."""
    return empty_state(plan, kind, (len(plan.layers(kind)), plan.max_requests))


def unique_or_dropped(slots: jax.Array, valid: jax.Array, size: int) -> jax.Array:
    """Scatter indices: ``slots`` where valid, else distinct ones past ``size`` (dropped, and still unique)."""
    return jnp.where(valid, slots, size + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape))


def read_slots(tree: Any, index: jax.Array | int, slots: jax.Array) -> Any:
    """Leaves [layers, requests, ...] -> [B, ...] of one layer; a slot out of range reads some row in range."""
    return jax.tree.map(lambda leaf: leaf.at[index, slots].get(mode="clip"), tree)


def copy_rows(tree: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """Leaves [layers, size, ...]: row sources[b] to row targets[b] in all layers; target -1 is a no-op.

    A row is a slot's state or a block's entries. All rows are read before any is written.
    """

    def copy(leaf: jax.Array) -> jax.Array:
        target = unique_or_dropped(targets, targets >= 0, leaf.shape[1])
        rows = leaf.at[:, sources].get(mode="clip")
        return leaf.at[:, target].set(rows, mode="drop", unique_indices=True)

    return jax.tree.map(copy, tree)


@donating("state")
def reset_slots(state: StateCache, slots: jax.Array, *, plan: CachePlan, kind: AttentionType) -> StateCache:
    """Make slots [B] empty in all layers of a kind at once, as ``init_state`` made them; -1 is a no-op."""
    check_batch(slots=slots)
    requests = state.pos.shape[1]
    target = unique_or_dropped(slots, slots >= 0, requests)
    empty = empty_state(plan, kind, (state.pos.shape[0], slots.shape[0]))
    return jax.tree.map(
        lambda leaf, value: leaf.at[:, target].set(value, mode="drop", unique_indices=True), state, empty
    )


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
        return jnp.where(held[..., None], self.plan.rows.decode(rows), 0.0), held


@functools.partial(jax.jit, static_argnames="plan")
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
    n_win = plan.cfg.sliding_window
    position = seq_lens[:, None] - n_win + jnp.arange(n_win, dtype=jnp.int32)[None]
    window = SlidingWindow(state=state, index=index, slots=slots, start=seq_lens, fresh=None, plan=plan)
    rows, held = window.rows(position)
    return rows, jnp.where(held, position, -1)
