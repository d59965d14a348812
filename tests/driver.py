"""Drive a cache the way a model does, and compare caches."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4


def ids(*values: int) -> jax.Array:
    """int32 vector."""
    return jnp.asarray(values, jnp.int32)


@functools.partial(jax.jit, static_argnames=("layers", "backend"))
def step(params, x, cache, slots, num_new, *, layers=(0,), backend=None):
    """prepare_forward, some layers on the same input, advance. Returns ([y per layer], cache, ok)."""
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    outputs = []
    for layer in layers:
        y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, backend=backend)
        outputs.append(y)
    return outputs, d4.advance(cache, slots, num_new), ok


def feed(params, xs: Sequence[np.ndarray], cache, slots, splits, *, layers=(0,), width=None, backend=None):
    """Feed sequences xs[b] [T_b, hidden] to slots[b] in chunks; splits[b] are the chunk lengths of row b, 0 allowed.

    Rows run side by side, padded to ``width`` tokens (the longest chunk by default); padding is NaN, which nothing may
    read. Returns (outputs [layer][b] f32 [T_b, hidden], cache).
    """
    batch, hidden = len(xs), xs[0].shape[-1]
    width = width or max(max(s) for s in splits)
    steps = max(len(s) for s in splits)
    done = [0] * batch
    outputs = [[[] for _ in range(batch)] for _ in layers]
    for i in range(steps):
        num_new = [s[i] if i < len(s) else 0 for s in splits]
        x = np.full((batch, width, hidden), np.nan, xs[0].dtype)
        for b, n in enumerate(num_new):
            x[b, :n] = xs[b][done[b] : done[b] + n]
        ys, cache, ok = step(params, jnp.asarray(x), cache, slots, ids(*num_new), layers=layers, backend=backend)
        assert bool(ok)
        for layer, y in enumerate(ys):
            y = np.asarray(y)
            for b, n in enumerate(num_new):
                outputs[layer][b].append(y[b, :n])
                assert not y[b, n:].any(), "padding tokens must give 0"
        done = [d + n for d, n in zip(done, num_new, strict=True)]
    assert done == [len(x) for x in xs]
    return [[np.concatenate(parts) for parts in rows] for rows in outputs], cache


def even_split(length: int, chunk: int) -> list[int]:
    """length as chunks of ``chunk`` tokens, the last one shorter."""
    return [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])


def random_split(rng: np.random.Generator, length: int, longest: int) -> list[int]:
    """length as random chunks of 1 .. longest tokens."""
    split: list[int] = []
    while sum(split) < length:
        split.append(min(int(rng.integers(1, longest + 1)), length - sum(split)))
    return split


def assert_same(a, b) -> None:
    """Two pytrees agree in every leaf, byte for byte (NaN equals NaN of the same bits)."""
    leaves_a, tree_a = jax.tree_util.tree_flatten_with_path(a)
    leaves_b, tree_b = jax.tree_util.tree_flatten_with_path(b)
    assert tree_a == tree_b
    for (path, x), (_, y) in zip(leaves_a, leaves_b, strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"{name} differs"


def sequence(seed: int, length: int, hidden: int) -> np.ndarray:
    """f32 [length, hidden], unit normal."""
    return np.random.default_rng(seed).standard_normal((length, hidden), np.float32)
