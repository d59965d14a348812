"""The whole cache update of one layer in one kernel launch.

    kv        -> encode -> window row p mod n_win
    k, z      -> tails; where a group is complete: pool, norm, rope, encode -> pool row; rotate or reset the tail
    and, for CSA, the same for the indexer, with the Hadamard transform and a 4-bit format

``cache_step`` is a decode step, with one token per request. ``append_chunk`` is the same for up to T tokens per
request. It can leave the tails unchanged, as a draft needs that may be discarded.

Requests are independent. The grid is [B, units], where each unit does a share of a request's work. A unit that has
nothing to do (slot -1, or no entry completed) ends after reading slot and length.

    units of CSA    main compressor, one warpgroup each: the first does two entries and the tails, the others one entry
    units of HCA    compressor, up to eight warpgroups in a cluster of CTAs: one group each
    jobs            of one warp: the indexer's units, window rows, rows of the ring tail; in units of their own, except
                    in HCA's decode step with a ring tail, whose units have many warps anyway
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KEY_FORMATS, KV_FORMATS
from pallas_kernels.language.lanes import Buffer, Row
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import VECTOR, Value
from pallas_kernels.update.batch import Block, Call, Jobs, NewTokens, Split, Stack, State, Work
from pallas_kernels.update.csa import CSAUpdate
from pallas_kernels.update.hca import HCAOnlineUpdate, HCARingUpdate
from pallas_kernels.update.tail_update import TailUpdate

MAX_HEAD_DIM = VECTOR * WARPGROUP
# To add a kind of layer, write a module like ``csa`` and list its update here.
TAIL_UPDATES: tuple[type[TailUpdate], ...] = (CSAUpdate, HCARingUpdate, HCAOnlineUpdate)


def cache_step[Layers: Stack[jax.Array]](
    stack: Layers,
    tokens: NewTokens[jax.Array],
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    simulate: bool = False,
) -> Layers:
    """Run the cache update of one layer for a decode step, with one token per request.

    Args:
      stack: all layers of a kind, a pytree with ``state`` (``window``: ``nope rope scale``; ``pos``; ``tail``;
        ``indexer_tail``) and ``pool`` (``entries``: ``nope rope scale``; ``indexer_keys``: ``codes scale``) or None.
        Updated in place if the caller's jit donates it.
      tokens: the new tokens, with T = 1. If ``kv`` is None the window is not changed; if ``entry`` is None tails and
        pool are not.
      kv_format, key_format: of the stored rows, from ``formats.KV_FORMATS`` and ``formats.KEY_FORMATS``.
      ratio: tokens per entry; None for SWA.
      eps: of the norms.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The updated stack. The stored bytes are those of the XLA form, except that sums over an entry's tokens may be
      rounded differently.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernels do not support these sizes or formats.
    """
    chex.assert_equal(_sizes(tokens)[1], 1)
    return append_chunk(
        stack, tokens, kv_format=kv_format, key_format=key_format, ratio=ratio, eps=eps, simulate=simulate
    )


def append_chunk[Layers: Stack[jax.Array]](
    stack: Layers,
    tokens: NewTokens[jax.Array],
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    keep_tails: bool = False,
    simulate: bool = False,
) -> Layers:
    """Run the cache update of one layer for T tokens per request, of which ``num_new`` are real.

    The arguments are those of ``cache_step``. With ``keep_tails`` entries are written but the tails are not changed.
    """
    batch, num_tokens = sizes = _sizes(tokens)
    call = checked_call(
        stack, tokens, sizes, kv_format=kv_format, key_format=key_format, ratio=ratio, eps=eps, keep_tails=keep_tails
    )
    tail = stack.state.tail
    update = None
    if tokens.entry is not None:
        if ratio is None or tail is None:
            raise ValueError("tokens.entry is for layers with a compressor: this one has no tail or no ratio")
        update = update_of(tail)
        check_compressors(stack, tokens, call, update)
    work = _plan(call, update, stack, tokens)
    if not batch or not work.units + work.job_units:
        return stack

    def body(machine: Machine, tokens: NewTokens[Buffer], stack: Stack[Buffer]) -> None:
        block = Block.load(machine, call, tokens, stack)
        work.run(block, None if update is None else update.of_block(block).run)

    return launch(
        body,
        name="stage_entries" if keep_tails else "cache_step" if num_tokens == 1 else "append_chunk",
        grid=work.grid(batch),
        inputs=tokens,
        state=stack,
        simulate=simulate,
    )


def _plan(call: Call, update: type[TailUpdate] | None, stack: Stack[jax.Array], tokens: NewTokens[jax.Array]) -> Work:
    """Decide how the work on a request is split."""
    units, split, jobs = 0, Split(), ()
    if update is not None:
        units, split, jobs = update.num_units(call), update.split(call), update.jobs(call, tokens)
    if tokens.kv is not None:
        jobs = *jobs, window_jobs(call, tokens, stack.state)
    # The few jobs of a decode step ride along if a unit has several warpgroups. In a unit of their own they would delay
    # other requests.
    return Work.of(units, split, jobs, ride_along=call.num_tokens == 1 and split.parts > 1)


def window_jobs(call: Call, tokens: NewTokens[jax.Array], state: State[jax.Array]) -> Jobs:
    """Return the jobs for the window rows that a request's new tokens can fill, one for each row.

    The newest n_win of the tokens are written to ring rows position mod n_win, each by a warp.
    """
    assert tokens.kv is not None
    rows, dim = min(call.num_tokens, state.pos.shape[2]), tokens.kv.shape[-1]

    def write(block: Block, row: Row, i: Value) -> None:
        """Write the ``i``-th of the newest rows; ``i`` is the same in all lanes of the row's team."""
        call, request, state, kv = block.call, block.request, block.stack.state, block.tokens.kv
        assert kv is not None
        # If several tokens map to one row, only the newest is written.
        token = request.count - rows + i
        stored = request.live & (token >= 0)
        # If there is only one token, its row can be loaded before the slot is known.
        is_only = call.num_tokens == 1
        values = row.load(kv, request.batch, 0 if is_only else token, where=is_only or stored)
        position = request.start + token
        lead = request.layer, request.slot, position % state.pos.shape[2]
        with block.machine.when(stored):
            call.kv_format.store(row, values, state.window, *lead, where=True)
            state.pos.store_int(position, *lead, where=row.team.lane == 0)

    return Jobs(count=rows, dim=dim, run=write)


def update_of(tail: object) -> type[TailUpdate]:
    """Return the update that serves a tail, given as a pytree of arrays or buffers.

    Raises:
      ValueError: no update serves a tail with these leaves.
    """
    names = {jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(tail)}
    for update in TAIL_UPDATES:
        if names == set(update.leaves):
            return update
    known = " or ".join(str(update.leaves) for update in TAIL_UPDATES)
    raise ValueError(f"a tail must have the leaves {known}, got {tuple(sorted(names))}")


def unsupported(
    *, kv_format: str, key_format: str, nope_dim: int, rope_dim: int, csa_ratio: int | None, key_dim: int | None
) -> str | None:
    """Return why these kernels do not support a layer, or None if they do.

    ``csa_ratio`` and ``key_dim`` are None except for CSA.
    """
    if reason := unsupported_rows(kv_format, key_format, nope_dim, rope_dim):
        return reason
    return None if csa_ratio is None else CSAUpdate.unsupported(csa_ratio, key_dim)


def unsupported_rows(kv_format: str, key_format: str, nope_dim: int, rope_dim: int) -> str | None:
    if kv_format not in KV_FORMATS or key_format not in KEY_FORMATS:
        known = f"{tuple(KV_FORMATS)} and {tuple(KEY_FORMATS)}"
        return f"no kernel for {kv_format=} with {key_format=}; known are {known}"
    if reason := KV_FORMATS[kv_format].unsupported(nope_dim, rope_dim):
        return f"{kv_format}: {reason}"
    if nope_dim + rope_dim > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, got {nope_dim + rope_dim}"
    return None


def checked_call(
    stack: Stack[jax.Array],
    tokens: NewTokens[jax.Array],
    sizes: tuple[int, int],
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    keep_tails: bool = False,
) -> Call:
    """Return what is known about an update of B requests with T tokens each, after checks of formats and tokens."""
    window = stack.state.window
    reason = unsupported_rows(kv_format, key_format, window.nope.shape[-1], window.rope.shape[-1])
    if reason is not None:
        raise ValueError(reason)
    call = Call(
        requests=sizes[0],
        num_tokens=sizes[1],
        ratio=ratio or 0,
        kv_format=KV_FORMATS[kv_format],
        key_format=KEY_FORMATS[key_format],
        eps=eps,
        keep_tails=keep_tails,
        in_order=tokens.in_order,
    )
    check_tokens(stack, tokens, call)
    return call


def _sizes(tokens: NewTokens[jax.Array]) -> tuple[int, int]:
    """Return B and T."""
    if tokens.kv is not None:
        batch, count, _ = tokens.kv.shape
        return batch, count
    assert tokens.entry is not None, "there are window rows, or entries, or both"
    return tokens.entry.lead


def _head_dim(stack: Stack[jax.Array]) -> int:
    window = stack.state.window
    return window.nope.shape[-1] + window.rope.shape[-1]


def check_tokens(stack: Stack[jax.Array], tokens: NewTokens[jax.Array], call: Call) -> None:
    chex.assert_shape(tokens.layer, (1,))
    chex.assert_shape([tokens.slots, tokens.start, tokens.num_new], (call.requests,))
    chex.assert_type([tokens.layer, tokens.slots, tokens.start, tokens.num_new], jnp.int32)
    if tokens.kv is not None:
        chex.assert_shape(tokens.kv, (call.requests, call.num_tokens, _head_dim(stack)))
        chex.assert_type(tokens.kv, jnp.float32)


def check_compressors(
    stack: Stack[jax.Array], tokens: NewTokens[jax.Array], call: Call, update: type[TailUpdate]
) -> None:
    state, entry, key = stack.state, tokens.entry, tokens.key
    assert entry is not None
    if (key is not None) != update.has_keys:
        raise ValueError("tokens.key is for CSA layers, and only for them")
    compressors = [(entry, state.tail, _head_dim(stack))]
    if key is not None:
        compressors.append((key, state.indexer_tail, key.norm.shape[-1]))
    if reason := update.unsupported(call.ratio, None if key is None else key.norm.shape[-1]):
        raise ValueError(reason)
    for streams, tail, dim in compressors:
        chex.assert_shape(jax.tree.leaves(tail), (*state.pos.shape[:2], *update.tail_shape(call.ratio, dim)))
        chex.assert_equal(streams.lead, (call.requests, call.num_tokens))
        streams.check(update.num_streams * dim, call.ratio)
        chex.assert_shape(streams.norm, (dim,))
        if streams.norm.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"norm must be float32 or bfloat16, got {streams.norm.dtype}")
    chex.assert_shape(tokens.rope, (call.requests, call.max_groups, state.window.rope.shape[-1]))
    chex.assert_type([tokens.rope, tokens.block_table], [jnp.float32, jnp.int32])
    chex.assert_rank(tokens.block_table, 2)
