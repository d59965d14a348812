"""The compiled programs that generate texts: seats for them, prompts, and the loop of sampling, drafts and stopping.

Texts wait in a queue, and the batch has a row per slot of the caches. ``seat`` gives a free row the next text if there
are blocks for it. ``store`` stores prompts, all but a text's last token. ``run`` feeds that one, and the drafts made of
it, and appends what is sampled, again and again, until there is something to seat: that is rare, and what seats touch
is then not touched in every pass. When blocks run out, the last texts of those at work wait again. A complete text
keeps its row, so that a longer one can go on from it, until something else needs the row or its blocks.

What a row samples depends on its text's number and place alone, not on the other rows.

Over a mesh, each shard of requests has a queue, rows and a loop of its own, and all of them make the same number of
passes. Slots, and places in the queue, are numbers within a shard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.cache.cache import KVCache, advance, prepare_forward
from dsv4jax.cache.shards import OF_ROWS, cache_specs, is_inside, over_mesh
from dsv4jax.cache.tables import blocks_for
from dsv4jax.layer.backend import Backend
from dsv4jax.model.caches import Caches
from dsv4jax.model.drafting import Drafts, Fed, Judged, drafter
from dsv4jax.model.forward_pass import forward, stage_forward
from dsv4jax.model.inside.captures import CHOICES_SPEC
from dsv4jax.model.inside.choices import Choices
from dsv4jax.model.inside.devices import EVERYWHERE, weight_specs
from dsv4jax.model.params import ModelParams
from dsv4jax.model.sampling import Chances, Sampling, accept
from dsv4jax.requests.speculate import commit

EVERYTHING = np.int32(1 << 30)  # tokens: more than a text has


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A queue of texts, the first of which comes first. A text without tokens is complete."""

    tokens: jax.Array  # int32 [texts, longest] each prompt, then what was generated; the rest is not read
    lengths: jax.Array  # int32 [texts] tokens so far
    limits: jax.Array  # int32 [texts] tokens at which a text is complete, at most longest; a stop token lowers it
    numbers: jax.Array  # int32 [texts] number of each among those of all shards, by which it draws

    @property
    def complete(self) -> jax.Array:
        """Which texts are complete, bool [texts]."""
        return self.lengths >= self.limits

    def tokens_from(self, text: jax.Array, first: jax.Array, count: int) -> jax.Array:
        """``count`` tokens of texts int32 [B] from place ``first`` int32 [B] on: int32 [B, count]."""
        places = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        return self.tokens[text[:, None], jnp.minimum(places, self.tokens.shape[1] - 1)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What one pass of the loop hands to the next. Over a mesh, what is [] here is [shards]."""

    caches: Caches
    texts: Texts
    drafts: Drafts | None  # None if no drafts are made
    judged: Judged | None  # by place of each text; None if no drafts are made
    choices: Choices | None  # of the stored tokens of each text [.., texts, longest, ..]; None if not recorded
    slots: jax.Array  # int32 [B] slot of each row, -1 = the row is free
    text: jax.Array  # int32 [B] text that the row works on, or worked on last
    passes: jax.Array  # int32 [] that sampled
    stored: jax.Array  # int32 [] tokens that passes before those have stored
    drafted: jax.Array  # int32 [] drafts that the model has judged
    accepted: jax.Array  # int32 [] drafts that became part of a text
    shared: jax.Array | None  # int32 [texts] blocks of a prefix that a text will share; None if none are kept
    ok: jax.Array  # bool [] False once no text can go on, because not even the first one has room

    @property
    def unfinished(self) -> jax.Array:
        """Whether there is more to do, bool []."""
        return self.ok & ~jnp.all(self.texts.complete)

    @property
    def at_work(self) -> jax.Array:
        """Which rows have a text that is not complete, bool [B]."""
        return (self.slots >= 0) & ~self.texts.complete[self.text]

    @property
    def waiting(self) -> jax.Array:
        """Which texts are not complete and have no row, bool [texts]."""
        nowhere = self.texts.lengths.size  # a place out of range is dropped
        return ~self.texts.complete.at[jnp.where(self.at_work, self.text, nowhere)].set(True, mode="drop")

    @property
    def pending(self) -> jax.Array:
        """Number of tokens of each text at work that are not stored, int32 [B]; 0 for other rows."""
        stored = self.caches.model.seq_lens.at[self.slots].get(mode="clip")
        return jnp.where(self.at_work, self.texts.lengths[self.text] - stored, 0)

    @property
    def needs_seats(self) -> jax.Array:
        """Whether ``seat`` has something to do, or prefixes must give way before the next pass, bool []."""
        lacking, free = asked_blocks(self)[1], self.caches.model.tables.num_free[0]
        return jnp.any(_leaving(self)) | jnp.any(_admissible(self)) | (jnp.sum(lacking) > free)

    @property
    def last_tokens(self) -> jax.Array:
        """The last token of each row's text, int32 [B, 1]."""
        return self.texts.tokens_from(self.text, self.texts.lengths[self.text] - 1, 1)


COUNTS = ("passes", "stored", "drafted", "accepted", "ok")  # fields of one number


def of_each_shard[R](
    step: Callable[..., R], loop: Loop, given: tuple[Any, ...] = (), specs: tuple[Any, ...] = (), made: Any = None
) -> R:
    """Run step(loop, *given) on each shard of the caches' mesh, or on one device as it is.

    Args:
      step: returns a loop, or arrays of rows or texts and single numbers, which become [shards].
      loop: of all shards.
      given: what else it takes.
      specs: of that, over the mesh.
      made: specs of what it returns; those of a loop if None.
    """
    mesh = loop.caches.model.mesh
    if mesh is None or is_inside(mesh):
        return step(loop, *given)

    def of_shard(loop: Loop, *given: Any) -> R:
        loop = dataclasses.replace(loop, **{name: getattr(loop, name)[0] for name in COUNTS})
        return jax.tree.map(jnp.atleast_1d, step(loop, *given))

    of_loop = _loop_specs(loop)
    return over_mesh(mesh, of_shard, (of_loop, *specs), of_loop if made is None else made)(loop, *given)


def _loop_specs(loop: Loop) -> Loop:
    """The specs of a loop's leaves, as a prefix of its tree."""
    fields: dict[str, Any] = {field.name: OF_ROWS for field in dataclasses.fields(loop)}
    fields["caches"] = Caches(
        model=cache_specs(loop.caches.model),
        drafts=None if loop.caches.drafts is None else cache_specs(loop.caches.drafts),
    )
    fields |= {name: None for name in ("drafts", "judged", "shared") if getattr(loop, name) is None}
    fields["choices"] = None if loop.choices is None else CHOICES_SPEC
    return Loop(**fields)


def begin(
    caches: Caches,
    texts: Texts,
    vocab_size: int,
    num_drafts: int,
    choices: Choices | None = None,
    rows: int | None = None,
) -> Loop:
    """Return the state of a loop that has not done anything.

    ``choices`` is room for those of the first texts. There are as many rows as slots if ``rows`` is None.
    """
    rows = caches.model.plan.max_requests if rows is None else rows
    shards = caches.model.tables.num_free.shape[0]
    numbers: dict[str, Any] = {name: jnp.int32(0) for name in COUNTS} | {"ok": jnp.asarray(True)}
    if caches.model.mesh is not None:
        numbers = {name: jnp.full(shards, number) for name, number in numbers.items()}
    drafts = Drafts.none(rows, num_drafts, vocab_size) if num_drafts else None
    return Loop(
        caches=caches,
        texts=texts,
        drafts=drafts,
        judged=Judged.none(*texts.tokens.shape) if num_drafts else None,
        choices=choices,
        slots=jnp.full(rows, -1, jnp.int32),
        text=jnp.zeros(rows, jnp.int32),
        shared=None,
        **numbers,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What stays the same in all passes."""

    params: ModelParams
    sampling: Sampling
    stop_tokens: jax.Array
    backend: Backend


@functools.partial(jax.jit, donate_argnames="loop")
def seat(loop: Loop) -> Loop:
    """Release rows for which there are no blocks, or which others need, and give free rows the texts that wait.

    The loop is donated.
    """
    return of_each_shard(lambda loop: _admit_waiting(_make_room(loop)), loop)


# The two halves of ``seat``.
vacate = jax.jit(lambda loop: _make_room(loop), donate_argnums=0)
fill = jax.jit(lambda loop: _admit_waiting(loop), donate_argnums=0)


@functools.partial(jax.jit, static_argnames=("chunk", "backend"), donate_argnames="loop")
def store(
    params: ModelParams,
    loop: Loop,
    rows: jax.Array,
    until: jax.Array | np.int32 = EVERYTHING,
    *,
    chunk: int,
    backend: Backend = None,
) -> Loop:
    """Store up to ``chunk`` tokens of the text of each of some rows, of which more than the last one is not stored.

    Args:
      params: the model's weights.
      loop: from ``begin``, or from an earlier call. It is donated.
      rows: int32 [any], distinct; -1 = none. Over a mesh, as many for each shard, one after another.
      until: int32 [], tokens of each text at which to stop.
      chunk: tokens of each.
      backend: as for ``forward``.
    """

    def step(loop: Loop, params: ModelParams, rows: jax.Array, until: jax.Array) -> Loop:
        return _store(params, loop, rows, until, chunk, backend)

    return of_each_shard(step, loop, (params, rows, until), (weight_specs(params), OF_ROWS, EVERYWHERE))


def _store(params: ModelParams, loop: Loop, rows: jax.Array, until: jax.Array, chunk: int, backend: Backend) -> Loop:
    slots, caches, text = loop.slots[rows], loop.caches, loop.text[rows]
    stored = caches.model.seq_lens.at[slots].get(mode="clip")
    num_new = jnp.where(rows >= 0, jnp.clip(jnp.minimum(loop.pending[rows] - 1, until - stored), 0, chunk), 0)
    cache, ok = prepare_forward(caches.model, slots, num_new)
    num_new = jnp.where(ok, num_new, 0)
    ids = loop.texts.tokens_from(text, stored, chunk)
    _, seen, cache, *captured = forward(params, ids, cache, slots, num_new, "none", backend=backend, **_looking(loop))
    choices = _recorded(loop, text, stored, num_new, captured)
    caches = dataclasses.replace(caches, model=advance(cache, slots, num_new))
    if caches.drafts is not None:
        following = loop.texts.tokens_from(text, stored + 1, chunk)
        fed = Fed(seen=seen, following=following, slots=slots, count=num_new)
        drafts = drafter(params).store(params, fed, caches.drafts, backend)
        caches = dataclasses.replace(caches, drafts=drafts)
    done = loop.stored + jnp.sum(num_new)
    return dataclasses.replace(loop, caches=caches, choices=choices, stored=done, ok=loop.ok & ok)


@functools.partial(jax.jit, static_argnames="backend", donate_argnames="loop")
def run(
    params: ModelParams,
    loop: Loop,
    sampling: Sampling,
    stop_tokens: jax.Array,
    passes: jax.Array,
    *,
    backend: Backend = None,
) -> Loop:
    """Continue the texts that have rows, until all are complete, so many passes are over, or texts need seats.

    Their prompts must be stored.

    Args:
      params: the model's weights.
      loop: from ``begin``, or from an earlier call. It is donated.
      sampling: how tokens are drawn.
      stop_tokens: int32 [any], each of which completes a text; -1 is none.
      passes: int32 []. Unless it is 0, one is made in any case, so that calls in turn with ``seat`` come to an end.
      backend: as for ``forward``.
    """

    def step(loop: Loop, params: ModelParams, sampling: Sampling, stop_tokens: jax.Array, passes: jax.Array) -> Loop:
        return _run(_Way(params=params, sampling=sampling, stop_tokens=stop_tokens, backend=backend), loop, passes)

    given = params, sampling, stop_tokens, passes
    return of_each_shard(step, loop, given, (weight_specs(params), *[EVERYWHERE] * 3))


def _run(way: _Way, loop: Loop, passes: jax.Array) -> Loop:
    began, devices = loop.passes, way.params.devices

    def goes_on(loop: Loop) -> jax.Array:
        unfinished, needs_seats = devices.any_of(loop.unfinished, loop.needs_seats)
        is_in_time = (loop.passes == began) | ~needs_seats
        return unfinished & (loop.passes - began < passes) & is_in_time

    def append(state: tuple[Loop, jax.Array]) -> tuple[Loop, jax.Array]:
        loop = _append_tokens(way, state[0])
        return loop, goes_on(loop)

    # Shards agree in the body, not in the condition, where nothing is sent.
    return lax.while_loop(lambda state: state[1], append, (loop, goes_on(loop)))[0]


def asked_blocks(loop: Loop) -> tuple[jax.Array, jax.Array]:
    """Return what texts ask of the blocks, for the tokens that they have and those that the next pass stores.

    Returns (blocks that each text needs, but for those it will share, int32 [texts]; blocks that each row at work still
    lacks, int32 [B]).
    """
    plan, texts = loop.caches.model.plan, loop.texts
    drafts = 0 if loop.drafts is None else loop.drafts.tokens.shape[1]
    # The last token of a text is never stored.
    needed = blocks_for(plan, jnp.maximum(jnp.minimum(texts.lengths + drafts, texts.limits - 1), 0))
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


def _append_tokens(way: _Way, loop: Loop) -> Loop:
    """Feed each row at work its text's last token and its drafts, and append what the model makes of it.

    Each of them has one token that is not stored, before and after this.
    """
    text = loop.text
    active = loop.ok & loop.at_work
    keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(way.sampling.key, n), p))(
        loop.texts.numbers[text], loop.texts.lengths[text]
    )
    judge_keys, guess_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)

    made, cache, ok = (_sample if loop.drafts is None else _judge)(way, loop, active, judge_keys)
    caches, drafts, judged = dataclasses.replace(loop.caches, model=cache), loop.drafts, loop.judged
    if drafts is not None:
        assert judged is not None
        assert caches.drafts is not None
        # The first one that is not accepted is the last one that the text tells of.
        settled = jnp.minimum(made.judged, made.count)
        judged = judged.noted(drafts, text, loop.texts.lengths[text], settled, made.accepted)
        drafts, cache = _guess(way, drafts, made, caches.drafts, loop.slots, guess_keys)
        caches = dataclasses.replace(caches, drafts=cache)
    return dataclasses.replace(
        loop,
        caches=caches,
        texts=_extended(loop.texts, text, made),
        drafts=drafts,
        judged=judged,
        choices=_recorded(loop, text, loop.texts.lengths[text] - 1, made.count, made.captured),
        passes=loop.passes + 1,
        drafted=loop.drafted + jnp.sum(made.judged),
        accepted=loop.accepted + jnp.sum(made.accepted),
        ok=loop.ok & ok,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What a pass made of each row's text."""

    tokens: jax.Array  # int32 [B, m + 1] drafts that were accepted, and the token after them
    count: jax.Array  # int32 [B] how many of them are new tokens; 0 for rows that were not fed
    stopped: jax.Array  # bool [B] whether the last one of them is a stop token
    judged: jax.Array  # int32 [B] drafts that the model has judged
    accepted: jax.Array  # int32 [B] how many of them are new tokens, the first ones
    seen: jax.Array  # [B, m + 1, ...] what drafts are made of, of the tokens that were fed
    captured: list[dict[str, Any]]  # of the same tokens, if anything was


Outcome = tuple[_Made, KVCache, jax.Array]  # the last two are the model's cache, and whether it had room


def _sample(way: _Way, loop: Loop, active: jax.Array, keys: jax.Array) -> Outcome:
    """Feed each row's last token, and draw the next one."""
    cache, ok = prepare_forward(loop.caches.model, loop.slots, active.astype(jnp.int32))
    num_new = jnp.where(ok & active, 1, 0)
    looking, given = _looking(loop), loop.last_tokens
    logits, seen, cache, *captured = forward(
        way.params, given, cache, loop.slots, num_new, backend=way.backend, **looking
    )
    assert logits is not None
    tokens = way.sampling.draw(logits, keys)[:, None]
    count, stopped = _until_stop(tokens, num_new, way.stop_tokens)
    none = jnp.zeros_like(num_new)
    made = _Made(tokens=tokens, count=count, stopped=stopped, judged=none, accepted=none, seen=seen, captured=captured)
    return made, advance(cache, loop.slots, num_new), ok


def _judge(way: _Way, loop: Loop, active: jax.Array, keys: jax.Array) -> Outcome:
    """Feed each row's last token and its drafts, accept some, and draw the token after them."""
    drafts, slots, texts = loop.drafts, loop.slots, loop.texts
    assert drafts is not None
    room = texts.limits[loop.text] - texts.lengths[loop.text] - 1  # beside the token after the drafts
    judged = jnp.where(active, jnp.clip(room, 0, drafts.judged(way.sampling.least_confidence)), 0)
    cache, ok = prepare_forward(loop.caches.model, slots, jnp.where(active, 1 + judged, 0))
    fed = ok & active
    judged = jnp.where(fed, judged, 0)
    given = jnp.concatenate([loop.last_tokens, drafts.tokens], axis=1)
    num_new = jnp.where(fed, 1 + judged, 0)
    logits, seen, cache, staged, *captured = stage_forward(
        way.params, given, cache, slots, num_new, backend=way.backend, **_looking(loop)
    )
    accepted, following = accept(way.sampling.chances(logits), drafts.chances, drafts.tokens, judged, keys)
    tokens = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    tokens = tokens.at[jnp.arange(len(slots)), accepted].set(following)
    count, stopped = _until_stop(tokens, jnp.where(fed, accepted + 1, 0), way.stop_tokens)
    # None past a stop token: the text may go on from it.
    cache, committed = commit(cache, staged, count, backend=way.backend)
    count = jnp.where(committed, count, 0)
    accepted = jnp.minimum(accepted, count)
    made = _Made(
        tokens=tokens, count=count, stopped=stopped, judged=judged, accepted=accepted, seen=seen, captured=captured
    )
    return made, cache, ok & committed


def _looking(loop: Loop) -> dict[str, Any]:
    """What the passes of a loop capture."""
    return {} if loop.choices is None else {"capture": ("choices",)}


def _recorded(
    loop: Loop, text: jax.Array, first: jax.Array, count: jax.Array, captured: list[dict[str, Any]]
) -> Choices | None:
    """Note the choices for ``count`` tokens of texts from place ``first`` on, all int32 [B]."""
    if loop.choices is None:
        return None
    new: Choices = captured[0]["choices"]
    number = jnp.arange(jax.tree.leaves(new)[0].shape[2], dtype=jnp.int32)[None]
    nowhere = loop.texts.lengths.size  # a place out of range is dropped
    at = jnp.where(number < count[:, None], text[:, None], nowhere), first[:, None] + number
    return jax.tree.map(lambda old, new: old.at[:, *at].set(new, mode="drop"), loop.choices, new)


def _until_stop(tokens: jax.Array, count: jax.Array, stop_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut the first ``count`` int32 [B] of tokens int32 [B, n] after the first stop token.

    Returns (how many are left int32 [B], whether a stop token is the last of them bool [B]).
    """
    number = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_stop = jnp.any(tokens[..., None] == stop_tokens[None, None], -1) & (number < count[:, None])
    stopped = jnp.any(is_stop, 1)
    return jnp.where(stopped, jnp.argmax(is_stop, 1).astype(jnp.int32) + 1, count), stopped


def _extended(texts: Texts, text: jax.Array, made: _Made) -> Texts:
    """Append new tokens to texts int32 [B]."""
    number = jnp.arange(made.tokens.shape[1], dtype=jnp.int32)[None]
    nowhere = texts.lengths.size  # a place out of range is dropped
    row = jnp.where(number < made.count[:, None], text[:, None], nowhere)
    before = texts.lengths[text]
    length = before + made.count
    grown = jnp.where(made.count > 0, text, nowhere)
    return Texts(
        numbers=texts.numbers,
        tokens=texts.tokens.at[row, before[:, None] + number].set(made.tokens, mode="drop"),
        lengths=texts.lengths.at[grown].set(length, mode="drop"),
        limits=texts.limits.at[jnp.where(made.stopped, grown, nowhere)].set(length, mode="drop"),
    )


def _guess(
    way: _Way, drafts: Drafts, made: _Made, cache: KVCache, slots: jax.Array, keys: jax.Array
) -> tuple[Drafts, KVCache]:
    """Store what drafts need of the new tokens, and guess at what follows each text."""

    def draw_one(logits: jax.Array, i: jax.Array | int) -> tuple[jax.Array, Chances]:
        chances = way.sampling.chances(logits)
        return chances.draw(jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, i)), chances

    fed = Fed(seen=made.seen, following=made.tokens, slots=slots, count=made.count)
    return drafter(way.params).guess(way.params, fed, cache, drafts.tokens.shape[1], draw_one, way.backend)
