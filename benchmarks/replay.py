"""How far a pass over a rollout's text is from the rollout, with its choices and without: python -m benchmarks.replay

The rollout stores a prompt in chunks and then draws tokens one by one, as a generator does. Other passes then take the
whole text: ``forward`` in one call, and ``forward_sequences``, which training uses. Weights, activations and cache are
rounded as the published models are: FP8 and FP4 weights, FP8 inputs, bf16 streams, rows of ``fp8_tile64`` and keys of
``mxfp4``. The model of the tests is tiny and random; ``--model`` takes any folder. Prints, of the logits of all tokens,
the root mean square of the difference relative to that of the rollout's, the largest difference, and the mean KL
divergence of the next token's distribution; and how many of the choices of a pass of its own are other ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import dsv4jax as d4
from dsv4jax.model import Choices, ModelParams, forward, forward_sequences, init_caches, load_model

CHUNK = 64
FORMATS: dict[str, Any] = {"kv_format": "fp8_tile64", "indexer_format": "mxfp4"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A text, and what the passes that made it computed for all its tokens but the last, which is never fed."""

    tokens: jax.Array  # int32 [1, n + 1]
    logits: jax.Array  # f32 [n, V]
    choices: Choices


@functools.partial(jax.jit, static_argnames="new")
def roll_out(params: ModelParams, prompt: jax.Array, key: jax.Array, *, new: int) -> Rollout:
    """Store a prompt int32 [1, p] in chunks, and draw ``new`` tokens after it one by one."""
    cache, slots, _ = d4.admit(init_caches(params.cfg, 1, prompt.size + new, **FORMATS).model, 1)

    def feed(cache: d4.KVCache, tokens: jax.Array) -> tuple[d4.KVCache, jax.Array, Choices]:
        count = jnp.full(1, tokens.shape[1], jnp.int32)
        cache, _ = d4.prepare_forward(cache, slots, count)
        logits, _, cache, seen = forward(params, tokens, cache, slots, count, "all", capture=("choices",))
        assert logits is not None
        return d4.advance(cache, slots, count), logits[0], seen["choices"]

    def decode(carry: tuple[d4.KVCache, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        cache, logits, choices = feed(carry[0], carry[1])
        token = jax.random.categorical(key, logits).astype(jnp.int32)[None]
        return (cache, token), (token[0], logits[0], choices)

    parts = []
    for start in range(0, prompt.size, CHUNK):
        cache, *made = feed(cache, prompt[:, start : start + CHUNK])
        parts.append(made)
    keys = jax.random.split(key, new)
    token = jax.random.categorical(keys[0], parts[-1][0][-1:]).astype(jnp.int32)[None]
    _, (drawn, logits, choices) = lax.scan(decode, (cache, token), keys[1:])
    by_token = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, :, :, 0], 0, 2), choices)
    return Rollout(
        tokens=jnp.concatenate([prompt, token, drawn.T], 1),
        logits=jnp.concatenate([*(made[0] for made in parts), logits]),
        choices=Choices.join([*(made[1] for made in parts), by_token]),
    )


@jax.jit
def in_one_call(params: ModelParams, tokens: jax.Array, choices: Choices | None = None) -> tuple[jax.Array, Choices]:
    """Return the logits f32 [n, V] of tokens int32 [1, n] in one call over a cache, and the choices that it uses."""
    count = jnp.full(1, tokens.size, jnp.int32)
    cache, slots, _ = d4.admit(init_caches(params.cfg, 1, tokens.size, **FORMATS).model, 1)
    cache, _ = d4.prepare_forward(cache, slots, count)
    logits, _, _, seen = forward(params, tokens, cache, slots, count, "all", capture=("choices",), choices=choices)
    assert logits is not None
    return logits[0], seen["choices"]


def without_cache(params: ModelParams, tokens: jax.Array, choices: Choices | None = None) -> jax.Array:
    """Return the logits f32 [n, V] of tokens int32 [1, n] as training computes them."""
    return forward_sequences(params, tokens, **FORMATS, choices=choices)[0]


def difference(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float, float]:
    """Return (rms of the difference over that of the wanted logits, the largest, mean KL of the next token)."""
    log_p, log_q = (each - np.log(np.sum(np.exp(each), -1, keepdims=True)) for each in (wanted, found))
    kl = np.mean(np.sum(np.exp(log_p) * (log_p - log_q), -1))
    relative = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    return float(relative), float(np.abs(found - wanted).max()), float(kl)


def share_of_others(own: jax.Array, given: jax.Array) -> float:
    """Return how many of the numbers in the last axis of ``own`` are not in that of ``given``; -1 is none."""
    is_other = (own[..., None] != given[..., None, :]).all(-1) & (own >= 0)
    return float(is_other.sum() / (own >= 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("tests/data/model/q"))
    parser.add_argument("--prompt", type=int, default=192, help="random tokens at the beginning")
    parser.add_argument("--new", type=int, default=64, help="tokens that are drawn from the model")
    parser.add_argument("--rollouts", type=int, default=4)
    args = parser.parse_args()
    params = load_model(args.model, activations="fp8")
    differences: dict[str, list[tuple[float, float, float]]] = {}
    others: list[list[float]] = []
    for number in range(args.rollouts):
        key = jax.random.key(number)
        prompt = jax.random.randint(key, (1, args.prompt), 0, params.cfg.vocab_size, jnp.int32)
        rollout = roll_out(params, prompt, key, new=args.new)
        fed, given = rollout.tokens[:, :-1], rollout.choices
        experts, entries = (dataclasses.replace(given, **{name: None}) for name in ("entries", "experts"))
        own, chosen = in_one_call(params, fed)
        passes = {
            "forward in one call, its own choices": own,
            "forward in one call, the rollout's": in_one_call(params, fed, given)[0],
            "forward_sequences, its own choices": without_cache(params, fed),
            "forward_sequences, the rollout's experts": without_cache(params, fed, experts),
            "forward_sequences, the rollout's entries": without_cache(params, fed, entries),
            "forward_sequences, the rollout's": without_cache(params, fed, given),
        }
        for name, logits in passes.items():
            found = difference(np.asarray(logits, np.float64), np.asarray(rollout.logits, np.float64))
            differences.setdefault(name, []).append(found)
        pairs = (chosen.experts, given.experts), (chosen.entries, given.entries)
        others.append([share_of_others(*map(jnp.asarray, pair)) for pair in pairs])
    print(f"{args.rollouts} rollouts of {args.prompt} + {args.new} tokens, {jax.devices()[0].device_kind}")
    print(f"{'pass':<42} {'rms':>6} {'largest':>8} {'mean KL':>8}")
    for name, found in differences.items():
        relative, largest, kl = zip(*found, strict=True)
        print(f"{name:<42} {np.mean(relative):6.3f} {max(largest):8.1f} {np.mean(kl):8.1e}")
    moved = np.mean(others, 0)
    print(f"{moved[0]:.1%} of its own experts and {moved[1]:.1%} of its entries are others than the rollout's")


if __name__ == "__main__":
    main()
