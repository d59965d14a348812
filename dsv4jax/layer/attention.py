"""Attention of one shared key-value head (K = V) over window and entries, with a sink per head.

    out_h = sum over keys of exp(l) k / (sum of exp(l) + exp(sink_h)),      l = q_h . k / sqrt(head_dim)

The keys come in parts (window, picked entries, or tiles of all entries), which are added one after another to a running
softmax. Parts therefore never have to be concatenated in memory. The running softmax starts with the sink, which has a
logit but neither key nor value, so a query without any key gives zero.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dsv4jax.cache.pool import PooledLayer
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.checks import FLOATS, Tree, check_array, check_dtype, known_size
from dsv4jax.indexing import quotient
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.dense import rms_norm
from dsv4jax.layer.ops import DECODE_ATTENTION, AttentionInputs, RowForm
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope, rope_frequencies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunningSoftmax:
    """The state of a softmax-weighted sum over the keys seen so far."""

    peak: jax.Array  # f32 [B, T, H] largest logit
    total: jax.Array  # f32 [B, T, H] sum of exp(l - peak)
    weighted: jax.Array  # f32 [B, T, H, dim] sum of exp(l - peak) * k

    @property
    def output(self) -> jax.Array:
        return self.weighted / self.total[..., None]


def start_at_sinks(sinks: jax.Array, queries: jax.Array) -> RunningSoftmax:
    """Return the state before any key: the sinks [H] count in the denominator only."""
    peak = jnp.broadcast_to(sinks.astype(jnp.float32), queries.shape[:3])
    return RunningSoftmax(peak=peak, total=jnp.ones_like(peak), weighted=jnp.zeros_like(queries))


def attend(running: RunningSoftmax, queries: jax.Array, keys: jax.Array, mask: jax.Array) -> RunningSoftmax:
    """Add keys to a running softmax.

    Args:
      running: the state so far.
      queries: f32 [B, T, H, dim].
      keys: f32 [B, K, dim] if all queries of a request share them, or [B, T, K, dim] if each query has its own. Masked
        keys must be finite, because they are multiplied by zero.
      mask: bool [B, T, K], True for keys that the query sees.
    """
    own = "t" if keys.ndim == 4 else ""
    logits = (
        jnp.einsum(f"bthd,b{own}kd->bthk", queries, keys, precision=lax.Precision.HIGHEST) * queries.shape[-1] ** -0.5
    )
    logits = jnp.where(mask[:, :, None], logits, -jnp.inf)
    peak = jnp.maximum(running.peak, jnp.max(logits, axis=-1))
    weight, carried = jnp.exp(logits - peak[..., None]), jnp.exp(running.peak - peak)
    values = jnp.einsum(f"bthk,b{own}kd->bthd", weight, keys, precision=lax.Precision.HIGHEST)
    return RunningSoftmax(
        peak=peak,
        total=running.total * carried + jnp.sum(weight, axis=-1),
        weighted=running.weighted * carried[..., None] + values,
    )


def attend_window(
    running: RunningSoftmax, queries: jax.Array, positions: jax.Array, window: SlidingWindow
) -> RunningSoftmax:
    """Add the sliding windows of queries at positions int32 [B, T], which are consecutive; -1 = padding at the end."""
    tokens, n_win = queries.shape[1], window.plan.cfg.sliding_window
    key = positions[:, :1] + jnp.arange(1 - n_win, tokens, dtype=jnp.int32)[None]
    # The row of a padding token may contain NaN, so it is not read.
    key = jnp.where(key <= jnp.max(positions, axis=1, keepdims=True), key, -1)
    rows, held = window.rows(key)
    age = positions[:, :, None] - key[:, None]
    return attend(running, queries, rows, held[:, None] & (age >= 0) & (age < n_win))


def attend_block(running: RunningSoftmax, inputs: AttentionInputs) -> RunningSoftmax:
    """Add the rows of a block for each of its queries, and the window before them."""
    assert inputs.block is not None
    q, window = inputs.q.astype(jnp.float32), inputs.window
    kept, of_kept = window.newest(window.start)
    rows, real = window.plan.rows.decode(inputs.block), inputs.positions >= 0
    keys = jnp.concatenate([kept, jnp.where(real[..., None], rows, 0.0)], axis=1)
    seen = jnp.concatenate([of_kept >= 0, real], axis=1)[:, None] & real[..., None]
    return attend(running, q, keys, seen)


def attend_picked(running: RunningSoftmax, queries: jax.Array, layer: PooledLayer, picks: jax.Array) -> RunningSoftmax:
    """Add the picked entries of each query, int32 [B, T, k]; -1 = none."""
    return attend(running, queries, layer.rows(picks), picks >= 0)


def attend_all(running: RunningSoftmax, queries: jax.Array, layer: PooledLayer, visible: jax.Array) -> RunningSoftmax:
    """Add the first visible[b, t] entries for each query; ``visible`` is int32 [B, T]."""
    return _attend_all(running, queries, layer, visible)


def _fold_all(
    running: RunningSoftmax, queries: jax.Array, layer: PooledLayer, visible: jax.Array, *, to_the_end: bool = False
) -> RunningSoftmax:
    def fold(running: RunningSoftmax, _: jax.Array | int, entry: jax.Array, seen: jax.Array) -> RunningSoftmax:
        return attend(running, queries, layer.rows(entry), seen)

    batch, tokens, heads, _ = queries.shape
    tile = layer.tile_size(known_size(batch, layer.plan.max_requests) * tokens * heads * 4)
    return layer.fold_tiles(visible, tile, fold, running, to_the_end=to_the_end)


_attend_all = jax.custom_jvp(_fold_all)


@_attend_all.defjvp
def _(primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> Tree:
    """Over all tiles: reverse mode keeps something of each, and so must know their number."""
    return jax.jvp(functools.partial(_fold_all, to_the_end=True), primals, tangents)


def attention_queries(
    product: jax.Array,
    positions: jax.Array,
    freqs: np.ndarray,
    plan: CachePlan,
    backend: str = XLA,
    needed: jax.Array | None = None,
) -> jax.Array:
    """Apply norm and rope to the product of W_qb, f32 [B, T, H, head_dim].

    ``needed`` bool [B, T] says which queries anyone reads, None for all; others may be anything.

    Returns:
      f32 of that shape, or f16 if the backend's kernel expects it.
    """
    return DECODE_ATTENTION[backend].queries(product, positions, freqs, plan, needed)


def decode_attention(
    q: jax.Array,
    positions: jax.Array,
    sinks: jax.Array,
    window: SlidingWindow,
    entries: PooledLayer | None = None,
    picks: jax.Array | None = None,
    *,
    kind: AttentionType | str,
    dtype: DTypeLike = jnp.float32,
    backend: Backend = None,
) -> jax.Array:
    """Compute attention of new tokens over the window and compressed entries, followed by the inverse rope.

    Args:
      q: f32 or f16 [B, T, H, head_dim], after norm and rope. The kernel rounds f32 to f16.
      positions: int32 [B, T], consecutive in each row; -1 = padding, after the row's tokens.
      sinks: f32 or bf16 [H].
      window: the sliding windows. With one token per row, the token's own row may already be stored. With more, the
        tokens' rows must be given as ``window.fresh``.
      entries: the entries, for layers that compress. Entries that these tokens complete must already be stored.
      picks: int32 [B, T, K], the entries that each query reads, -1 = none, from ``select_entries``. None means all that
        are visible: the first floor((p + 1) / ratio) for a query at p.
      kind: of the layer.
      dtype: of the result, f32 or bf16.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      dtype [B, T, H, head_dim], 0 on padding.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: entries or picks belong to another kind of layer, there are several tokens but no ``fresh`` rows, or
        the backend is unknown.
    """
    kind, plan = AttentionType(kind), window.plan
    check_dtype("dtype", dtype, FLOATS)
    inputs = attention_inputs(q, positions, sinks, window, entries, picks, kind)
    rows = DECODE_ATTENTION.of(backend, plan, kind).attend(inputs, rope_frequencies(plan.cfg, kind), dtype)
    assert isinstance(rows, jax.Array), "in the plain form"
    return rows


def attention_inputs(
    q: jax.Array,
    positions: jax.Array,
    sinks: jax.Array,
    window: SlidingWindow,
    entries: PooledLayer | None,
    picks: jax.Array | None,
    kind: AttentionType,
) -> AttentionInputs:
    """Check and return the inputs of attention, which are those of ``decode_attention``."""
    cfg = window.plan.cfg
    axes = {"B": None, "T": None, "num_heads": cfg.num_heads, "head_dim": cfg.head_dim}
    check_array("q", q, axes, (jnp.float32, jnp.float16))
    check_array("positions", positions, {"B": q.shape[0], "T": q.shape[1]}, jnp.int32)
    check_array("sinks", sinks, {"num_heads": cfg.num_heads}, FLOATS)
    _check_window(window, q.shape[0], q.shape[1])
    if picks is not None:
        check_array("picks", picks, {"B": q.shape[0], "T": q.shape[1], "K": None}, jnp.int32)
    if (entries is None) == kind.compresses or (entries is None and picks is not None):
        raise ValueError(f"entries and picks are for layers that compress; this one is {kind.upper()}")
    if entries is not None:
        check_array("entries.slots", entries.slots, {"B": q.shape[0]}, jnp.int32)
        if (entries.pool.indexer_keys is not None) != kind.is_indexed:
            raise ValueError(f"entries: expected those of {kind.upper()} layers; CSA's alone have indexer keys")
    return AttentionInputs(
        q=q,
        positions=positions,
        sinks=sinks,
        window=window,
        entries=entries,
        picks=picks,
        visible=quotient(positions + 1, cfg.ratio(kind)) if kind.compresses else None,
    )


def _check_window(window: SlidingWindow, batch: int, tokens: int) -> None:
    """Check that the windows belong to this batch, and have fresh rows if there are several tokens."""
    check_array("window.slots", window.slots, {"B": batch}, jnp.int32)
    check_array("window.start", window.start, {"B": batch}, jnp.int32)
    if window.exact is not None:
        axes: dict[str, int | None] = {"B": batch, "F": None, "head_dim": window.plan.cfg.head_dim}
        check_array("window.exact", window.exact, axes, jnp.float32)
    if window.fresh is None:
        if tokens > 1:
            raise ValueError(f"window: {tokens} tokens need fresh rows: late ones overwrite what early ones see")
        return
    count = window.fresh.nope.shape[1]
    row = jax.tree.leaves(window.plan.row_spec)
    for (path, leaf), of in zip(jax.tree.leaves_with_path(window.fresh), row, strict=True):
        axes = {"B": batch, "F": count} | {f"axis {i}": n for i, n in enumerate(of.shape)}
        check_array(f"window.fresh{jax.tree_util.keystr(path)}", leaf, axes, of.dtype)
    if count < tokens:
        raise ValueError(f"window: expected at least {tokens} fresh rows a request, one per token, got {count}")


class XLADecodeAttention(Anywhere):
    """Attention in plain JAX: the reference for the kernel."""

    forms = ("plain",)
    query_dtype = jnp.float32
    tile_bytes = 96 << 20

    def token_bytes(self, plan: CachePlan, kind: AttentionType) -> int:
        """Queries, running sum and output; with an indexer its scores, and the picked entries as rows in memory."""
        cfg = plan.cfg
        size = 4 * 3 * cfg.num_heads * cfg.head_dim
        if kind.is_indexed:
            entries = plan.max_blocks * plan.entries_per_block(kind)
            size += 4 * (2 * entries + cfg.indexer_heads * cfg.indexer_head_dim)
            size += 4 * min(cfg.indexer_top_k, entries) * (cfg.head_dim + cfg.num_heads)
        return size

    def queries(
        self,
        product: jax.Array,
        positions: jax.Array,
        freqs: np.ndarray,
        plan: CachePlan,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        return apply_rope(rms_norm(product, None, plan.cfg.norm_eps), positions[..., None], freqs)

    def attend(
        self,
        inputs: AttentionInputs,
        freqs: np.ndarray,
        dtype: DTypeLike,
        needed: jax.Array | None = None,
        form: RowForm = "plain",
    ) -> jax.Array:
        assert form in self.forms, "other forms are for kernels"
        q = inputs.q.astype(jnp.float32)
        running = start_at_sinks(inputs.sinks, q)
        if inputs.block is not None:
            running = attend_block(running, inputs)
        else:
            running = attend_window(running, q, inputs.positions, inputs.window)
        if inputs.entries is not None:
            assert inputs.visible is not None
            if inputs.picks is None:
                running = attend_all(running, q, inputs.entries, inputs.visible)
            else:
                running = attend_picked(running, q, inputs.entries, inputs.picks)
        return apply_rope(running.output, inputs.positions[..., None], freqs, inverse=True).astype(dtype)


DECODE_ATTENTION.register(XLA, XLADecodeAttention())
