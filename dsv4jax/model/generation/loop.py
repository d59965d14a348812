"""The compiled programs that generate texts: prompts, and the loop of sampling, drafts and stopping.

``store`` stores prompts, and draws the token after one whose end is among the tokens of a pass. With drafts it leaves
a text's last token to ``run``, whose passes make drafts, too. ``run`` feeds last tokens, and the drafts made of them,
and appends what is sampled, again and again, until there is something to seat (``seats``): that is rare, and what seats
touch is then not touched in every pass. ``look`` reads what was made.

What a row samples depends on its text's number and place alone, not on the other rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.cache.cache import KVCache, advance, prepare_forward
from dsv4jax.cache.shards import EVERYWHERE, OF_ROWS
from dsv4jax.checks import Named, Tree
from dsv4jax.layer.backend import Backend, for_plan
from dsv4jax.layer.tiles import map_rows
from dsv4jax.model.forward_pass import forward, stage_forward
from dsv4jax.model.generation.drafting import Drafts, Fed, drafter
from dsv4jax.model.generation.sampling import Chances, LogProbs, Sampling, accept
from dsv4jax.model.generation.seats import needs_seats
from dsv4jax.model.generation.state import Loop, Texts, of_each_shard
from dsv4jax.model.inside.choices import Choices
from dsv4jax.model.inside.devices import weight_specs
from dsv4jax.model.params import ModelParams
from dsv4jax.requests.speculate import commit

EVERYTHING = np.int32(1 << 30)  # tokens: more than a text has


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What stays the same in all passes."""

    params: ModelParams
    stop_tokens: jax.Array  # int32 [any]; -1 is none
    backend: Backend


# XLA would record the launches of a chunk as a CUDA graph, and again whenever arrays lie elsewhere, which takes longer
# than to launch them one by one beside the kernels: of a pass of 4,096 tokens 10 to 25 ms more.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


@functools.partial(jax.jit, static_argnames="chunk", donate_argnames="loop", compiler_options=_NO_GRAPHS)
def store(
    params: ModelParams,
    loop: Loop,
    stop_tokens: jax.Array,
    rows: jax.Array,
    until: jax.Array | np.int32 = EVERYTHING,
    *,
    chunk: int,
) -> Loop:
    """Store up to ``chunk`` tokens of the text of each of some rows, of which more than the last one is not stored.

    Without drafts, a text whose last token is among them gets the token after it. Otherwise the last one is left.

    Args:
      params: the model's weights.
      loop: from ``begin``, or from an earlier call. It is donated.
      stop_tokens: as for ``run``.
      rows: int32 [any], distinct; -1 = none. Over a mesh, as many for each shard, one after another.
      until: int32 [] or [rows], tokens of each text at which to stop.
      chunk: tokens of each.
    """

    def step(loop: Loop, params: ModelParams, stops: jax.Array, rows: jax.Array, until: jax.Array) -> Loop:
        return _store(_Way(params=params, stop_tokens=stops, backend=None), loop, rows, until, chunk)

    given = params, stop_tokens, rows, jnp.broadcast_to(until, rows.shape)
    return of_each_shard(step, loop, given, (weight_specs(params), EVERYWHERE, OF_ROWS, OF_ROWS))


def _store(way: _Way, loop: Loop, rows: jax.Array, until: jax.Array, chunk: int) -> Loop:
    slots, caches, text = loop.slots[rows], loop.caches, loop.text[rows]
    stored, pending = caches.model.seq_lens.at[slots].get(mode="clip"), loop.pending[rows]
    ends = (pending > 1) & (pending <= chunk) & (loop.drafts is None)
    num_new = jnp.clip(jnp.minimum(pending - jnp.where(ends, 0, 1), until - stored), 0, chunk)
    num_new = jnp.where(rows >= 0, num_new, 0)
    cache, ok = prepare_forward(caches.model, slots, num_new)
    num_new = jnp.where(ok, num_new, 0)
    drawn = (ends & (num_new == pending)).astype(jnp.int32)
    ids, which = loop.texts.tokens_from(text, stored, chunk), "last" if loop.drafts is None else "none"
    logits, seen, cache, *captured = forward(
        way.params, ids, cache, slots, num_new, which, backend=way.backend, **_looking(loop)
    )
    choices, texts = _recorded(loop, text, stored, num_new, captured), loop.texts
    if logits is not None:
        texts = _extended(texts, text, _draw(way, loop, _samplings(texts, text)[0], logits, drawn))
    caches = dataclasses.replace(caches, model=advance(cache, slots, num_new))
    if caches.drafts is not None:
        following = texts.tokens_from(text, stored + 1, chunk)
        fed = Fed(seen=seen, following=following, slots=slots, count=num_new)
        drafts = drafter(way.params).store(way.params, fed, caches.drafts, way.backend)
        caches = dataclasses.replace(caches, drafts=drafts)
    return dataclasses.replace(
        loop,
        caches=caches,
        texts=texts,
        choices=choices,
        passes=loop.passes + jnp.max(drawn),
        stored=loop.stored + jnp.sum(num_new - drawn, dtype=jnp.int32),
        ok=loop.ok & ok,
    )


@functools.partial(jax.jit, donate_argnames="loop")
def run(params: ModelParams, loop: Loop, stop_tokens: jax.Array, passes: jax.Array) -> Loop:
    """Continue the texts that have rows, until all are complete, so many passes are over, or texts need seats.

    Their prompts must be stored.

    Args:
      params: the model's weights.
      loop: from ``begin``, or from an earlier call. It is donated.
      stop_tokens: int32 [any], tokens that complete a text; -1 is none.
      passes: int32 []. Unless it is 0, one is made in any case, so that calls in turn with ``seat`` come to an end.
    """

    def step(loop: Loop, params: ModelParams, stops: jax.Array, passes: jax.Array) -> Loop:
        ops = for_plan(None, loop.caches.model.plan)
        return _run(_Way(params=params, stop_tokens=stops, backend=ops), loop, passes)

    return of_each_shard(step, loop, (params, stop_tokens, passes), (weight_specs(params), EVERYWHERE, EVERYWHERE))


def _run(way: _Way, loop: Loop, passes: jax.Array) -> Loop:
    began, devices = loop.passes, way.params.devices

    def goes_on(loop: Loop) -> jax.Array:
        unfinished, is_to_seat = devices.any_of(loop.unfinished, needs_seats(loop))
        is_in_time = (loop.passes == began) | ~is_to_seat
        return unfinished & (loop.passes - began < passes) & is_in_time

    def append(state: tuple[Loop, jax.Array]) -> tuple[Loop, jax.Array]:
        loop = _append_tokens(way, state[0])
        return loop, goes_on(loop)

    # Shards agree in the body, not in the condition, where nothing is sent.
    return lax.while_loop(lambda state: state[1], append, (loop, goes_on(loop)))[0]


@jax.jit
def pending(loop: Loop) -> jax.Array:
    """Number of tokens of each row's text that are not stored, int32 [B]; 0 for rows that are not at work."""
    return of_each_shard(lambda loop: loop.pending, loop, made=OF_ROWS)


@functools.partial(jax.jit, static_argnames="most")
def look(loop: Loop, lengths: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return what was made since texts had ``lengths`` int32 [texts].

    It is (up to ``most`` tokens of each after those int32 [texts, most]; lengths int32 [texts]; whether there is more
    to do; whether texts need seats). The last two are bool [], or [shards] over a mesh.
    """

    def step(loop: Loop, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        tokens = loop.texts.tokens_from(jnp.arange(lengths.size, dtype=jnp.int32), lengths, most)
        return tokens, loop.texts.lengths, loop.unfinished, needs_seats(loop)

    return of_each_shard(step, loop, (lengths,), (OF_ROWS,), OF_ROWS)


def _append_tokens(way: _Way, loop: Loop) -> Loop:
    """Feed each row at work its text's last token and its drafts, and append what the model makes of it.

    Each of them has one token that is not stored, before and after this.
    """
    text = loop.text
    active = loop.ok & loop.at_work
    sampling, of_drafts = _samplings(loop.texts, text)

    made, cache, ok = (_sample if loop.drafts is None else _judge)(way, loop, active, sampling)
    caches, drafts, judged = dataclasses.replace(loop.caches, model=cache), loop.drafts, loop.judged
    if drafts is not None:
        assert judged is not None
        assert caches.drafts is not None
        # The first one that is not accepted is the last one that the text tells of.
        settled = jnp.minimum(made.judged, made.new.count)
        judged = judged.noted(drafts, text, loop.texts.lengths[text], settled, made.accepted)
        drafts, cache = _guess(way, drafts, made, caches.drafts, loop.slots, of_drafts)
        caches = dataclasses.replace(caches, drafts=cache)
    return dataclasses.replace(
        loop,
        caches=caches,
        texts=_extended(loop.texts, text, made.new),
        drafts=drafts,
        judged=judged,
        choices=_recorded(loop, text, loop.texts.lengths[text] - 1, made.new.count, made.captured),
        passes=loop.passes + 1,
        drafted=loop.drafted + jnp.sum(made.judged, dtype=jnp.int32),
        accepted=loop.accepted + jnp.sum(made.accepted, dtype=jnp.int32),
        ok=loop.ok & ok,
    )


def _samplings(texts: Texts, text: jax.Array) -> tuple[Sampling, Sampling]:
    """Return how texts int32 [B] draw their next tokens, and their drafts: with keys of their next places [B]."""
    sampling = jax.tree.map(lambda leaf: leaf[text], texts.sampling)
    both = jax.vmap(jax.random.split)(jax.vmap(jax.random.fold_in)(sampling.key, texts.lengths[text]))
    judging, guessing = (dataclasses.replace(sampling, key=both[:, i]) for i in range(2))
    return judging, guessing


@dataclasses.dataclass(frozen=True, slots=True)
class _New:
    """What each row's text is extended by."""

    tokens: jax.Array  # int32 [B, m + 1] drafts that were accepted, and the token after them
    log_probs: LogProbs  # [B, m + 1] of these tokens
    count: jax.Array  # int32 [B] how many of them are new tokens; 0 for rows that were not fed
    stopped: jax.Array  # bool [B] whether the last one of them is a stop token, and completes the text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What a pass made of each row's text."""

    new: _New
    judged: jax.Array  # int32 [B] drafts that the model has judged
    accepted: jax.Array  # int32 [B] how many of them are new tokens, the first ones
    seen: jax.Array  # [B, m + 1, ...] what drafts are made of, of the tokens that were fed
    captured: list[Named]  # of the same tokens, if anything was


Outcome = tuple[_Made, KVCache, jax.Array]  # the last two are the model's cache, and whether it had room


def _sample(way: _Way, loop: Loop, active: jax.Array, sampling: Sampling) -> Outcome:
    """Feed each row's last token, and draw the next one."""
    cache, ok = prepare_forward(loop.caches.model, loop.slots, active.astype(jnp.int32))
    num_new = (ok & active).astype(jnp.int32)
    looking, given = _looking(loop), loop.last_tokens
    logits, seen, cache, *captured = forward(
        way.params, given, cache, loop.slots, num_new, backend=way.backend, **looking
    )
    assert logits is not None
    new, none = _draw(way, loop, sampling, logits, num_new), jnp.zeros_like(num_new)
    made = _Made(new=new, judged=none, accepted=none, seen=seen, captured=captured)
    return made, advance(cache, loop.slots, num_new), ok


def _judge(way: _Way, loop: Loop, active: jax.Array, sampling: Sampling) -> Outcome:
    """Feed each row's last token and its drafts, accept some, and draw the token after them."""
    drafts, slots, texts = loop.drafts, loop.slots, loop.texts
    assert drafts is not None
    room = texts.limits[loop.text] - texts.lengths[loop.text] - 1  # beside the token after the drafts
    judged = jnp.where(active, jnp.clip(room, 0, drafts.judged(sampling.least_confidence)), 0)
    cache, ok = prepare_forward(loop.caches.model, slots, jnp.where(active, 1 + judged, 0))
    fed = ok & active
    judged = jnp.where(fed, judged, 0)
    given = jnp.concatenate([loop.last_tokens, drafts.tokens], axis=1)
    num_new = jnp.where(fed, 1 + judged, 0)
    logits, seen, cache, staged, *captured = stage_forward(
        way.params, given, cache, slots, num_new, backend=way.backend, **_looking(loop)
    )

    def judge(
        sampling: Sampling, logits: jax.Array, guessed: Chances, tokens: jax.Array, judged: jax.Array
    ) -> tuple[jax.Array, jax.Array, LogProbs]:
        wanted = sampling.chances(logits)
        accepted, following = accept(wanted, guessed, tokens, judged, sampling.key)
        tokens = jnp.pad(tokens, ((0, 0), (0, 1))).at[jnp.arange(len(following)), accepted].set(following)
        return accepted, tokens, wanted.log_probs(tokens)

    accepted, tokens, log_probs = _by_row(loop, judge, sampling, logits, drafts.chances, drafts.tokens, judged)
    count, stopped = _until_stop(tokens, jnp.where(fed, accepted + 1, 0), way.stop_tokens)
    # None past a stop token: the text may go on from it.
    cache, committed = commit(cache, staged, count, backend=way.backend)
    count = jnp.where(committed, count, 0)
    accepted = jnp.minimum(accepted, count)
    new = _New(tokens, log_probs, count, stopped)
    made = _Made(new=new, judged=judged, accepted=accepted, seen=seen, captured=captured)
    return made, cache, ok & committed


def _draw(way: _Way, loop: Loop, sampling: Sampling, logits: jax.Array, count: jax.Array) -> _New:
    """Draw a token after each row of which ``count`` int32 [B] is 1; it is 0 for others."""

    def draw(sampling: Sampling, logits: jax.Array) -> tuple[jax.Array, LogProbs]:
        chances = sampling.chances(logits)
        tokens = chances.draw(sampling.key)
        return tokens, chances.log_probs(tokens)

    tokens, log_probs = jax.tree.map(lambda leaf: leaf[:, None], _by_row(loop, draw, sampling, logits))
    return _New(tokens, log_probs, *_until_stop(tokens, count, way.stop_tokens))


def _by_row(loop: Loop, function: Callable[..., Tree], sampling: Sampling, *given: Tree) -> Tree:
    """Apply a function to samplings [B] and arrays [B, ...]: to each row alone if the caches are invariant."""
    if not loop.caches.model.plan.invariant:
        return function(sampling, *given)
    kind = jax.random.key_impl(sampling.key)

    def of_row(row: tuple[Sampling, Tree]) -> Tree:
        sampling, given = row
        return function(dataclasses.replace(sampling, key=jax.random.wrap_key_data(sampling.key, impl=kind)), *given)

    numbers = dataclasses.replace(sampling, key=jax.random.key_data(sampling.key))
    return map_rows(of_row, (numbers, given), 1)


def _looking(loop: Loop) -> Named:
    """What the passes of a loop capture."""
    return {} if loop.choices is None else {"capture": ("choices",)}


def _recorded(loop: Loop, text: jax.Array, first: jax.Array, count: jax.Array, captured: list[Named]) -> Choices | None:
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


def _extended(texts: Texts, text: jax.Array, new: _New) -> Texts:
    """Append what is new to texts int32 [B]."""
    number = jnp.arange(new.tokens.shape[1], dtype=jnp.int32)[None]
    nowhere = texts.lengths.size  # a place out of range is dropped
    row = jnp.where(number < new.count[:, None], text[:, None], nowhere)
    before = texts.lengths[text]
    length = before + new.count
    grown = jnp.where(new.count > 0, text, nowhere)
    at = row, before[:, None] + number

    def put(old: jax.Array, added: jax.Array) -> jax.Array:
        return old.at[at].set(added, mode="drop")

    return dataclasses.replace(
        texts,
        tokens=put(texts.tokens, new.tokens),
        log_probs=jax.tree.map(put, texts.log_probs, new.log_probs),
        lengths=texts.lengths.at[grown].set(length, mode="drop"),
        limits=texts.limits.at[jnp.where(new.stopped, grown, nowhere)].set(length, mode="drop"),
    )


def _guess(
    way: _Way, drafts: Drafts, made: _Made, cache: KVCache, slots: jax.Array, sampling: Sampling
) -> tuple[Drafts, KVCache]:
    """Store what drafts need of the new tokens, and guess at what follows each text."""

    def draw_one(logits: jax.Array, i: jax.Array | int) -> tuple[jax.Array, Chances]:
        chances = sampling.chances(logits)
        tokens = chances.draw(jax.vmap(jax.random.fold_in, in_axes=(0, None))(sampling.key, i))
        # A draft from NaN has the probability NaN: it is accepted at temperature 0 alone, if it is the model's own.
        return jnp.maximum(tokens, 0), chances

    fed = Fed(seen=made.seen, following=made.new.tokens, slots=slots, count=made.new.count)
    return drafter(way.params).guess(way.params, fed, cache, drafts.tokens.shape[1], draw_one, way.backend)
