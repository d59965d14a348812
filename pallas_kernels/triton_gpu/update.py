"""The cache update of one layer, in place: one launch for a layer without a compressor, two for the others.

The arguments and results are those of ``pallas_kernels.update``: what it calls a page is a block of the pool here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KVRows
from pallas_kernels.trees import Tree
from pallas_kernels.triton_gpu import pool, store
from pallas_kernels.triton_gpu.launch import Config, launch, update
from pallas_kernels.triton_gpu.operands import (
    Batch,
    Both,
    CSATail,
    Formats,
    Keys,
    OnlineTail,
    Operand,
    Paging,
    Pooled,
    RingTail,
    Rows,
    Streams,
    Tokens,
    UpdateSizes,
    Window,
    next_power_of_2,
)
from pallas_kernels.update.batch import NewEntries, NewTokens, Pool, Stack, State

KV_FORMATS, KEY_FORMATS = ("f32", "bf16", "fp8_row", "fp8_tile64"), ("f32", "bf16", "nvfp4", "mxfp4")
MAX_HEAD_DIM = 1024  # a block holds a row
_POOLED_CHANNELS = 128  # of an HCA entry, by one block


def unsupported(
    *, kv_format: str, key_format: str, nope_dim: int, rope_dim: int, csa_ratio: int | None, key_dim: int | None
) -> str | None:
    """Return why these kernels do not support a layer, or None if they do.

    ``csa_ratio`` and ``key_dim`` are None except for CSA.
    """
    if kv_format not in KV_FORMATS or key_format not in KEY_FORMATS:
        return f"no kernel for {kv_format=} with {key_format=}; known are {KV_FORMATS} and {KEY_FORMATS}"
    if nope_dim % 2 or rope_dim % 2:
        return f"NoPE and RoPE dims must be even, got {nope_dim} and {rope_dim}"
    if kv_format == "fp8_tile64" and nope_dim % 64:
        return f"fp8_tile64: the NoPE dim must be divisible by 64, got {nope_dim}"
    if nope_dim + rope_dim > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, got {nope_dim + rope_dim}"
    if csa_ratio is not None and csa_ratio > 16:
        return f"CSA ratio must be at most 16, got {csa_ratio}"
    if key_dim is not None and (key_dim & (key_dim - 1) or not 32 <= key_dim <= 256):
        return f"indexer_head_dim must be a power of two in [32, 256], got {key_dim}"
    return None


def append_chunk[Layers: Stack[jax.Array]](
    stack: Layers,
    tokens: NewTokens[jax.Array],
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    keep_tails: bool = False,
) -> Layers:
    """Run the cache update of one layer for T tokens per request, of which ``num_new`` are real.

    Args:
      stack: all layers of a kind: ``state`` (``window``, ``pos``, ``tail``, ``indexer_tail``), and ``pool``
        (``entries``, ``indexer_keys``) or None. Updated in place if the caller's jit donates it.
      tokens: the new tokens. If ``kv`` is None the window is not changed; if ``entry`` is None tails and pool are not.
      kv_format, key_format: of the stored rows.
      ratio: tokens per entry; None for SWA.
      eps: of the norms.
      keep_tails: write entries, but do not change the tails.

    Returns:
      The updated stack. The stored bytes are those of the XLA form, except that sums over an entry's tokens may be
      rounded differently.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernels do not support these sizes or formats.
    """
    key_dim = 0 if tokens.key is None else tokens.key.norm.shape[0]
    formats = _formats(stack.state.window, kv_format, key_dim, key_format)
    reason = unsupported(
        kv_format=kv_format,
        key_format=key_format,
        nope_dim=formats.nope_dim,
        rope_dim=formats.rope_dim,
        csa_ratio=ratio if tokens.key is not None else None,
        key_dim=key_dim or None,
    )
    if reason is not None:
        raise ValueError(reason)
    batch, num_tokens = _check(tokens, formats)
    if not batch or (tokens.kv is None and tokens.entry is None):
        return stack
    _, requests, n_win = stack.state.pos.shape
    sizes = UpdateSizes(tokens=num_tokens, requests=requests, n_win=n_win, eps=eps)
    if tokens.entry is None:
        return _store_swa(stack, _given(tokens), sizes, formats)
    if ratio is None or stack.state.tail is None:
        raise ValueError("tokens.entry is for layers with a compressor: this one has no tail or no ratio")
    sizes = dataclasses.replace(sizes, ratio=ratio)
    store_compressed = _store_hca if tokens.key is None else _store_csa
    return store_compressed(stack, _given(tokens), sizes, formats, keep_tails)


def cache_step[Layers: Stack[jax.Array]](stack: Layers, tokens: NewTokens[jax.Array], **options: Any) -> Layers:
    """Run the cache update of one layer for a decode step, with one token per request; see ``append_chunk``."""
    return append_chunk(stack, tokens, **options)


def append_swa[Layers: Stack[jax.Array]](
    stack: Layers,
    layer: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    *,
    kv_format: str,
) -> Layers:
    """Encode key rows f32 [B, T, head_dim] and write the newest n_win of each request into its window, in place."""
    tokens = NewTokens.of_window(layer, kv, slots, start, num_new)
    return append_chunk(stack, tokens, kv_format=kv_format, key_format="f32", ratio=None, eps=0.0)


def flush_entries[Entries: Pool[jax.Array]](
    entries_of: Entries, new: NewEntries[jax.Array], *, kv_format: str, key_format: str
) -> Entries:
    """Encode finished entries, and indexer keys if there are any, and write them into the pool, in place.

    Args:
      entries_of: the pool, with ``entries`` and ``indexer_keys``.
      new: the entries, and where they go.
      kv_format, key_format: of the stored rows.

    Returns:
      The updated pool.
    """
    rows, keys = entries_of.entries, entries_of.indexer_keys
    batch, most, _ = new.entries.shape
    if not batch * most:
        return entries_of
    key_dim = 0 if new.keys is None else new.keys.shape[-1]
    config = Config(
        grid=(batch, most),
        constants=dict(
            most=most,
            formats=_formats(rows, kv_format, key_dim, key_format),
            paging=Paging.of(rows.nope, new.block_table),
        ),
    )
    given = [Batch(new.layer, new.slots, new.first, new.count, new.block_table), Both(new.entries, new.keys)]
    state = Both(Rows.of(rows), None)
    if new.keys is not None:
        assert keys is not None, "indexer keys are given, and the pool has none"
        state = state._replace(key=Keys.of(keys))
    (stored,) = update(store.flush_entries_kernel, config, given, [state])
    return _with_rows(entries_of, stored)


def _formats(rows: KVRows[jax.Array], kv_format: str, key_dim: int, key_format: str) -> Formats:
    nope_dim, rope_dim = rows.nope.shape[-1], rows.rope.shape[-1]
    return Formats(nope_dim=nope_dim, rope_dim=rope_dim, kv_format=kv_format, key_dim=key_dim, key_format=key_format)


def _check(tokens: NewTokens[jax.Array], formats: Formats) -> tuple[int, int]:
    """Check that shapes and dtypes agree. Returns B and T."""
    newest = tokens.kv if tokens.kv is not None else tokens.entry and tokens.entry.k
    assert newest is not None, "neither window rows nor entries are given"
    lead = newest.shape[:2]
    inputs = [tokens.layer, tokens.slots, tokens.start, tokens.num_new]
    chex.assert_shape(inputs, [(1,), lead[:1], lead[:1], lead[:1]])
    chex.assert_type(inputs, jnp.int32)
    if tokens.kv is not None:
        chex.assert_shape(tokens.kv, (*lead, formats.dim))
        chex.assert_type(tokens.kv, jnp.float32)
    count = 1 if tokens.key is None else 2
    for streams, dim in ((tokens.entry, formats.dim), (tokens.key, formats.key_dim)):
        if streams is not None:
            chex.assert_shape([streams.k, streams.z], (*lead, count * dim))
            chex.assert_type([streams.k, streams.z], jnp.float32)
            chex.assert_shape(streams.norm, (dim,))
    batch, count = lead
    return batch, count


def _given(tokens: NewTokens[jax.Array]) -> Tokens:
    entry, key = (given and Streams(given.k, given.z, given.norm) for given in (tokens.entry, tokens.key))
    batch = Batch(tokens.layer, tokens.slots, tokens.start, tokens.num_new, tokens.block_table)
    return Tokens(batch, tokens.kv, entry, key, tokens.rope)


def _window(stack: Stack[jax.Array], tokens: Tokens) -> Window | None:
    """The window that a kernel changes, if it does."""
    return None if tokens.kv is None else Window(Rows.of(stack.state.window), stack.state.pos)


def _replaced[Part](part: Part, **changes: object) -> Part:
    """A part of a stack, which is a dataclass, with other fields."""
    return dataclasses.replace(cast(Any, part), **changes)


def _with[Part](given: Part, stored: Operand) -> Part:
    """A dataclass with the leaves of a named tuple of the same fields; as it is if there is none."""
    return given if stored is None else _replaced(given, **stored._asdict())


def _with_window[Requests: State[jax.Array]](state: Requests, window: Window | None) -> Requests:
    if window is None:
        return state
    return _replaced(state, window=_with(state.window, window.rows), pos=window.pos)


def _with_rows[Entries: Pool[jax.Array]](pool_of: Entries, stored: Both) -> Entries:
    """A pool with these rows, and keys if there are any."""
    entries, keys = _with(pool_of.entries, stored.entry), _with(pool_of.indexer_keys, stored.key)
    return _replaced(pool_of, entries=entries, indexer_keys=keys)


def _fields(tail: Tree) -> dict[str, jax.Array]:
    return {field.name: getattr(tail, field.name) for field in dataclasses.fields(tail)}


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _store_swa[Layers: Stack[jax.Array]](stack: Layers, tokens: Tokens, sizes: UpdateSizes, formats: Formats) -> Layers:
    config = Config(grid=(len(tokens.batch.slots), sizes.window_rows), constants=dict(sizes=sizes, formats=formats))
    (window,) = update(store.cache_step_window, config, [tokens], [_window(stack, tokens)])
    return _replaced(stack, state=_with_window(stack.state, window))


def _store_config(
    rows: KVRows[jax.Array], tokens: Tokens, sizes: UpdateSizes, formats: Formats, entry_units: int
) -> Config:
    """How the second launch of a cache update is launched; ``entry_units`` blocks of each request store entries."""
    window_rows = 0 if tokens.kv is None else sizes.window_rows
    paging = Paging.of(rows.nope, tokens.batch.block_table)
    return Config(
        grid=(len(tokens.batch.slots), entry_units + sizes.tail_units + window_rows),
        constants=dict(sizes=sizes, formats=formats, paging=paging),
    )


def _store_hca[Layers: Stack[jax.Array]](
    stack: Layers, tokens: Tokens, sizes: UpdateSizes, formats: Formats, keep_tails: bool
) -> Layers:
    assert stack.pool is not None
    state, rows, batch = stack.state, stack.pool.entries, len(tokens.batch.slots)
    is_online = hasattr(state.tail, "peak")
    tail = (OnlineTail if is_online else RingTail)(**_fields(state.tail))
    groups = sizes.max_groups if is_online else sizes.max_entries
    most_rows = min(sizes.tokens, sizes.ratio) if is_online else sizes.ratio
    pooling = Config(
        grid=(batch, groups, -(-formats.dim // _POOLED_CHANNELS)),
        constants=dict(
            sizes=sizes, formats=formats, channels=_POOLED_CHANNELS, rows=min(16, next_power_of_2(most_rows))
        ),
    )
    pooled = Pooled(rows=_f32(batch, groups, formats.dim), running=_f32(batch, 3, formats.dim) if is_online else None)
    (pooled,) = launch(pool.cache_step_pool_hca, pooling, [tokens, tail], [pooled])
    tail_units = 1 if is_online else min(sizes.tokens, sizes.ratio)
    sizes = dataclasses.replace(sizes, tail_units=0 if keep_tails else tail_units)
    config = _store_config(rows, tokens, sizes, formats, sizes.max_entries)
    leaves = [_window(stack, tokens), Rows.of(rows), None if keep_tails else tail]
    window, entries, tail = update(store.cache_step_store_hca, config, [tokens, pooled], leaves)
    state = _replaced(_with_window(state, window), tail=_with(state.tail, tail))
    return _replaced(stack, state=state, pool=_with_rows(stack.pool, Both(entries, None)))


def _store_csa[Layers: Stack[jax.Array]](
    stack: Layers, tokens: Tokens, sizes: UpdateSizes, formats: Formats, keep_tails: bool
) -> Layers:
    assert stack.pool is not None
    assert stack.pool.indexer_keys is not None
    state, rows, keys = stack.state, stack.pool.entries, stack.pool.indexer_keys
    batch, groups = len(tokens.batch.slots), sizes.max_entries
    tails = Both(CSATail(**_fields(state.tail)), CSATail(**_fields(state.indexer_tail)))
    pooling = Config(grid=(batch, groups, 2), constants=dict(sizes=sizes, formats=formats))
    pooled = Both(_f32(batch, groups, formats.dim), _f32(batch, groups, formats.key_dim))
    (pooled,) = launch(pool.cache_step_pool_csa, pooling, [tokens, tails], [pooled])
    sizes = dataclasses.replace(sizes, tail_units=0 if keep_tails else 2)
    config = _store_config(rows, tokens, sizes, formats, 2 * groups)
    leaves = [_window(stack, tokens), Both(Rows.of(rows), Keys.of(keys)), None if keep_tails else tails]
    window, stored, tails = update(store.cache_step_store_csa, config, [tokens, pooled], leaves)
    state = _with_window(state, window)
    if tails is not None:
        tail, indexer_tail = _with(state.tail, tails.entry), _with(state.indexer_tail, tails.key)
        state = _replaced(state, tail=tail, indexer_tail=indexer_tail)
    return _replaced(stack, state=state, pool=_with_rows(stack.pool, stored))
