"""The compiled loop that generates texts: prompts, sampling, drafts, stopping, and admission of the next prompts.

Texts wait in a queue, and the batch has a row per slot of the caches. A free row admits the next text. Passes that
store prompts feed up to ``chunk`` tokens of each row, all but a text's last token. The other passes feed that one, and
the drafts made of it, and append what is sampled. A text that is complete releases its slot. The host is not asked on
the way.

What a row samples depends on its text's number and place alone, not on the other rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.cache import KVCache, advance, prepare_forward
from dsv4jax.layer.backend import Backend
from dsv4jax.model.caches import Caches
from dsv4jax.model.drafts import draft_forward
from dsv4jax.model.forward_pass import forward, stage_forward
from dsv4jax.model.params import ModelParams
from dsv4jax.model.sampling import Sampling, accept, draw
from dsv4jax.requests.speculate import commit

CHUNK = 128  # tokens of a prompt that a row stores per pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A queue of texts. Those of length 0 come after all others."""

    tokens: jax.Array  # int32 [texts, longest] each prompt, then what was generated; the rest is not read
    lengths: jax.Array  # int32 [texts] tokens so far
    limits: jax.Array  # int32 [texts] tokens at which a text is complete, at most longest

    @property
    def count(self) -> jax.Array:
        """Number of texts, int32 []."""
        return jnp.sum(self.lengths > 0, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Guesses at what follows the last token of each row's text."""

    tokens: jax.Array  # int32 [B, m]
    probabilities: jax.Array  # f32 [B, m, V] of the distributions that they were drawn from
    made: jax.Array  # bool [B] False for a row that has none yet


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What one pass of the loop hands to the next."""

    caches: Caches
    texts: Texts
    drafts: Drafts | None  # None if no drafts are made
    slots: jax.Array  # int32 [B] slot of each row, -1 = the row is free
    text: jax.Array  # int32 [B] text that the row works on
    waiting: jax.Array  # int32 [] first text in the queue that no row has taken
    passes: jax.Array  # int32 [] that sampled
    drafted: jax.Array  # int32 [] drafts that the model has judged
    accepted: jax.Array  # int32 [] drafts that it accepted
    ok: jax.Array  # bool [] False once blocks ran out for a row at work

    @property
    def unfinished(self) -> jax.Array:
        """Whether there is more to do, bool []."""
        return self.ok & (jnp.any(self.slots >= 0) | (self.waiting < self.texts.count))

    @property
    def pending(self) -> jax.Array:
        """Number of tokens of each row's text that are not stored, int32 [B]; 0 for a free row."""
        stored = self.caches.model.seq_lens.at[self.slots].get(mode="clip")
        return jnp.where(self.slots >= 0, self.texts.lengths[self.text] - stored, 0)

    @property
    def last_tokens(self) -> jax.Array:
        """The last token of each row's text, int32 [B, 1]."""
        return self.tokens_from(self.texts.lengths[self.text] - 1, 1)

    def tokens_from(self, first: jax.Array, count: int) -> jax.Array:
        """``count`` tokens of each row's text from place ``first`` int32 [B] on: int32 [B, count]."""
        places = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        return self.texts.tokens[self.text[:, None], jnp.minimum(places, self.texts.tokens.shape[1] - 1)]


def begin(caches: Caches, texts: Texts, vocab_size: int, num_drafts: int) -> Loop:
    """Return the state of a loop that has not done anything."""
    rows = caches.model.plan.max_requests
    drafts = None
    if num_drafts:
        drafts = Drafts(
            tokens=jnp.zeros((rows, num_drafts), jnp.int32),
            probabilities=jnp.zeros((rows, num_drafts, vocab_size), jnp.float32),
            made=jnp.zeros(rows, jnp.bool),
        )
    return Loop(
        caches=caches,
        texts=texts,
        drafts=drafts,
        slots=jnp.full(rows, -1, jnp.int32),
        text=jnp.zeros(rows, jnp.int32),
        waiting=jnp.int32(0),
        passes=jnp.int32(0),
        drafted=jnp.int32(0),
        accepted=jnp.int32(0),
        ok=jnp.asarray(True),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What stays the same in all passes."""

    params: ModelParams
    sampling: Sampling
    stop_tokens: jax.Array
    backend: Backend


@functools.partial(jax.jit, static_argnames=("chunk", "backend"), donate_argnames="loop")
def run(
    params: ModelParams,
    loop: Loop,
    sampling: Sampling,
    stop_tokens: jax.Array,
    passes: jax.Array,
    *,
    chunk: int = CHUNK,
    backend: Backend = None,
) -> Loop:
    """Work on the texts until all are complete, or so many passes have sampled.

    Args:
      params: the model's weights.
      loop: from ``begin``, or from an earlier call. It is donated.
      sampling: how tokens are drawn.
      stop_tokens: int32 [any], each of which completes a text; -1 is none.
      passes: int32 [].
      chunk: tokens of a prompt that a row stores per pass.
      backend: as for ``forward``.
    """
    way = _Way(params=params, sampling=sampling, stop_tokens=stop_tokens, backend=backend)
    until = loop.passes + passes

    def one_pass(loop: Loop) -> Loop:
        loop = lax.while_loop(
            lambda loop: loop.ok & jnp.any(loop.pending > 1),
            lambda loop: _store_prompts(way, loop, chunk),
            _admit_waiting(loop),
        )
        return _append_tokens(way, loop)

    return lax.while_loop(lambda loop: loop.unfinished & (loop.passes < until), one_pass, loop)


def _admit_waiting(loop: Loop) -> Loop:
    """Give free rows the next texts of the queue."""
    free = loop.slots < 0
    turn = loop.waiting + jnp.cumsum(free, dtype=jnp.int32) - 1
    arriving = free & (turn < loop.texts.count)
    caches, slots, ok = loop.caches.admit(free.size, arriving)
    drafts = loop.drafts
    if drafts is not None:
        drafts = dataclasses.replace(drafts, made=drafts.made & ~arriving)
    return dataclasses.replace(
        loop,
        caches=caches,
        drafts=drafts,
        slots=jnp.where(arriving, slots, loop.slots),
        text=jnp.where(arriving, turn, loop.text),
        waiting=loop.waiting + jnp.sum(arriving, dtype=jnp.int32),
        ok=loop.ok & ok,
    )


def _store_prompts(way: _Way, loop: Loop, chunk: int) -> Loop:
    """Store tokens of texts of which more than the last one is not stored."""
    slots, caches = loop.slots, loop.caches
    stored = caches.model.seq_lens.at[slots].get(mode="clip")
    num_new = jnp.clip(loop.pending - 1, 0, chunk)
    cache, ok = prepare_forward(caches.model, slots, num_new)
    num_new = jnp.where(ok, num_new, 0)
    ids = loop.tokens_from(stored, chunk)
    _, streams, cache = forward(way.params, ids, cache, slots, num_new, logits="none", backend=way.backend)
    caches = dataclasses.replace(caches, model=advance(cache, slots, num_new))
    if caches.drafts is not None:
        following = loop.tokens_from(stored + 1, chunk)
        _, _, drafts = _feed_drafts(way, streams, following, caches.drafts, slots, num_new)
        caches = dataclasses.replace(caches, drafts=drafts)
    return dataclasses.replace(loop, caches=caches, ok=loop.ok & ok)


def _append_tokens(way: _Way, loop: Loop) -> Loop:
    """Feed each row its text's last token and its drafts, append what the model makes of it, and release what is done.

    Every row at work has one token that is not stored, unless blocks have run out.
    """
    text, slots = loop.text, loop.slots
    length, limit = loop.texts.lengths[text], loop.texts.limits[text]
    came_full = (slots >= 0) & (length >= limit)  # complete without a token
    active = loop.ok & (slots >= 0) & ~came_full
    keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(way.sampling.key, n), p))(text, length)
    judge_keys, guess_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)

    made, cache, ok = (_sample if loop.drafts is None else _judge)(way, loop, active, judge_keys)
    caches, ok = dataclasses.replace(loop.caches, model=cache), loop.ok & ok
    texts, kept, stopped = _extended(loop.texts, text, made, way.stop_tokens)
    done = came_full | stopped | ((kept > 0) & (length + kept >= limit))
    drafts = loop.drafts
    if drafts is not None:
        assert caches.drafts is not None
        count = jnp.where(done, 0, kept)
        drafts, cache = _guess(way, drafts, made, caches.drafts, slots, count, guess_keys)
        caches = dataclasses.replace(caches, drafts=cache)
    return dataclasses.replace(
        loop,
        caches=caches.release(jnp.where(done, slots, -1)),
        texts=texts,
        drafts=drafts,
        slots=jnp.where(done, -1, slots),
        passes=loop.passes + 1,
        drafted=loop.drafted + jnp.sum(made.judged),
        accepted=loop.accepted + jnp.sum(jnp.maximum(made.count - 1, 0)),
        ok=ok,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What a pass made of each row's text."""

    tokens: jax.Array  # int32 [B, m + 1] drafts that were accepted, and the token after them
    count: jax.Array  # int32 [B] how many of them are new tokens; 0 for rows that were not fed
    judged: jax.Array  # int32 [B] drafts that the model has judged
    streams: jax.Array  # [B, m + 1, num_streams, hidden] of the tokens that were fed


Outcome = tuple[_Made, KVCache, jax.Array]  # the last two are the model's cache, and whether it had room


def _sample(way: _Way, loop: Loop, active: jax.Array, keys: jax.Array) -> Outcome:
    """Feed each row's last token, and draw the next one."""
    cache, ok = prepare_forward(loop.caches.model, loop.slots, active.astype(jnp.int32))
    num_new = jnp.where(ok & active, 1, 0)
    logits, streams, cache = forward(way.params, loop.last_tokens, cache, loop.slots, num_new, backend=way.backend)
    assert logits is not None
    tokens = draw(way.sampling.probabilities(logits), keys)[:, None]
    made = _Made(tokens=tokens, count=num_new, judged=jnp.zeros_like(num_new), streams=streams)
    return made, advance(cache, loop.slots, num_new), ok


def _judge(way: _Way, loop: Loop, active: jax.Array, keys: jax.Array) -> Outcome:
    """Feed each row's last token and its drafts, accept some, and draw the token after them."""
    drafts, slots, texts = loop.drafts, loop.slots, loop.texts
    assert drafts is not None
    room = texts.limits[loop.text] - texts.lengths[loop.text] - 1  # beside the token after the drafts
    judged = jnp.where(active & drafts.made, jnp.clip(room, 0, drafts.tokens.shape[1]), 0)
    cache, ok = prepare_forward(loop.caches.model, slots, jnp.where(active, 1 + judged, 0))
    fed = ok & active
    judged = jnp.where(fed, judged, 0)
    given = jnp.concatenate([loop.last_tokens, drafts.tokens], axis=1)
    num_new = jnp.where(fed, 1 + judged, 0)
    logits, streams, cache, staged = stage_forward(way.params, given, cache, slots, num_new, way.backend)
    wanted = way.sampling.probabilities(logits)
    accepted, following = accept(wanted, drafts.probabilities, drafts.tokens, judged, keys)
    count = jnp.where(fed, accepted + 1, 0)
    cache, committed = commit(cache, staged, count, way.backend)
    tokens = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    tokens = tokens.at[jnp.arange(len(slots)), accepted].set(following)
    made = _Made(tokens=tokens, count=jnp.where(committed, count, 0), judged=judged, streams=streams)
    return made, cache, ok & committed


def _extended(texts: Texts, text: jax.Array, made: _Made, stop_tokens: jax.Array) -> tuple[Texts, jax.Array, jax.Array]:
    """Append new tokens to texts int32 [B], up to the first stop token.

    Returns (texts, number of tokens that were appended int32 [B], whether a stop token was bool [B]).
    """
    number = jnp.arange(made.tokens.shape[1], dtype=jnp.int32)[None]
    is_stop = jnp.any(made.tokens[..., None] == stop_tokens[None, None], -1) & (number < made.count[:, None])
    stopped = jnp.any(is_stop, 1)
    kept = jnp.where(stopped, jnp.argmax(is_stop, 1).astype(jnp.int32) + 1, made.count)
    nowhere = texts.lengths.size  # a place out of range is dropped
    row = jnp.where(number < kept[:, None], text[:, None], nowhere)
    length = texts.lengths[text]
    texts = dataclasses.replace(
        texts,
        tokens=texts.tokens.at[row, length[:, None] + number].set(made.tokens, mode="drop"),
        lengths=texts.lengths.at[jnp.where(kept > 0, text, nowhere)].set(length + kept, mode="drop"),
    )
    return texts, kept, stopped


def _guess(
    way: _Way, drafts: Drafts, made: _Made, cache: KVCache, slots: jax.Array, count: jax.Array, keys: jax.Array
) -> tuple[Drafts, KVCache]:
    """Store ``count`` int32 [B] new rows in the cache of the draft block, and guess at what follows each text.

    A row of count 0 gets no guesses.
    """
    logits, streams, kept = _feed_drafts(way, made.streams, made.tokens, cache, slots, count)
    row, cache, goes_on = jnp.maximum(count - 1, 0)[:, None, None], kept, count > 0
    tokens, probabilities = [], []
    for i in range(drafts.tokens.shape[1]):
        if i:  # in a copy of the cache, because the rows of guesses are not kept
            one = goes_on.astype(jnp.int32)
            logits, streams, cache = _feed_drafts(way, streams, tokens[-1], cache, slots, one)
            row = jnp.zeros_like(row)
        logits = jnp.take_along_axis(logits, row, 1)
        streams = jnp.take_along_axis(streams, row[..., None], 1)
        probabilities.append(way.sampling.probabilities(logits))
        of_guess = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, i)
        tokens.append(draw(probabilities[-1][:, 0], of_guess)[:, None])
    guessed = Drafts(tokens=jnp.concatenate(tokens, 1), probabilities=jnp.concatenate(probabilities, 1), made=goes_on)
    return guessed, kept


def _feed_drafts(
    way: _Way, streams: jax.Array, ids: jax.Array, cache: KVCache, slots: jax.Array, num_new: jax.Array
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Store rows in the cache of the draft block; logits and streams as from ``draft_forward``."""
    cache, _ = prepare_forward(cache, slots, num_new)  # a window needs no blocks
    logits, streams, cache = draft_forward(way.params, streams, ids, cache, slots, num_new, way.backend)
    return logits, streams, advance(cache, slots, num_new)
