"""Functions to drive a cache the way a model does, and to compare caches."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from dsv4jax.cache.tables import blocks_for
from dsv4jax.weights.params import param_shapes

# One layer of each kind. HCA blocks are short, so that a short sequence fills several blocks of the pool; the pool then
# holds more entries than the indexer picks. Tests share these shapes, and so share their compiled steps.
CFG = d4.DSV4Config.tiny(compress_ratios=(0, 4, 16), hca_compression_ratio=16)
LAYERS = (0, 1, 2)
CSA_FIRST = (1, 0, 2)  # for first_of: its layers have all that those of other kinds have
REQUESTS, CONTEXT, BLOCKS = 5, 80, 14
BATCH, TOKENS = 4, 8
F32: dict[str, Any] = dict(kv_format="f32", indexer_format="f32")
TRAINED: dict[str, Any] = dict(kv_format="fp8_tile64", indexer_format="mxfp4", hca_tail="online")
DEFAULT: dict[str, Any] = dict(kv_format="fp8_row", indexer_format="nvfp4")  # the defaults otherwise: ring tails in f32
BF16_TAILS = DEFAULT | dict(tail_dtype=jnp.bfloat16)
# Options of plans that together cover every format of rows and keys and every form of tails; and the three that differ
# most.
THREE_FORMATS = {"f32": F32, "fp8_tile64, mxfp4, online": TRAINED, "fp8_row, nvfp4, bf16 tails": BF16_TAILS}
FORMATS = THREE_FORMATS | {"bf16, online": dict(kv_format="bf16", indexer_format="bf16", hca_tail="online")}

TRACES: collections.Counter[str] = collections.Counter()  # number of times that each function below was traced
# The backend of ``step`` where none is named, set by ``with BACKEND(name):``. It is part of jit's cache key.
BACKEND = jax.make_user_context(None)


def small_plan(**options: Any) -> d4.CachePlan:
    """Return a plan for ``CFG`` in f32, with some options changed.

    It has too few blocks for all requests at full length.
    """
    sizes: dict[str, Any] = dict(max_requests=REQUESTS, max_context=CONTEXT, num_blocks=BLOCKS)
    formats: dict[str, Any] = dict(kv_format="f32", indexer_format="f32")
    return d4.plan_cache(CFG, **(sizes | formats | options))


@functools.cache
def random_params(cfg: d4.DSV4Config = CFG, seed: int = 0) -> tuple[Any, ...]:
    """Return random weights of every layer, drawn by NumPy so that nothing is compiled."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        noise = rng.standard_normal(leaf.shape, np.float32)
        if len(leaf.shape) == 1:
            noise = noise * np.float32(0.1) + np.float32("norm" in jax.tree_util.keystr(path))
        else:
            noise = noise * np.float32(leaf.shape[-1] ** -0.5)
        return jax.device_put(noise)  # jnp.asarray would compile a program for each shape

    with jax.ensure_compile_time_eval():  # arrays, not tracers, even if a function that is being traced asks first
        return tuple(
            jax.tree_util.tree_map_with_path(draw, param_shapes(cfg, spec.attn))
            for spec in d4.config.layer_schedule(cfg)
        )


def ids(*values: int) -> jax.Array:
    """Return an int32 vector."""
    return jnp.asarray(values, jnp.int32)


@functools.partial(jax.jit, static_argnames=("layers", "backend"))
def step(params, x, cache, slots, num_new, *, layers=(0,), backend=None):
    """Run prepare_forward, some layers on the same input, and advance. Returns ([y per layer], cache, ok)."""
    TRACES["step"] += 1
    backend = backend or BACKEND.value
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    outputs = []
    for layer in layers:
        y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, backend=backend)
        outputs.append(y)
    return outputs, d4.advance(cache, slots, num_new), ok


def feed(params, xs: Sequence[np.ndarray], cache, slots, splits, *, layers=(0,), width=None, backend=None):
    """Feed sequences xs[b] [T_b, hidden] to slots[b] in chunks. splits[b] are row b's chunk lengths, which may be 0.

    Rows run side by side, padded to ``width`` tokens (the longest chunk by default). Padding is NaN, which must not be
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
        ys, cache, ok = step(params, jax.device_put(x), cache, slots, ids(*num_new), layers=layers, backend=backend)
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
    """Split a length into chunks of ``chunk`` tokens, of which the last may be shorter."""
    return [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])


def random_split(rng: np.random.Generator, length: int, longest: int) -> list[int]:
    """Split a length into random chunks of 1 .. longest tokens."""
    split: list[int] = []
    while sum(split) < length:
        split.append(min(int(rng.integers(1, longest + 1)), length - sum(split)))
    return split


def assert_same(a, b) -> None:
    """Check that two pytrees are equal in every leaf, byte for byte (NaN equals NaN with the same bits)."""
    leaves_a, tree_a = jax.tree_util.tree_flatten_with_path(a)
    leaves_b, tree_b = jax.tree_util.tree_flatten_with_path(b)
    assert tree_a == tree_b
    for (path, x), (_, y) in zip(leaves_a, leaves_b, strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"{name} differs"


def sequence(seed: int, length: int, hidden: int) -> np.ndarray:
    """Return unit normal f32 [length, hidden]."""
    return np.random.default_rng(seed).standard_normal((length, hidden), np.float32)


def contents(cache: d4.KVCache, slot: int, *, used: bool = False) -> dict[str, Any]:
    """Return all that a cache holds of one request, in whichever blocks: NumPy leaves without the requests axis.

    With ``used`` without the blocks that only tokens to come will use.
    """
    tables = jax.tree.map(np.asarray, cache.tables)
    length, count = tables.seq_lens[slot], tables.block_lens[slot]
    if used:
        count = np.minimum(count, np.int32(blocks_for(cache.plan, int(length))))
    blocks = tables.block_table[slot, :count]
    held: dict[str, Any] = {"seq_len": length, "blocks": count}
    for kind in d4.AttentionType:
        if cache.plan.layers(kind):
            stack = cache.stack(kind)
            held[f"{kind} state"] = jax.tree.map(lambda leaf: np.asarray(leaf)[:, slot], stack.state)
            held[f"{kind} pool"] = jax.tree.map(lambda leaf: np.asarray(leaf)[:, blocks], stack.pool)
    return held


def moved_values(a: Any, b: Any, tolerance: float) -> tuple[int, int]:
    """Return how many values of two pytrees differ by more than rounding, and the number of values.

    f32 leaves may differ by ``tolerance``. bfloat16 leaves and whole numbers (stored bytes, positions) must be equal.
    NaN only equals NaN.
    """
    moved = total = 0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        total += x.size
        if x.dtype == np.float32:
            moved += int(np.sum(~np.isclose(x, y, rtol=0, atol=tolerance, equal_nan=True)))
        else:
            moved += int(np.sum(x != y))
    return moved, total


def garbage(cache: d4.KVCache, seed: int = 0) -> d4.KVCache:
    """Return the cache with random bytes in every leaf except the tables."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.Array) -> jax.Array:
        return jax.device_put(np.frombuffer(rng.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape))

    return dataclasses.replace(jax.tree.map(draw, cache), tables=cache.tables)


def poisoned(cache: d4.KVCache) -> d4.KVCache:
    """Return the cache with garbage in every row that holds nothing: NaN, 0xFF, or a plausible wrong number.

    These are: free slots in all layers; window rows without a token; tail rows past the unfinished block's tokens; pool
    rows of free blocks, and rows of a request's blocks that are not filled yet; and the free list past its end.
    """
    tables = jax.tree.map(np.array, cache.tables)
    tables.free_blocks[tables.num_free[0] :] = 3
    held = np.flatnonzero(tables.admitted)

    def spoil(leaf: jax.Array, dead: np.ndarray) -> jax.Array:
        garbage = np.asarray(leaf).copy()
        if garbage.dtype == np.uint8:
            garbage[dead] = 0xFF
        else:
            garbage[dead] = 7 if garbage.dtype == np.int32 else np.nan
        return jax.device_put(garbage)

    def spoil_tail(leaf: jax.Array, ratio: int) -> jax.Array:
        dead = np.broadcast_to(np.arange(ratio) >= (tables.seq_lens % ratio)[:, None], tuple(leaf.shape[:3]))
        return spoil(leaf, dead)

    for kind in d4.AttentionType:
        if not cache.plan.layers(kind):
            continue
        stack, ratio = cache.stack(kind), cache.plan.cfg.ratio(kind)
        layers = stack.state.pos.shape[0]
        free = np.broadcast_to(~tables.admitted, (layers, len(tables.admitted)))
        state = jax.tree.map(lambda leaf, free=free: spoil(leaf, free), stack.state)
        empty = np.asarray(stack.state.pos) == -1
        state = dataclasses.replace(
            state, window=jax.tree.map(lambda leaf, dead=empty: spoil(leaf, dead), state.window)
        )
        for name in ("tail", "indexer_tail"):
            tail = getattr(state, name)
            rows = [field for field in ("ka", "za", "kb_next", "zb_next") if hasattr(tail, field)]
            if rows:
                tail = dataclasses.replace(tail, **{field: spoil_tail(getattr(tail, field), ratio) for field in rows})
                state = dataclasses.replace(state, **{name: tail})
        pool = stack.pool
        if pool is not None:
            layers, blocks, per_block = jax.tree.leaves(pool)[0].shape[:3]
            dead = np.ones((layers, blocks, per_block), bool)
            for slot in held:
                entry = np.arange(tables.seq_lens[slot] // ratio)
                dead[:, tables.block_table[slot, entry // per_block], entry % per_block] = False
            pool = jax.tree.map(lambda leaf, dead=dead: spoil(leaf, dead), pool)
        cache = cache.with_stack(kind, dataclasses.replace(stack, state=state, pool=pool))
    return dataclasses.replace(cache, tables=jax.device_put(tables))
