"""Drawing tokens from logits, and accepting drafts so that the result is distributed as without drafts."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import real

_BITS, _DIGIT = 30, 5  # of a probability, and of it that one pass over the vocabulary finds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. All fields may be traced, so that one program serves any values."""

    temperature: jax.Array  # f32 []; 0 takes the likeliest token
    top_p: jax.Array  # f32 [], in (0, 1]; the likeliest tokens that together have this probability are drawn from
    key: jax.Array  # a random key
    # f32 [], in [0, 1]. The first draft that the model's block trusts less is not judged, nor are those after it. It
    # changes the speed, not the distribution. Blocks for multi-token prediction trust all of theirs.
    least_confidence: jax.Array

    @classmethod
    def of(cls, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, least_confidence: float = 0.0) -> Sampling:
        """Make it of Python numbers.

        Raises:
          ValueError: the temperature is negative or infinite, top_p is not in (0, 1], or least_confidence is not in
            [0, 1].
        """
        temperature, top_p = real("temperature", temperature), real("top_p", top_p)
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        if not 0 <= real("least_confidence", least_confidence) <= 1:
            raise ValueError(f"least_confidence must be in [0, 1], got {least_confidence}")
        return cls(
            temperature=jnp.float32(temperature),
            top_p=jnp.float32(top_p),
            key=jax.random.key(seed),
            least_confidence=jnp.float32(least_confidence),
        )

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Return the probabilities of tokens f32 [..., V]: at temperature 0, 1 for the first of the largest logits."""
        return self.chances(logits).all()

    def chances(self, logits: jax.Array) -> Chances:
        """Return the same of logits f32 [..., V], not written out."""
        least, peak = self._least_kept(logits), jnp.max(logits, -1)
        warm = _warm(logits - peak[..., None], self.temperature)
        total = jnp.sum(jnp.where(logits >= least[..., None], jnp.exp(warm), 0.0), -1)
        return Chances(
            logits=logits,
            temperature=jnp.broadcast_to(self.temperature, peak.shape),
            least=least,
            peak=peak,
            total=total,
            likeliest=_first_largest(logits),
        )

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draw a token int32 [B] with the probabilities of logits f32 [B, V], with one key per row; -1 if one is NaN.

        The largest of all logits after temperature, each with a Gumbel number of its own added, is a token with its
        probability. Nothing is added up over the vocabulary, and at temperature 0 the same maximum is of logits alone.
        """
        return _largest(logits, self._least_kept(logits), self.temperature, keys)

    def _least_kept(self, logits: jax.Array) -> jax.Array:
        """Return the least of logits f32 [..., V] that is kept, f32 [...]; -inf if all are.

        Kept are the likeliest tokens that have ``top_p`` together: those beside which all likelier ones have less than
        that. They are looked for only where it may matter, since that takes longer than all else.
        """
        lowest = jnp.full(logits.shape[:-1], -jnp.inf)
        return lax.cond((self.top_p < 1) & (self.temperature > 0), self._find_least, lambda _: lowest, logits)

    def _find_least(self, logits: jax.Array) -> jax.Array:
        """Find the least probability as a floating-point number, digit by digit.

        It is the largest such that all that are not below it have ``top_p``.
        """
        probabilities = jax.nn.softmax(_warm(logits, self.temperature))
        bits = lax.bitcast_convert_type(probabilities, jnp.int32)  # in the order of the numbers, as none is negative
        least = jnp.zeros(logits.shape[:-1], jnp.int32)
        for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
            digits = lax.broadcasted_iota(jnp.int32, (*least.shape, 1 << _DIGIT), least.ndim)
            tried = least[..., None] + (digits << shift)
            is_above = bits[..., None] >= tried[..., None, :]
            reach = jnp.sum(jnp.where(is_above, probabilities[..., None], 0.0), -2) >= self.top_p
            least += jnp.maximum(jnp.sum(reach, -1, dtype=jnp.int32) - 1, 0) << shift
        found = jnp.min(jnp.where(bits >= least[..., None], logits, jnp.inf), -1)
        return jnp.minimum(found, jnp.max(logits, -1))  # a top_p that is 0 keeps the likeliest, too


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """Probabilities of tokens, as far as they were asked for.

    Those of all tokens are as large as the logits they come from. Most are never read.
    """

    logits: jax.Array  # f32 [..., V]
    temperature: jax.Array  # f32 [...]; 0: the likeliest token has all probability
    least: jax.Array  # f32 [...] of the logits that are kept; lower ones have no probability
    peak: jax.Array  # f32 [...] the largest
    total: jax.Array  # f32 [...] sum of exp((logit - peak) / temperature) over those that are kept
    likeliest: jax.Array  # int32 [...] the first token of the largest logits; -1 if one is NaN

    def of(self, tokens: jax.Array) -> jax.Array:
        """Return the probabilities of a token int32 [...] each, f32 [...]."""
        return self._probability(jnp.take_along_axis(self.logits, tokens[..., None], -1)[..., 0], tokens)

    def all(self) -> jax.Array:
        """Return the probabilities of all tokens, f32 [..., V]."""
        token = lax.broadcasted_iota(jnp.int32, self.logits.shape, self.logits.ndim - 1)
        of_rows = dataclasses.replace(self, logits=self.peak)  # all leaves alike
        wide: Chances = jax.tree.map(lambda leaf: leaf[..., None], of_rows)
        return wide._probability(self.logits, token)

    def row(self, number: jax.Array) -> Chances:
        """Return those of a row int32 [B] of each of [B, rows, ...]."""

        def one(leaf: jax.Array) -> jax.Array:
            at = number.reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.take_along_axis(leaf, at, axis=1)[:, 0]

        return jax.tree.map(one, self)

    def draw(self, keys: jax.Array) -> jax.Array:
        """Draw a token int32 [B] each, where there are [B, V], with one key per row; any if a logit is NaN.

        Such a draft has the probability NaN and is not accepted, or at temperature 0 only if it is the model's own.
        """
        return jnp.maximum(_largest(self.logits, self.least, self.temperature[..., None], keys), 0)

    def _probability(self, logit: jax.Array, token: jax.Array) -> jax.Array:
        chance = jnp.exp(_warm(logit - self.peak, self.temperature)) / self.total
        drawn = jnp.where(logit >= self.least, chance, 0.0)
        return jnp.where(self.temperature == 0, (token == self.likeliest).astype(jnp.float32), drawn)


def _warm(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    return logits / jnp.where(temperature == 0, 1.0, temperature)


def _largest(logits: jax.Array, least: jax.Array, temperature: jax.Array, keys: jax.Array) -> jax.Array:
    noisy = _warm(logits, temperature) + _gumbel(logits.shape[-1], keys)
    noisy = jnp.where(logits < least[..., None], -jnp.inf, noisy)  # NaN stays
    return _first_largest(jnp.where(temperature == 0, logits, noisy))


def _first_largest(values: jax.Array) -> jax.Array:
    """Return the first place of the largest of values f32 [..., V], int32 [...]; -1 if one is NaN, or all are -inf."""
    found = jnp.argmax(values, -1).astype(jnp.int32)  # of a NaN, if there is one
    return jnp.where(jnp.take_along_axis(values, found[..., None], -1)[..., 0] > -jnp.inf, found, -1)


def _gumbel(count: int, keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.gumbel(key, (count,), jnp.float32))(keys)


def accept(
    wanted: Chances, guessed: Chances, drafts: jax.Array, num_drafts: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accept the first drafts, and draw the token after them, so that all have the model's distribution.

    Draft d is accepted with probability min(1, p(d) / q(d)), where q is the distribution that it was drawn from and p
    the model's. The first that is not is replaced by a token from max(p - q, 0), normalised; after the last one, a
    token is drawn from p (Leviathan et al., 2023). At temperature 0 both are 1 for one token: a draft is accepted if it
    is the model's own, and otherwise that one is taken. Of all probabilities only those of the token after are written
    out.

    Args:
      wanted: [B, m + 1, V], p of each draft and of the token after all of them.
      guessed: [B, m, V], q of each draft.
      drafts: int32 [B, m].
      num_drafts: int32 [B], how many of a row's drafts count.
      keys: a random key per row [B].

    Returns:
      (number of drafts that are accepted int32 [B]; the token after them int32 [B], -1 if a logit for it is NaN).
    """
    most = drafts.shape[1]
    uniform_keys, draw_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    chance = jax.vmap(lambda key: jax.random.uniform(key, (most,)))(uniform_keys)
    p, q = wanted.of(jnp.pad(drafts, ((0, 0), (0, 1))))[:, :most], guessed.of(drafts)
    good = (chance * q < p) & (jnp.arange(most)[None] < num_drafts[:, None])
    accepted = jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)

    instead = wanted.row(accepted).all()
    if most:
        was_refused = accepted < num_drafts
        left = jnp.maximum(instead - guessed.row(jnp.minimum(accepted, most - 1)).all(), 0.0)
        total = jnp.sum(left, -1, keepdims=True)
        # A refused draft has p < q, so that p > q somewhere; rounding may lose that, and p is right then, too.
        usable = was_refused[:, None] & (total > 0)
        instead = jnp.where(usable, left / jnp.where(usable, total, 1.0), instead)
    noisy = jnp.log(instead) + _gumbel(instead.shape[-1], draw_keys)
    return accepted, _first_largest(noisy)
