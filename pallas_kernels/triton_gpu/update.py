"""The cache update of one layer, in place: one launch for a layer without a compressor, two for the others.

The arguments and results are those of ``pallas_kernels.update``: what it calls a page is a block of the pool here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from triton import next_power_of_2

from pallas_kernels.triton_gpu import pool, store
from pallas_kernels.triton_gpu.launch import Config, launch, update
from pallas_kernels.update.batch import NewEntries, NewTokens, Streams

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


def append_chunk(
    stack: Any,
    tokens: NewTokens,
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    keep_tails: bool = False,
) -> Any:
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
    window, call = stack.state.window, _Call.of(stack, tokens, kv_format)
    reason = unsupported(
        kv_format=kv_format,
        key_format=key_format,
        nope_dim=window.nope.shape[-1],
        rope_dim=window.rope.shape[-1],
        csa_ratio=ratio if tokens.key is not None else None,
        key_dim=None if tokens.key is None else tokens.key.norm.shape[0],
    )
    if reason is not None:
        raise ValueError(reason)
    if not call.batch or (tokens.kv is None and tokens.entry is None):
        return stack
    if tokens.entry is None:
        return _with_window(stack, _append_rows(stack, tokens, call))
    if ratio is None or stack.state.tail is None:
        raise ValueError("tokens.entry is for layers with a compressor: this one has no tail or no ratio")
    _check_streams(tokens.entry, call, call.dim, 1 if tokens.key is None else 2)
    if tokens.key is None:
        return _store_hca(stack, tokens, call, ratio, eps, keep_tails)
    return _store_csa(stack, tokens, call, ratio, eps, keep_tails, key_format)


def cache_step(stack: Any, tokens: NewTokens, **options: Any) -> Any:
    """Run the cache update of one layer for a decode step, with one token per request; see ``append_chunk``."""
    return append_chunk(stack, tokens, **options)


def append_swa(
    stack: Any,
    layer: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    *,
    kv_format: str,
) -> Any:
    """Encode key rows f32 [B, T, head_dim] and write the newest n_win of each request into its window, in place."""
    tokens = NewTokens.of_window(layer, kv, slots, start, num_new)
    return append_chunk(stack, tokens, kv_format=kv_format, key_format="f32", ratio=None, eps=0.0)


def flush_entries(entries_of: Any, new: NewEntries, *, kv_format: str, key_format: str) -> Any:
    """Encode finished entries, and indexer keys if there are any, and write them into the pool, in place.

    Args:
      entries_of: the pool, with ``entries`` and ``indexer_keys``.
      new: the entries, and where they go.
      kv_format, key_format: of the stored rows.

    Returns:
      The updated pool.
    """
    rows, keys = entries_of.entries, entries_of.indexer_keys
    batch, count, dim = new.entries.shape
    if not batch * count:
        return entries_of
    given = [new.layer, new.slots, new.first, new.count, new.block_table, new.entries]
    given.append(new.layer if new.keys is None else new.keys)
    state = [rows.nope, rows.rope, rows.scale, *((None, None) if new.keys is None else (keys.codes, keys.scale))]
    config = Config(
        grid=(batch, count),
        constants=dict(
            entries=count,
            requests=new.block_table.shape[0],
            **_pool_sizes(rows, new.block_table),
            nope_dim=rows.nope.shape[-1],
            rope_dim=rows.rope.shape[-1],
            key_dim=0 if new.keys is None else new.keys.shape[-1],
            size=next_power_of_2(dim),
            kv_format=kv_format,
            key_format=key_format,
        ),
    )
    *stored, codes, scale = update(store.flush_entries_kernel, config, given, state)
    rows = dataclasses.replace(rows, **dict(zip(("nope", "rope", "scale"), stored, strict=True)))
    if new.keys is not None:
        keys = dataclasses.replace(keys, codes=codes, scale=scale)
    return dataclasses.replace(entries_of, entries=rows, indexer_keys=keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What all kernels of an update are given."""

    batch: int
    inputs: list[jax.Array]  # layer, slots, start, num_new
    window: list[jax.Array | None]  # nope, rope, scale, pos
    rows: int  # window rows of a request that the tokens fill; 0 without ``kv``
    dim: int
    sizes: dict[str, Any]  # constants of every kernel that stores

    @classmethod
    def of(cls, stack: Any, tokens: NewTokens, kv_format: str) -> _Call:
        rows, pos = stack.state.window, stack.state.pos
        newest = tokens.kv if tokens.kv is not None else tokens.entry and tokens.entry.k
        assert newest is not None, "neither window rows nor entries are given"
        batch, num_tokens = newest.shape[:2]
        nope_dim, rope_dim, n_win = rows.nope.shape[-1], rows.rope.shape[-1], pos.shape[2]
        dim, inputs = nope_dim + rope_dim, [tokens.layer, tokens.slots, tokens.start, tokens.num_new]
        chex.assert_shape(inputs, [(1,), (batch,), (batch,), (batch,)])
        chex.assert_type(inputs, jnp.int32)
        if tokens.kv is not None:
            chex.assert_shape(tokens.kv, (batch, num_tokens, dim))
            chex.assert_type(tokens.kv, jnp.float32)
        sizes = dict(
            tokens=num_tokens,
            requests=pos.shape[1],
            n_win=n_win,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            size=next_power_of_2(dim),
            kv_format=kv_format,
        )
        return cls(
            batch=batch,
            inputs=inputs,
            window=[rows.nope, rows.rope, rows.scale, pos],
            rows=0 if tokens.kv is None else min(num_tokens, n_win),
            dim=dim,
            sizes=sizes,
        )

    @property
    def tokens(self) -> int:
        return self.sizes["tokens"]

    def touched(self, ratio: int) -> int:
        """The largest number of groups that a request's tokens can touch."""
        return (self.tokens + 2 * ratio - 2) // ratio

    def completed(self, ratio: int) -> int:
        """The largest number of groups that they can complete."""
        return (self.tokens + ratio - 1) // ratio


def _pool_sizes(rows: Any, block_table: jax.Array) -> dict[str, int]:
    _, num_blocks, per_block = rows.nope.shape[:3]
    return dict(max_blocks=block_table.shape[1], num_blocks=num_blocks, per_block=per_block)


def _check_streams(streams: Streams, call: _Call, dim: int, count: int) -> None:
    chex.assert_shape([streams.k, streams.z], (call.batch, call.tokens, count * dim))
    chex.assert_type([streams.k, streams.z], jnp.float32)
    chex.assert_shape(streams.norm, (dim,))


def _changed(
    kernel: Any, config: Config, inputs: list[jax.Array], leaves: list[jax.Array | None], kept: list[int]
) -> list[jax.Array | None]:
    """``update`` of leaves, except for those whose numbers are ``kept``. These the kernel neither reads nor writes."""
    given = [None if i in kept else leaf for i, leaf in enumerate(leaves)]
    updated = update(kernel, config, inputs, given)
    return [leaf if new is None else new for leaf, new in zip(leaves, updated, strict=True)]


def _with_window(stack: Any, leaves: list[Any]) -> Any:
    nope, rope, scale, pos = leaves
    window = dataclasses.replace(stack.state.window, nope=nope, rope=rope, scale=scale)
    return dataclasses.replace(stack, state=dataclasses.replace(stack.state, window=window, pos=pos))


def _with_entries(stack: Any, leaves: list[Any]) -> Any:
    nope, rope, scale = leaves
    entries = dataclasses.replace(stack.pool.entries, nope=nope, rope=rope, scale=scale)
    return dataclasses.replace(stack, pool=dataclasses.replace(stack.pool, entries=entries))


def _append_rows(stack: Any, tokens: NewTokens, call: _Call) -> list[Any]:
    config = Config(grid=(call.batch, call.rows), constants=call.sizes)
    assert tokens.kv is not None
    return update(store.cache_step_window, config, [*call.inputs, tokens.kv], call.window)


def _fields(tail: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tail)]


def _store_hca(stack: Any, tokens: NewTokens, call: _Call, ratio: int, eps: float, keep_tails: bool) -> Any:
    entry, tail, rows = tokens.entry, stack.state.tail, stack.pool.entries
    assert entry is not None
    names = _fields(tail)
    is_online = len(names) == 3
    leaves = [getattr(tail, name) for name in names]
    groups = call.touched(ratio) if is_online else call.completed(ratio)
    shared = dict(groups=groups, ratio=ratio, online=is_online)
    chunks = -(-call.dim // _POOLED_CHANNELS)
    pooling = Config(
        grid=(call.batch, groups, chunks),
        constants=dict(
            tokens=call.tokens,
            requests=call.sizes["requests"],
            dim=call.dim,
            channels=_POOLED_CHANNELS,
            rows=min(16, next_power_of_2(min(call.tokens, ratio) if is_online else ratio)),
            **shared,
        ),
    )
    read = leaves if is_online else [*leaves, tokens.layer]
    shapes = (call.batch, groups, call.dim), (call.batch, 3, call.dim)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    pooled, running = launch(pool.cache_step_pool_hca, pooling, [*call.inputs, entry.k, entry.z, *read], results)
    tail_units = 0 if keep_tails else 1 if is_online else min(call.tokens, ratio)
    entries = call.completed(ratio)
    config = Config(
        grid=(call.batch, entries + tail_units + call.rows),
        constants=call.sizes
        | shared
        | _pool_sizes(rows, tokens.block_table)
        | dict(entries=entries, all_groups=call.touched(ratio), tail_units=tail_units, eps=eps),
    )
    kv = pooled if tokens.kv is None else tokens.kv  # any f32 will do where no window row is stored
    given = [*call.inputs, tokens.block_table, kv, pooled, entry.norm, tokens.rope, entry.k, entry.z, running]
    state = [*call.window, rows.nope, rows.rope, rows.scale, *leaves, *([] if is_online else [None])]
    kept = [*(range(4) if tokens.kv is None else ()), *(range(7, len(state)) if keep_tails else ())]
    stored = _changed(store.cache_step_store_hca, config, given, state, kept)
    stack = _with_entries(_with_window(stack, stored[:4]), stored[4:7])
    tail = dataclasses.replace(tail, **dict(zip(names, stored[7:], strict=False)))
    return dataclasses.replace(stack, state=dataclasses.replace(stack.state, tail=tail))


def _store_csa(
    stack: Any, tokens: NewTokens, call: _Call, ratio: int, eps: float, keep_tails: bool, key_format: str
) -> Any:
    entry, key, state, rows = tokens.entry, tokens.key, stack.state, stack.pool.entries
    assert entry is not None
    assert key is not None
    key_dim = key.norm.shape[0]
    _check_streams(key, call, key_dim, 2)
    names = _fields(state.tail)
    tails = [getattr(tail, name) for tail in (state.tail, state.indexer_tail) for name in names]
    groups = call.completed(ratio)
    shared = dict(
        groups=groups, ratio=ratio, key_dim=key_dim, rows=next_power_of_2(ratio), key_size=next_power_of_2(key_dim)
    )
    pooling = Config(
        grid=(call.batch, groups, 2),
        constants=dict(
            tokens=call.tokens, requests=call.sizes["requests"], dim=call.dim, size=call.sizes["size"], **shared
        ),
    )
    streams = [entry.k, entry.z, key.k, key.z]
    results = [jax.ShapeDtypeStruct((call.batch, groups, dim), jnp.float32) for dim in (call.dim, key_dim)]
    pooled = launch(pool.cache_step_pool_csa, pooling, [*call.inputs, *streams, *tails], results)
    config = Config(
        grid=(call.batch, 2 * groups + (0 if keep_tails else 2) + call.rows),
        constants=call.sizes
        | shared
        | _pool_sizes(rows, tokens.block_table)
        | dict(
            all_groups=call.touched(ratio),
            keep_tails=keep_tails,
            key_bits=key_dim.bit_length() - 1,
            eps=eps,
            key_format=key_format,
        ),
    )
    kv = pooled[0] if tokens.kv is None else tokens.kv  # any f32 will do where no window row is stored
    given = [*call.inputs, tokens.block_table, kv, *pooled, entry.norm, key.norm, tokens.rope, *streams]
    keys = stack.pool.indexer_keys
    leaves = [*call.window, rows.nope, rows.rope, rows.scale, keys.codes, keys.scale, *tails]
    kept = [*(range(4) if tokens.kv is None else ()), *(range(9, len(leaves)) if keep_tails else ())]
    stored = _changed(store.cache_step_store_csa, config, given, leaves, kept)
    stack = _with_entries(_with_window(stack, stored[:4]), stored[4:7])
    keys = dataclasses.replace(keys, codes=stored[7], scale=stored[8])
    tail, indexer_tail = (
        dataclasses.replace(tail, **dict(zip(names, stored[first : first + len(names)], strict=True)))
        for tail, first in ((state.tail, 9), (state.indexer_tail, 9 + len(names)))
    )
    pool_of = dataclasses.replace(stack.pool, indexer_keys=keys)
    state = dataclasses.replace(stack.state, tail=tail, indexer_tail=indexer_tail)
    return dataclasses.replace(stack, state=state, pool=pool_of)
