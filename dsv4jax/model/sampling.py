"""Drawing tokens from logits, and accepting drafts so that the result is distributed as without drafts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. All fields may be traced, so that one program serves any values."""

    temperature: jax.Array  # f32 []; 0 takes the likeliest token
    top_p: jax.Array  # f32 [], in (0, 1]; the likeliest tokens that together have this probability are drawn from
    key: jax.Array  # a random key

    @classmethod
    def of(cls, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> Sampling:
        """Make it of Python numbers.

        Raises:
          ValueError: the temperature is negative, or top_p is not in (0, 1].
        """
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        return cls(temperature=jnp.float32(temperature), top_p=jnp.float32(top_p), key=jax.random.key(seed))

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Return the probabilities of tokens f32 [..., V]: at temperature 0, 1 for the first of the largest logits."""
        likeliest = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)
        is_greedy = self.temperature == 0
        warm = jax.nn.softmax(logits / jnp.where(is_greedy, 1.0, self.temperature))
        warm = lax.cond(self.top_p < 1, self._likeliest_part, lambda probabilities: probabilities, warm)
        return jnp.where(is_greedy, likeliest, warm)

    def _likeliest_part(self, probabilities: jax.Array) -> jax.Array:
        """Set to 0 what is not among the likeliest tokens that together have ``top_p``, and normalise."""
        ordered = jnp.sort(probabilities, axis=-1, descending=True)
        before = jnp.cumsum(ordered, -1) - ordered  # probability of all that is likelier
        least = jnp.min(jnp.where(before < self.top_p, ordered, jnp.inf), -1, keepdims=True)
        kept = jnp.where(probabilities >= least, probabilities, 0.0)
        return kept / jnp.sum(kept, -1, keepdims=True)


def draw(probabilities: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw a token int32 [B] from probabilities f32 [B, V], with one key per row."""
    return jax.vmap(jax.random.categorical)(keys, jnp.log(probabilities)).astype(jnp.int32)


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
