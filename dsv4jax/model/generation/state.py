"""What generates texts, between passes: texts in a queue, and which row of the batch works on which.

Over a mesh, each shard of requests has a queue, rows and a loop of its own, and all of them make the same number of
passes. Slots, and places in the queue, are numbers within a shard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv4jax.cache.shards import OF_ROWS, cache_specs, is_inside, over_mesh
from dsv4jax.checks import Named, Tree
from dsv4jax.model.caches import Caches
from dsv4jax.model.generation.drafting import Drafts, Judged
from dsv4jax.model.generation.sampling import LogProbs, Sampling
from dsv4jax.model.inside.captures import CHOICES_SPEC
from dsv4jax.model.inside.choices import Choices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A queue of texts, the first of which comes first. A text without tokens is complete."""

    tokens: jax.Array  # int32 [texts, longest] each prompt, then what was generated; the rest is not read
    lengths: jax.Array  # int32 [texts] tokens so far
    limits: jax.Array  # int32 [texts] tokens at which a text is complete, at most longest; a stop token lowers it
    sampling: Sampling  # [texts] how each draws; what it draws at a place depends on its key and the place alone
    log_probs: LogProbs  # [texts, longest] of the tokens that were generated

    @classmethod
    def of(cls, tokens: jax.Array, lengths: jax.Array, limits: jax.Array, sampling: Sampling) -> Texts:
        """Texts of which nothing was generated yet."""
        of_model, sampled = (jnp.zeros(tokens.shape, jnp.float32) for _ in range(2))  # two buffers, as both are donated
        log_probs = LogProbs(model=of_model, sampled=sampled)
        return cls(tokens=tokens, lengths=lengths, limits=limits, sampling=sampling, log_probs=log_probs)

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
    def last_tokens(self) -> jax.Array:
        """The last token of each row's text, int32 [B, 1]."""
        return self.texts.tokens_from(self.text, self.texts.lengths[self.text] - 1, 1)


COUNTS = ("passes", "stored", "drafted", "accepted", "ok")  # fields of one number


def of_each_shard[R](
    step: Callable[..., R], loop: Loop, given: tuple[Tree, ...] = (), specs: tuple[Tree, ...] = (), made: Tree = None
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

    def of_shard(loop: Loop, *given: Tree) -> R:
        loop = dataclasses.replace(loop, **{name: getattr(loop, name)[0] for name in COUNTS})
        return jax.tree.map(jnp.atleast_1d, step(loop, *given))

    of_loop = loop_specs(loop)
    return over_mesh(mesh, of_shard, (of_loop, *specs), of_loop if made is None else made)(loop, *given)


def loop_specs(loop: Loop) -> Loop:
    """The specs of a loop's leaves, as a prefix of its tree."""
    fields: Named = {field.name: OF_ROWS for field in dataclasses.fields(loop)}
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
    drafts = Drafts.none(rows, num_drafts, vocab_size) if num_drafts else None
    return Loop(
        caches=caches,
        texts=texts,
        drafts=drafts,
        judged=Judged.none(*texts.tokens.shape) if num_drafts else None,
        choices=choices,
        shared=None,
        **_begun(rows, () if caches.model.mesh is None else (shards,)),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begun(rows: int, shape: tuple[int, ...]) -> Named:
    """Return what a loop of so many rows begins with: no row has a text, and all numbers [shape] are 0."""
    numbers = {name: jnp.zeros(shape, jnp.int32) for name in COUNTS} | {"ok": jnp.ones(shape, jnp.bool)}
    return numbers | {"slots": jnp.full(rows, -1, jnp.int32), "text": jnp.zeros(rows, jnp.int32)}


@functools.partial(jax.jit, donate_argnums=0)
def spread(loop: Loop) -> Loop:
    """Lay a loop from ``begin`` over the mesh, as all other programs return it, so that each is compiled but once."""
    return of_each_shard(lambda loop: loop, loop)
