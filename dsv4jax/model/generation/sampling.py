"""Drawing tokens from logits, and accepting drafts so that the result is distributed as without drafts."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.checks import FLOATS, check_array, integer, real

_BITS, _DIGIT = 30, 5  # of a probability, and of it that one pass over the vocabulary finds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn: all rows alike, or each in its own way.

    All fields may be traced, so that one program serves any values. They are [], or all are [B] of B rows.
    """

    temperature: jax.Array  # f32; 0 takes the likeliest token
    top_p: jax.Array  # f32, in (0, 1]; the likeliest tokens that together have this probability are drawn from
    key: jax.Array  # a random key; ``draw`` has keys of its own
    # f32, in [0, 1]. The first draft that the model's block trusts less is not judged, nor are those after it. It
    # changes the speed, not the distribution. Blocks for multi-token prediction trust all of theirs.
    least_confidence: jax.Array

    @classmethod
    def of(cls, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, least_confidence: float = 0.0) -> Sampling:
        """Make it of numbers; the seed may have 64 bits.

        Raises:
          ValueError: the temperature is negative or infinite, top_p is not in (0, 1], the seed is not in [0, 2**64), or
            least_confidence is not in [0, 1].
        """
        temperature, top_p = real("temperature", temperature), real("top_p", top_p)
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        if not 0 <= real("least_confidence", least_confidence) <= 1:
            raise ValueError(f"least_confidence must be in [0, 1], got {least_confidence}")
        if integer("seed", seed, 0) >= 1 << 64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        high, low = map(np.uint32, divmod(int(seed), 1 << 32))
        numbers = map(np.float32, (temperature, top_p, least_confidence))
        return _of_numbers(*numbers, low, high if high else None, impl=jax.config.jax_default_prng_impl)

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Return the probabilities of tokens f32 [..., V]: at temperature 0, 1 for the first of the largest logits."""
        return self.chances(logits).all()

    @jax.jit
    def chances(self, logits: jax.Array) -> Chances:
        """Return the same of logits [..., V], or [B, ..., V] where rows differ, not written out."""
        check_array("logits", logits, {"...": ..., "V": None}, FLOATS)
        logits = logits.astype(jnp.float32)
        temperature, top_p = (_for_rows(leaf, logits.shape[:-1]) for leaf in (self.temperature, self.top_p))
        peak, least = jnp.max(logits, -1), _least_kept(logits, temperature, top_p)
        warm = _warm(logits - peak[..., None], temperature[..., None])
        return Chances(
            logits=logits,
            temperature=temperature,
            least=least,
            peak=peak,
            total=jnp.sum(jnp.where(logits >= least[..., None], jnp.exp(warm), 0.0), -1),
            likeliest=_first_largest(logits),
        )

    @jax.jit
    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draw a token int32 [B] with the probabilities of logits [B, V], with one key per row; -1 if one is NaN.

        The largest of all logits after temperature, each with a Gumbel number of its own added, is a token with its
        probability. Nothing is added up over the vocabulary, and at temperature 0 the same maximum is of logits alone.
        """
        check_array("logits", logits, {"B": None, "V": None}, FLOATS)
        check_keys("keys", keys, logits.shape[:1])
        return self.chances(logits).draw(keys)


@functools.partial(jax.jit, static_argnames="impl")
def _of_numbers(
    temperature: jax.Array,
    top_p: jax.Array,
    least_confidence: jax.Array,
    low: jax.Array,
    high: jax.Array | None,
    *,
    impl: str,
) -> Sampling:
    """Return a sampling of f32 [] each, and the halves of its seed uint32 []: None if it has no upper one."""
    key = jax.random.key(low, impl=impl)
    temperature, top_p, least_confidence = map(jnp.asarray, (temperature, top_p, least_confidence))
    key = key if high is None else jax.random.fold_in(key, high)
    return Sampling(temperature=temperature, top_p=top_p, key=key, least_confidence=least_confidence)


@jax.jit
def of_texts(sampling: Sampling, numbers: jax.Array) -> Sampling:
    """Return how texts draw, [texts], each with a key of its own by its number int32 [texts]."""
    key = jax.vmap(jax.random.fold_in)(jnp.broadcast_to(sampling.key, numbers.shape), numbers)
    return dataclasses.replace(jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, numbers.shape), sampling), key=key)


def check_keys(name: str, keys: jax.Array, shape: tuple[int, ...]) -> None:
    """Require random keys. AssertionError otherwise, for those of ``jax.random.PRNGKey`` too."""
    is_key = hasattr(keys, "dtype") and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not is_key or keys.shape != shape:
        found = f"{keys.dtype.name}{list(keys.shape)}" if hasattr(keys, "dtype") else type(keys).__name__
        raise AssertionError(f"{name}: expected {list(shape)} of jax.random.key, got {found}")


def _least_kept(logits: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """Return the least of logits f32 [..., V] that is kept, f32 [...]; -inf if all are.

    Kept are the likeliest tokens that have ``top_p`` together: those beside which all likelier ones have less than
    that. They are looked for only where it may matter, since that takes longer than all else.
    """
    matters = (top_p < 1) & (temperature > 0)

    def find(_: None) -> jax.Array:
        return jnp.where(matters, _find_least(logits, temperature, top_p), -jnp.inf)

    return lax.cond(jnp.any(matters), find, lambda _: jnp.full_like(temperature, -jnp.inf), None)


def _find_least(logits: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """Find the least probability as a floating-point number, digit by digit.

    It is the largest such that all that are not below it have ``top_p``.
    """
    probabilities = jax.nn.softmax(_warm(logits, temperature[..., None]))
    bits = lax.bitcast_convert_type(probabilities, jnp.int32)  # in the order of the numbers, as none is negative
    least = jnp.zeros(logits.shape[:-1], jnp.int32)
    for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
        digits = lax.broadcasted_iota(jnp.int32, (*least.shape, 1 << _DIGIT), least.ndim)
        tried = least[..., None] + (digits << shift)
        is_above = bits[..., None] >= tried[..., None, :]
        reach = jnp.sum(jnp.where(is_above, probabilities[..., None], 0.0), -2) >= top_p[..., None]
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
        return self._probability(self._logits_of(tokens), tokens)

    def log_probs(self, tokens: jax.Array) -> LogProbs:
        """Return the log-probabilities of a token int32 [...] each."""
        logit = self._logits_of(tokens)
        cold = logit - self.peak
        warm = jnp.where(logit >= self.least, _warm(cold, self.temperature) - jnp.log(self.total), -jnp.inf)
        greedy = jnp.where(tokens == self.likeliest, 0.0, -jnp.inf)
        whole = jnp.sum(jnp.exp(self.logits - self.peak[..., None]), -1)
        return LogProbs(model=cold - jnp.log(whole), sampled=jnp.where(self.temperature == 0, greedy, warm))

    def _logits_of(self, tokens: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self.logits, tokens[..., None], -1)[..., 0]

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
        """Draw a token int32 [B] each, where there are [B, V], with one key per row; -1 if a logit is NaN."""
        noisy = _warm(self.logits, self.temperature[..., None]) + _gumbel(self.logits.shape[-1], keys)
        noisy = jnp.where(self.logits < self.least[..., None], -jnp.inf, noisy)  # NaN stays
        return _first_largest(jnp.where(self.temperature[..., None] == 0, self.logits, noisy))

    def _probability(self, logit: jax.Array, token: jax.Array) -> jax.Array:
        chance = jnp.exp(_warm(logit - self.peak, self.temperature)) / self.total
        drawn = jnp.where(logit >= self.least, chance, 0.0)
        return jnp.where(self.temperature == 0, (token == self.likeliest).astype(jnp.float32), drawn)


class LogProbs(NamedTuple):
    """Log-probabilities of tokens."""

    model: jax.Array  # f32 [...] the model's own: at temperature 1, and of all tokens
    sampled: jax.Array  # f32 [...] with which they are drawn, after temperature and top-p; 0 at temperature 0


def _for_rows(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Give a number [] or [B] of rows their shape [B, ...]."""
    return jnp.broadcast_to(leaf.reshape(*leaf.shape, *(1,) * (len(shape) - leaf.ndim)), shape)


def _warm(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    return logits / jnp.where(temperature == 0, 1.0, temperature)


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
    chance = jax.vmap(lambda key: jax.random.uniform(key, (most,), jnp.float32))(uniform_keys)
    p, q = wanted.of(jnp.pad(drafts, ((0, 0), (0, 1))))[:, :most], guessed.of(drafts)
    good = (chance * q < p) & (jnp.arange(most)[None] < num_drafts[:, None])
    accepted = jnp.sum(jnp.cumprod(good, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)

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
