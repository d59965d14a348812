"""How the loop that generates texts gets its drafts, whichever kind of block makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.cache.cache import KVCache, advance, prepare_forward
from dsv4jax.cache.shards import on_host
from dsv4jax.layer.backend import Backend
from dsv4jax.model import dspark
from dsv4jax.model.drafts import draft_forward
from dsv4jax.model.generation.sampling import Chances, Sampling
from dsv4jax.model.params import DraftParams, DSparkParams, ModelParams

# Takes logits f32 [B, V] of draft number i; returns (tokens int32 [B], the probabilities that they came from).
Draw = Callable[[jax.Array, jax.Array | int], tuple[jax.Array, Chances]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Guesses at what follows the last token of each row's text."""

    tokens: jax.Array  # int32 [B, m]
    chances: Chances  # [B, m, V] that they were drawn from
    confidence: jax.Array  # f32 [B, m] estimated probability that each is accepted if all before it were; 1 if unknown
    made: jax.Array  # bool [B] False for a row that has none

    @classmethod
    def none(cls, rows: int, number: int, vocab_size: int) -> Drafts:
        return cls(
            tokens=jnp.zeros((rows, number), jnp.int32),
            chances=Sampling.of().chances(jnp.zeros((rows, number, vocab_size), jnp.float32)),
            confidence=jnp.ones((rows, number), jnp.float32),
            made=jnp.zeros(rows, jnp.bool),
        )

    def judged(self, least: jax.Array) -> jax.Array:
        """Return, int32 [B], how many drafts come before a row's first whose confidence is below ``least`` f32 [B].

        Whether a draft counts depends on the tokens before it alone, so that what is accepted keeps its distribution.
        """
        good = (self.confidence >= least[:, None]) & self.made[:, None]
        return jnp.sum(jnp.cumprod(good, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def of_places[T](tree: T, texts: Sequence[int], first: Sequence[int], most: int) -> T:
    """Return the elements [n, at least most] of arrays [texts, longest] for some texts from place ``first`` on."""
    # Of a power of two of places, so that a few programs serve any counts.
    number = np.arange(1 << most.bit_length(), dtype=np.int32)[None]
    return _at(tree, np.asarray(texts, np.int32)[:, None], np.asarray(first, np.int32)[:, None] + number)


@jax.jit
def _at[T](tree: T, text: jax.Array, places: jax.Array) -> T:
    return jax.tree.map(lambda leaf: leaf.at[text, places].get(mode="clip"), tree)


class JudgedDraft(NamedTuple):
    """What became of a draft."""

    confidence: float  # the estimated probability that it is accepted if all before it are; 1 if unknown
    accepted: bool  # False: the text has another token in its place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of the drafts that were made for each place of some texts."""

    confidence: jax.Array  # f32 [texts, longest], NaN where no draft was judged
    accepted: jax.Array  # bool [texts, longest]

    @classmethod
    def none(cls, texts: int, longest: int) -> Judged:
        shape = texts, longest
        return cls(confidence=jnp.full(shape, jnp.nan, jnp.float32), accepted=jnp.zeros(shape, jnp.bool))

    def noted(
        self, drafts: Drafts, text: jax.Array, first: jax.Array, judged: jax.Array, accepted: jax.Array
    ) -> Judged:
        """Note the first ``judged`` drafts of texts from place ``first`` on, of which some are accepted, int32 [B]."""
        number = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None]
        nowhere = self.accepted.shape[0]  # a place out of range is dropped
        at = jnp.where(number < judged[:, None], text[:, None], nowhere), first[:, None] + number
        return Judged(
            confidence=self.confidence.at[at].set(drafts.confidence, mode="drop"),
            accepted=self.accepted.at[at].set(number < accepted[:, None], mode="drop"),
        )

    def of(self, texts: Sequence[int], first: Sequence[int], counts: Sequence[int]) -> list[list[JudgedDraft | None]]:
        """Return, on the host, the drafts for so many places of some texts from place ``first`` on."""
        confidence, accepted = on_host(of_places((self.confidence, self.accepted), texts, first, max(counts)))
        return [
            [None if np.isnan(c) else JudgedDraft(float(c), bool(a)) for c, a in zip(*row, strict=True)]
            for row in ((confidence[i, :count], accepted[i, :count]) for i, count in enumerate(counts))
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """The tokens that the model has run in a pass."""

    seen: jax.Array  # [B, T, ...] what drafts are made of, as ``forward`` returned it
    following: jax.Array  # int32 [B, T] the token after each
    slots: jax.Array  # int32 [B]
    count: jax.Array  # int32 [B] how many of T became part of the text


class Drafter(Protocol):
    """A kind of block that makes drafts."""

    def store(self, params: ModelParams, fed: Fed, cache: KVCache, backend: Backend) -> KVCache:
        """Store in the cache for drafts what they need to know of tokens."""
        ...

    def guess(
        self, params: ModelParams, fed: Fed, cache: KVCache, number: int, draw: Draw, backend: Backend
    ) -> tuple[Drafts, KVCache]:
        """Store tokens as ``store`` does, and guess at so many after the last one of each row that counts.

        Rows without tokens get no drafts.
        """
        ...


def drafter(params: ModelParams) -> Drafter:
    """Return what makes drafts with a model's weights."""
    return _DRAFTERS[type(params.drafts)]


class _MTP:
    """Multi-token prediction: the block runs once per draft, on its own streams and drafts."""

    def store(self, params: ModelParams, fed: Fed, cache: KVCache, backend: Backend) -> KVCache:
        return self._feed(params, fed, cache, backend)[2]

    def guess(
        self, params: ModelParams, fed: Fed, cache: KVCache, number: int, draw: Draw, backend: Backend
    ) -> tuple[Drafts, KVCache]:
        logits, streams, kept = self._feed(params, fed, cache, backend)
        last, goes_on = jnp.maximum(fed.count - 1, 0)[:, None, None], fed.count > 0
        tokens, chances = draw(jnp.take_along_axis(logits, last, 1)[:, 0], 0)
        streams = jnp.take_along_axis(streams, last[..., None], 1)

        def further(before: tuple[jax.Array, jax.Array, KVCache], i: jax.Array):
            tokens, streams, cache = before
            one = Fed(seen=streams, following=tokens[:, None], slots=fed.slots, count=goes_on.astype(jnp.int32))
            logits, streams, cache = self._feed(params, one, cache, backend)
            tokens, chances = draw(logits[:, 0], i)
            return (tokens, streams, cache), (tokens, chances)

        made = jax.tree.map(lambda one: one[:, None], (tokens, chances))
        if number > 1:
            # A loop, so that the block is compiled once. It has a copy of the cache: rows of guesses are not kept.
            _, more = lax.scan(further, (tokens, streams, kept), jnp.arange(1, number, dtype=jnp.int32))
            made = jax.tree.map(lambda one, more: jnp.concatenate([one, jnp.moveaxis(more, 0, 1)], 1), made, more)
        all_tokens, all_chances = made
        unknown = jnp.ones(all_tokens.shape, jnp.float32)
        return Drafts(tokens=all_tokens, chances=all_chances, confidence=unknown, made=goes_on), kept

    def _feed(
        self, params: ModelParams, fed: Fed, cache: KVCache, backend: Backend
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        cache, _ = prepare_forward(cache, fed.slots, fed.count)  # a window needs no blocks
        given = fed.seen, fed.following, cache, fed.slots, fed.count
        logits, streams, cache = draft_forward(params, *given, backend=backend)
        return logits, streams, advance(cache, fed.slots, fed.count)


class _DSpark:
    """DSpark: the block runs once for all drafts, and a small head draws them one by one."""

    def store(self, params: ModelParams, fed: Fed, cache: KVCache, backend: Backend) -> KVCache:
        cache, _ = prepare_forward(cache, fed.slots, fed.count)
        cache = dspark.store_keys(params, fed.seen, cache, fed.slots, fed.count, backend)
        return advance(cache, fed.slots, fed.count)

    def guess(
        self, params: ModelParams, fed: Fed, cache: KVCache, number: int, draw: Draw, backend: Backend
    ) -> tuple[Drafts, KVCache]:
        assert isinstance(params.drafts, DSparkParams)
        cache, active = self.store(params, fed, cache, backend), fed.count > 0
        last = jnp.maximum(fed.count - 1, 0)[:, None]
        token = jnp.take_along_axis(fed.following, last, 1)[:, 0]
        rows = dspark.run_block(params, token, cache, fed.slots, active, backend)
        base = dspark.base_logits(params, rows.normed[:, :number], backend)
        made: list[tuple[jax.Array, Chances, jax.Array]] = []
        for i in range(number):  # at most a block's rows
            logits, confidence = dspark.token_head(params.drafts, base[:, i], rows.x[:, i], token)
            token, chances = draw(logits, i)
            made.append((token, chances, jax.nn.sigmoid(confidence)))
        tokens, chances, confidence = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *made)
        return Drafts(tokens=tokens, chances=chances, confidence=confidence, made=active), cache


_DRAFTERS: dict[type, Drafter] = {DraftParams: _MTP(), DSparkParams: _DSpark()}
