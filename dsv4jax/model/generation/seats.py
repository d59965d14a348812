"""Seats: which of the texts that wait get a row and blocks, and which rows give theirs up.

A text gets a row when there are blocks for the tokens that it has. When blocks run out, the last texts of those at work
wait again. A complete text keeps its row, so that a longer one can go on from it, until something else needs the row or
its blocks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv4jax.cache.tables import blocks_for
from dsv4jax.model.generation.state import Loop, of_each_shard


def needs_seats(loop: Loop) -> jax.Array:
    """Whether ``seat`` has something to do, or prefixes must give way before the next pass, bool []."""
    lacking, free = asked_blocks(loop)[1], loop.caches.model.tables.num_free[0]
    return jnp.any(_leaving(loop)) | jnp.any(_admissible(loop)) | (jnp.sum(lacking) > free)


def asked_blocks(loop: Loop) -> tuple[jax.Array, jax.Array]:
    """Return what texts ask of the blocks, for the tokens that they have and those that the next passes store.

    Returns (blocks that each text needs, but for those it will share, int32 [texts]; blocks that each row at work still
    lacks, int32 [B]).
    """
    plan, texts = loop.caches.model.plan, loop.texts
    # Without drafts, the pass that stores a prompt's end draws a token, which the next pass stores.
    more = 1 if loop.drafts is None else loop.drafts.tokens.shape[1]
    # The last token of a text is never stored.
    needed = blocks_for(plan, jnp.maximum(jnp.minimum(texts.lengths + more, texts.limits - 1), 0))
    lacking = jnp.where(loop.at_work, jnp.maximum(needed[loop.text] - _held(loop), 0), 0)
    return needed if loop.shared is None else jnp.maximum(needed - loop.shared, 0), lacking


def _held(loop: Loop) -> jax.Array:
    """Number of blocks that each row holds, int32 [B]."""
    held = loop.caches.model.tables.block_lens.at[loop.slots].get(mode="clip")
    return jnp.where(loop.slots >= 0, held, 0)


def _own(loop: Loop) -> jax.Array:
    """Number of blocks that come free if a row leaves, int32 [B]; if others leave as well, at least that many."""
    if loop.shared is None:
        return _held(loop)
    tables = loop.caches.model.tables
    blocks = tables.block_table.at[loop.slots].get(mode="clip")
    alone = (blocks >= 0) & (tables.block_refs.at[blocks].get(mode="clip") == 1)
    return jnp.where(loop.slots >= 0, jnp.sum(alone, axis=1, dtype=jnp.int32), 0)


def _admissible(loop: Loop) -> jax.Array:
    """Return which of the waiting texts can have a row and blocks at once, bool [texts]: the first ones."""
    needed, lacking = asked_blocks(loop)
    waiting, free = loop.waiting, loop.caches.model.tables.num_free[0]
    turn = jnp.cumsum(waiting, dtype=jnp.int32)
    asked = jnp.sum(lacking) + jnp.cumsum(jnp.where(waiting, needed, 0), dtype=jnp.int32)
    return waiting & (turn <= jnp.sum(loop.slots < 0)) & (asked <= free)


def _leaving(loop: Loop) -> jax.Array:
    """Return which rows have no blocks for their next pass, or are complete where others wait, bool [B].

    A text at work stays if there are blocks for it and all before it, when those behind it give theirs up. The
    first one always stays: alone it has enough. The others wait for their turn again, with the tokens that they have.
    """
    _, lacking = asked_blocks(loop)
    held, at_work, free = _own(loop), loop.at_work, loop.caches.model.tables.num_free[0]
    is_crowded = (jnp.sum(lacking) > free) | jnp.any(loop.waiting & ~_admissible(loop))
    leaves = (loop.slots >= 0) & ~at_work & is_crowded
    free += jnp.sum(jnp.where(leaves, held, 0))
    not_after = (loop.text[None] <= loop.text[:, None]) & at_work[None]  # [row, other]
    asked = jnp.sum(jnp.where(not_after, lacking[None], 0), axis=1)
    behind = jnp.sum(jnp.where(~not_after & at_work[None], held[None], 0), axis=1)
    is_first = loop.text == jnp.min(jnp.where(at_work, loop.text, loop.texts.lengths.size))
    return leaves | (at_work & ~is_first & (asked > free + behind))


def _make_room(loop: Loop) -> Loop:
    """Release the rows that are to leave."""
    leaves = _leaving(loop)
    caches = loop.caches.release(jnp.where(leaves, loop.slots, -1))
    return dataclasses.replace(loop, caches=caches, slots=jnp.where(leaves, -1, loop.slots))


def _admit_waiting(loop: Loop) -> Loop:
    """Give free rows the next texts of the queue, as far as there are blocks for them."""
    free = loop.slots < 0
    turn = jnp.cumsum(free, dtype=jnp.int32) - 1
    admissible = _admissible(loop)
    arriving = free & (turn < jnp.sum(admissible))
    texts = jnp.nonzero(admissible, size=free.size, fill_value=0)[0].astype(jnp.int32)
    caches, slots, ok = loop.caches.admit(free.size, arriving)
    drafts = loop.drafts
    if drafts is not None:
        drafts = dataclasses.replace(drafts, made=drafts.made & ~arriving)
    loop = dataclasses.replace(
        loop,
        caches=caches,
        drafts=drafts,
        slots=jnp.where(arriving, slots, loop.slots),
        text=jnp.where(arriving, texts.at[turn].get(mode="clip"), loop.text),
    )
    return dataclasses.replace(loop, ok=loop.ok & ok & (jnp.any(loop.at_work) | jnp.all(loop.texts.complete)))


@functools.partial(jax.jit, donate_argnames="loop")
def seat(loop: Loop) -> Loop:
    """Release rows for which there are no blocks, or which others need, and give free rows the texts that wait.

    The loop is donated.
    """
    return of_each_shard(lambda loop: _admit_waiting(_make_room(loop)), loop)


@functools.partial(jax.jit, donate_argnames="loop")
def vacate(loop: Loop) -> Loop:
    """Do the first half of ``seat``."""
    return of_each_shard(_make_room, loop)


@functools.partial(jax.jit, donate_argnames="loop")
def fill(loop: Loop) -> Loop:
    """Do the second half of ``seat``."""
    return of_each_shard(_admit_waiting, loop)
