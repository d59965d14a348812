"""Cases of decode attention: ragged batches over a permuted, poisoned cache, and expected outputs from NumPy in f64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.formats import KV_FORMATS
from pallas_kernels.attention import sm90
from pallas_kernels.attention.call import decode_attention
from pallas_kernels.attention.inputs import AttentionInputs
from pallas_kernels.attention.layout import AttentionLayout

DIM, ROPE = 512, 64
ONE_BLOCK = sm90.Layout()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch over a permuted, poisoned cache."""

    lengths: tuple[int, ...]  # tokens that each request has stored before the call; -1 = a padding row
    tokens: int = 1
    entries: str | None = "picked"  # "picked" or "all"; None without entries
    top_k: int = 64
    ratio: int = 4
    per_block: int = 32
    n_win: int = 128
    heads: int = 64
    kv_format: str = "fp8_row"
    q_dtype: Any = jnp.float16
    dtype: Any = jnp.float32
    turned: bool = True
    layout: AttentionLayout | None = ONE_BLOCK
    broken: int | None = None  # a request whose queries are NaN
    seed: int = 0


def poisoned(leaf: np.ndarray) -> np.ndarray:
    """Fill with NaN of any dtype: bytes of 0xFF are NaN in E4M3, UE8M0, bf16 and f32."""
    return np.full(leaf.shape, 0xFF, np.uint8).repeat(leaf.dtype.itemsize, -1).view(leaf.dtype).reshape(leaf.shape)


def encode(rng: np.random.Generator, kv_format: str, count: int) -> tuple[Any, np.ndarray]:
    """Return random rows as stored, and the values that they decode to."""
    shape = (-(-count // 512) * 512,)  # so that there are few shapes to compile for
    x = rng.standard_normal((*shape, DIM)).astype(np.float32) * np.exp(rng.uniform(-3, 1, (*shape, 1))).astype(
        np.float32
    )
    rows, values = _stored(jnp.asarray(x), kv_format)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], rows), np.asarray(values)[:count]


@functools.partial(jax.jit, static_argnums=1)
def _stored(x: jax.Array, kv_format: str) -> tuple[Any, jax.Array]:
    form = KV_FORMATS[kv_format]
    rows = form.encode(x, ROPE)
    return rows, form.decode(rows)


def place(store: Any, at: tuple[Any, ...], rows: Any) -> None:
    for leaf, value in zip(jax.tree.leaves(store), jax.tree.leaves(rows), strict=True):
        leaf[at] = value


def make(case: Case) -> tuple[Any, np.ndarray]:
    """Return what the kernel reads, and the expected output, f64."""
    rng = np.random.default_rng(case.seed)
    batch, tokens, layers, requests = len(case.lengths), case.tokens, 2, len(case.lengths) + 2
    layer, slots = 1, rng.permutation(requests)[:batch].astype(np.int32)
    row, _ = encode(rng, case.kv_format, 1)

    def store(*lead: int) -> Any:
        return jax.tree.map(lambda leaf: poisoned(np.empty((*lead, *leaf.shape[1:]), leaf.dtype)), row)

    most = max(case.lengths) + tokens
    max_blocks = max(1, -(-most // (case.ratio * case.per_block)))
    num_blocks = batch * max_blocks + 3
    table = np.full((requests, max_blocks), -1, np.int32)
    free = list(rng.permutation(num_blocks))
    window, pos = store(layers, requests, case.n_win), np.full((layers, requests, case.n_win), -1, np.int32)
    pool = store(layers, num_blocks, case.per_block)
    fresh = store(batch, tokens) if tokens > 1 else None
    q = rng.standard_normal((batch, tokens, case.heads, DIM)).astype(np.float32) * 2
    q = q.astype(case.q_dtype)
    sinks = rng.standard_normal(case.heads).astype(np.float32)
    positions = np.full((batch, tokens), -1, np.int32)
    visible, start = np.zeros((batch, tokens), np.int32), np.zeros(batch, np.int32)
    picks = np.full((batch, tokens, case.top_k), -1, np.int32)
    angles = rng.uniform(-3, 3, (batch, tokens, ROPE // 2))
    expected = np.zeros((batch, tokens, case.heads, DIM))
    for b, length in enumerate(case.lengths):
        if length < 0:
            slots[b] = -1
            continue
        held = length + 1 if tokens == 1 else length  # a single token is stored before it attends
        start[b] = held
        tokens_here = encode(rng, case.kv_format, length + tokens)
        for p in range(max(0, held - case.n_win), held):
            one = jax.tree.map(lambda leaf, p=p: leaf[p], tokens_here[0])
            place(window, (layer, slots[b], p % case.n_win), one)
            pos[layer, slots[b], p % case.n_win] = p
        if fresh is not None:
            place(fresh, (b,), jax.tree.map(lambda leaf, first=length: leaf[first:], tokens_here[0]))
        count = (length + tokens) // case.ratio
        rows, decoded = encode(rng, case.kv_format, max(count, 1))
        for first in range(0, count, case.per_block):
            block = free.pop()
            table[slots[b], first // case.per_block] = block
            some = slice(first, min(first + case.per_block, count))
            held = slice(0, some.stop - first)
            place(pool, (layer, block, held), jax.tree.map(lambda leaf, some=some: leaf[some], rows))
        real = tokens if b % 2 == 0 else max(1, tokens - 1)
        for t in range(real):
            p = length + t
            positions[b, t], visible[b, t] = p, (p + 1) // case.ratio
            chosen = rng.permutation(visible[b, t])[: case.top_k]
            if case.entries == "picked":
                at = rng.permutation(case.top_k)[: len(chosen)]
                picks[b, t, at] = chosen
            else:
                chosen = np.arange(visible[b, t])
            keys = tokens_here[1][max(0, p - case.n_win + 1) : p + 1]
            if case.entries is not None:
                keys = np.concatenate([keys, decoded[chosen]])
            keys = keys.astype(np.float64)
            logits = q[b, t].astype(np.float64) @ keys.T * DIM**-0.5
            top = np.maximum(logits.max(-1), sinks)
            weights = np.exp(logits - top[:, None])
            out = weights @ keys / (weights.sum(-1) + np.exp(sinks - top))[:, None]
            if case.turned:
                even, odd = out[:, -ROPE::2].copy(), out[:, -ROPE + 1 :: 2].copy()
                cos, sin = np.cos(angles[b, t]), np.sin(angles[b, t])
                out[:, -ROPE::2], out[:, -ROPE + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
            expected[b, t] = out
    if case.broken is not None:
        q[case.broken], expected[case.broken] = np.nan, np.nan
    has_entries = case.entries is not None
    inputs = AttentionInputs(
        q=q,
        window=window,
        pos=pos,
        fresh=fresh,
        entries=pool if has_entries else None,
        picks=picks if case.entries == "picked" else None,
        block_table=table if has_entries else None,
        slots=slots,
        start=start,
        positions=positions,
        visible=visible if has_entries else None,
        sinks=sinks,
        angles=np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32) if case.turned else None,
        layer=np.full(1, layer, np.int32),
    )
    return jax.device_put(inputs), expected  # jnp.asarray would compile a program for each shape


def run(case: Case, inputs: AttentionInputs, *, simulate: bool) -> np.ndarray:
    @jax.jit
    def attend(inputs: AttentionInputs) -> jax.Array:
        return decode_attention(
            inputs, kv_format=case.kv_format, dtype=case.dtype, layout=case.layout, simulate=simulate
        )

    return np.asarray(attend(inputs)).astype(np.float64)


def check(case: Case, *, simulate: bool) -> None:
    inputs, expected = make(case)
    found, broken = run(case, inputs, simulate=simulate), np.isnan(expected)
    assert np.isnan(found[broken]).all()
    found, expected = np.where(broken, 0, found), np.where(broken, 0, expected)
    # Queries, weights and rows are rounded to f16, 2^-11 each, which gives an error below 2^-9 of a row's largest
    # value. bf16 rounds the result by 2^-9 of itself.
    scale = np.abs(expected).max(-1, keepdims=True)
    limit = 2.0**-9 * scale
    if case.dtype == jnp.bfloat16:
        limit = limit + 2.0**-8 * np.abs(expected)
    assert np.isfinite(found).all()
    assert np.max(np.abs(found - expected) - limit) <= 0
    real = scale[..., 0] > 0
    a, b = found[real], expected[real]
    cosine = np.sum(a * b, -1) / np.sqrt(np.sum(a * a, -1) * np.sum(b * b, -1))
    assert np.max(1 - cosine, initial=0) < 1e-5
