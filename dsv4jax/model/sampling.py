"""Drawing tokens from logits, and accepting drafts so that the result is distributed as without drafts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

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
          ValueError: the temperature is negative, top_p is not in (0, 1], or least_confidence is not in [0, 1].
        """
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        if not 0 <= least_confidence <= 1:
            raise ValueError(f"least_confidence must be in [0, 1], got {least_confidence}")
        return cls(
            temperature=jnp.float32(temperature),
            top_p=jnp.float32(top_p),
            key=jax.random.key(seed),
            least_confidence=jnp.float32(least_confidence),
        )

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Return the probabilities of tokens f32 [..., V]: at temperature 0, 1 for the first of the largest logits."""
        likeliest = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)
        is_greedy = self.temperature == 0
        warm = self._warm(logits)
        kept = jnp.where(self._are_kept(warm), jax.nn.softmax(warm), 0.0)
        return jnp.where(is_greedy, likeliest, kept / jnp.sum(kept, -1, keepdims=True))

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draw a token int32 [B] with the probabilities of logits f32 [B, V], with one key per row.

        The largest of all logits after temperature, each with a Gumbel number of its own added, is a token with its
        probability. Nothing is added up over the vocabulary, and at temperature 0 the same maximum is of logits alone.
        """
        warm = self._warm(logits)
        noisy = jnp.where(self._are_kept(warm), warm + _gumbel(logits.shape[-1], keys), -jnp.inf)
        return jnp.argmax(jnp.where(self.temperature == 0, logits, noisy), -1).astype(jnp.int32)

    def _warm(self, logits: jax.Array) -> jax.Array:
        return logits / jnp.where(self.temperature == 0, 1.0, self.temperature)

    def _are_kept(self, warm: jax.Array) -> jax.Array:
        """Return which of logits [..., V], after temperature, are of the likeliest tokens that have ``top_p`` together.

        They are those beside which all likelier ones have less than that. The least of them is found as a
        floating-point number, digit by digit: the largest such that all that are not below it have ``top_p``.
        """
        probabilities = jax.nn.softmax(warm)
        bits = lax.bitcast_convert_type(probabilities, jnp.int32)  # in the order of the numbers, as none is negative
        least = jnp.zeros(warm.shape[:-1], jnp.int32)
        for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
            digits = lax.broadcasted_iota(jnp.int32, (*least.shape, 1 << _DIGIT), least.ndim)
            tried = least[..., None] + (digits << shift)
            is_above = bits[..., None] >= tried[..., None, :]
            reach = jnp.sum(jnp.where(is_above, probabilities[..., None], 0.0), -2) >= self.top_p
            least += jnp.maximum(jnp.sum(reach, -1, dtype=jnp.int32) - 1, 0) << shift
        return (bits >= least[..., None]) | (self.top_p >= 1)


def draw(probabilities: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw a token int32 [B] from probabilities f32 [B, V], with one key per row."""
    noisy = jnp.log(probabilities) + _gumbel(probabilities.shape[-1], keys)
    return jnp.argmax(noisy, -1).astype(jnp.int32)


def _gumbel(count: int, keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.gumbel(key, (count,), jnp.float32))(keys)


def accept(
    wanted: jax.Array, guessed: jax.Array, drafts: jax.Array, num_drafts: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accept the first drafts, and draw the token after them, so that all have the model's distribution.

    Draft d is accepted with probability min(1, p(d) / q(d)), where q is the distribution that it was drawn from and p
    the model's. The first that is not is replaced by a token from max(p - q, 0), normalised; after the last one, a
    token is drawn from p (Leviathan et al., 2023). At temperature 0 both are 1 for one token: a draft is accepted if it
    is the model's own, and otherwise that one is taken.

    Args:
      wanted: f32 [B, m + 1, V], p of each draft and of the token after all of them.
      guessed: f32 [B, m, V], q of each draft.
      drafts: int32 [B, m].
      num_drafts: int32 [B], how many of a row's drafts count.
      keys: a random key per row [B].

    Returns:
      (number of drafts that are accepted int32 [B]; the token after them int32 [B]).
    """
    most = drafts.shape[1]
    uniform_keys, draw_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    chance = jax.vmap(lambda key: jax.random.uniform(key, (most,)))(uniform_keys)
    p = jnp.take_along_axis(wanted[:, :most], drafts[..., None], -1)[..., 0]
    q = jnp.take_along_axis(guessed, drafts[..., None], -1)[..., 0]
    good = (chance * q < p) & (jnp.arange(most)[None] < num_drafts[:, None])
    accepted = jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)

    def at(rows: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.take_along_axis(rows, number[:, None, None], axis=1)[:, 0]

    instead = at(wanted, accepted)
    if most:
        was_refused = accepted < num_drafts
        left = jnp.maximum(instead - at(guessed, jnp.minimum(accepted, most - 1)), 0.0)
        total = jnp.sum(left, -1, keepdims=True)
        # A refused draft has p < q, so that p > q somewhere; rounding may lose that, and p is right then, too.
        usable = was_refused[:, None] & (total > 0)
        instead = jnp.where(usable, left / jnp.where(usable, total, 1.0), instead)
    return accepted, draw(instead, draw_keys)
