"""The whole cache update of one layer in one kernel launch.

    kv        -> number format -> window row p mod n_win
    k, z      -> tails; where a block is complete: pool, norm, rope, number format -> pool row; rotate or reset the tail
    and, for CSA, the same for the indexer, with the Hadamard transform and a 4-bit format

``cache_step`` is a decode step, one token per request. ``append_chunk`` is the same for T tokens per request, ragged,
and can leave the tails as they are, as a draft needs that may be forgotten.
Requests are independent: the grid is [B, units], a unit being a share of a request's work. One whose request has
nothing to do (slot -1, another phase) ends after reading its slot and length.

    units of CSA    main compressor, a warpgroup each: the first takes two entries and the tails, the others one entry
    units of HCA    compressor, up to eight warpgroups in a cluster of CTAs: one block each
    jobs            of one warp: the indexer's units, window rows, rows of the ring tail; in units of their own, except
                    in HCA's ring decode step, whose units are wide
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax.numpy as jnp

from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import VECTOR, WARP, WARPGROUP, Machine, Value
from pallas_kernels.rows import KEY_FORMATS, KV_FORMATS
from pallas_kernels.update import csa, hca
from pallas_kernels.update.batch import EntryStore, NewTokens, Request, max_blocks
from pallas_kernels.update.window import num_window_rows, write_window_row

MAX_HEAD_DIM = VECTOR * WARPGROUP
MAX_CSA_RATIO = 8  # rows of an entry are all in registers at once
MIN_KEY_DIM, MAX_KEY_DIM = 32, VECTOR * WARP


def cache_step(
    stack: Any,
    tokens: NewTokens,
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    simulate: bool = False,
) -> Any:
    """A decode step's cache update of one layer: one token per request.

    Args:
      stack: all layers of a kind, a pytree with ``state`` (``window``: ``nope rope scale``; ``pos``; ``tail``;
        ``indexer_tail``) and ``pool`` (``entries``: ``nope rope scale``; ``indexer_keys``: ``codes scale``) or None.
        Updated in place where the caller's jit donates it.
      tokens: of T = 1. Without ``kv`` the window is left as it is, without ``entry`` tails and pool are.
      kv_format, key_format: of the stored rows, from ``rows.KV_FORMATS`` and ``rows.KEY_FORMATS``.
      ratio: tokens per entry; None for SWA.
      eps: the norms'.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The updated stack. Stored bytes are those of the XLA form, but for the rounding of an entry's sums.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: sizes or formats that the kernels do not serve.
    """
    chex.assert_axis_dimension(_newest(tokens), 1, 1)
    return append_chunk(
        stack, tokens, kv_format=kv_format, key_format=key_format, ratio=ratio, eps=eps, simulate=simulate
    )


def append_chunk(
    stack: Any,
    tokens: NewTokens,
    *,
    kv_format: str,
    key_format: str,
    ratio: int | None,
    eps: float,
    keep_tails: bool = False,
    simulate: bool = False,
) -> Any:
    """As ``cache_step``, for T tokens per request, of which ``num_new`` are real.

    keep_tails: leave the tails as they are; entries are written all the same.
    """
    window, is_csa = stack.state.window, tail_kind(stack.state.tail) == "csa"
    if reason := unsupported(
        kv_format=kv_format,
        key_format=key_format,
        nope_dim=window.nope.shape[-1],
        rope_dim=window.rope.shape[-1],
        csa_ratio=ratio if is_csa else None,
        key_dim=stack.state.indexer_tail.ka.shape[-1] if is_csa else None,
    ):
        raise ValueError(reason)
    _check_tokens(stack, tokens, ratio)
    batch, num_tokens = _newest(tokens).shape[:2]
    work = Work.of(stack, tokens, num_tokens, ratio, keep_tails=keep_tails)
    if not batch or not work.units + work.job_units:
        return stack

    def body(machine: Machine, tokens: NewTokens, stack: Any) -> None:
        state, pool, entry, key = stack.state, stack.pool, tokens.entry, tokens.key
        request = Request.of_block(machine, tokens, num_tokens, state.pos.shape[1])

        def write_window(row: Row, i: Value) -> None:
            write_window_row(request, row, state, i, num_tokens, kv_format)

        run_job: dict[str, Callable[[Row, Value], None]] = {"window": write_window}
        run_unit: Callable[[Value], None] | None = None
        if entry is not None:
            row = Row(Team(machine, WARPGROUP), entry.norm.shape[0])
            store = EntryStore(request, row, pool.entries, entry.norm, kv_format, eps, is_key=False)
            if work.kind == "csa":
                run_unit = csa.CSAUpdate(request, row, state.tail, entry, store, num_tokens, keep_tails).run
            else:
                assert ratio is not None
                shape = num_tokens, ratio, work.split
                compressor = _HCA[work.kind](request, row, state.tail, entry, store, *shape, keep_tails)
                run_unit = compressor.run
                if isinstance(compressor, hca.HCARingUpdate):
                    run_job["tail"] = compressor.write_tail_row
        if key is not None:

            def run_key(row: Row, i: Value) -> None:
                store = EntryStore(request, row, pool.indexer_keys, key.norm, key_format, eps, is_key=True)
                csa.CSAUpdate(request, row, state.indexer_tail, key, store, num_tokens, keep_tails).run(i)

            run_job["key"] = run_key
        warps = Team(machine, WARP)
        unit = machine.block(1)

        def run_jobs(first: Value, stride: int) -> None:
            for job in work.jobs:
                for i in range(-(-job.count // stride)):
                    place = first - job.first + i * stride
                    with machine.when((place >= 0) & (place < job.count)):
                        run_job[job.name](Row(warps, job.dim), place)

        warp = machine.thread // WARP
        if work.split.cluster > 1:
            warp = machine.rank * (work.warps // work.split.cluster) + warp
        if work.job_units:
            with machine.when(unit >= work.units):
                run_jobs((unit - work.units) * work.warps + warp, work.job_units * work.warps)
            if run_unit:
                with machine.when(unit < work.units):
                    run_unit(unit)
        else:
            run_jobs(unit * work.warps + warp, work.units * work.warps)
            assert run_unit
            run_unit(unit)

    return launch(
        body,
        name="stage_entries" if keep_tails else "cache_step" if num_tokens == 1 else "append_chunk",
        grid=(batch, work.units + work.job_units),
        warpgroups=work.split.warpgroups,
        cluster=work.split.cluster,
        shared_bytes=work.split.shared_bytes,
        inputs=tokens,
        state=stack,
        simulate=simulate,
    )


_HCA: dict[str, type[hca.HCARingUpdate | hca.HCAOnlineUpdate]] = {
    "ring": hca.HCARingUpdate,
    "online": hca.HCAOnlineUpdate,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work for single warps, numbered from ``first`` among all jobs of a request."""

    name: str
    first: int
    count: int
    dim: int  # of the rows it works on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How the work on one request is split over CTAs and warps."""

    kind: str  # of tail: csa, ring, online, or none
    units: int  # for the compressor
    job_units: int  # for jobs
    jobs: tuple[Job, ...]
    split: hca.Split  # of a unit: CTAs and warpgroups

    @property
    def warps(self) -> int:
        """Warps of a unit."""
        return self.split.parts * WARPGROUP // WARP

    @classmethod
    def of(cls, stack: Any, tokens: NewTokens, num_tokens: int, ratio: int | None, *, keep_tails: bool) -> Work:
        kind = tail_kind(stack.state.tail)
        wanted: list[tuple[str, int, int]] = []  # name, count, row size
        batch, units = tokens.slots.shape[0], 0
        split = hca.Split.of(1, batch, num_tokens)
        if tokens.entry is not None:
            assert ratio is not None
            dim = tokens.entry.norm.shape[0]
            if kind == "csa":
                units = csa.num_units(num_tokens, ratio)
                assert tokens.key is not None
                wanted.append(("key", units, tokens.key.norm.shape[0]))
            else:
                rows = ratio if kind == "ring" else min(num_tokens, ratio)
                units, split = _HCA[kind].num_units(num_tokens, ratio), hca.Split.of(rows, batch, num_tokens)
            if kind == "ring" and not keep_tails:
                wanted.append(("tail", hca.HCARingUpdate.num_jobs(num_tokens, ratio), dim))
        if tokens.kv is not None:
            n_win = stack.state.pos.shape[2]
            wanted.append(("window", num_window_rows(num_tokens, n_win), tokens.kv.shape[-1]))
        jobs, total = [], 0
        for name, count, dim in wanted:
            jobs.append(Job(name=name, first=total, count=count, dim=dim))
            total += count
        # A decode step's few jobs ride along where a unit is wide: one of their own would keep another request waiting.
        rides = num_tokens == 1 and split.parts > 1
        job_units = 0 if rides else -(-total // (split.parts * WARPGROUP // WARP))
        return cls(kind=kind, units=units, job_units=job_units, jobs=tuple(jobs), split=split)


def tail_kind(tail: Any) -> str:
    """csa, ring, online or none."""
    if tail is None:
        return "none"
    if hasattr(tail, "kb"):
        return "csa"
    return "ring" if hasattr(tail, "ka") else "online"


def unsupported(
    *, kv_format: str, key_format: str, nope_dim: int, rope_dim: int, csa_ratio: int | None, key_dim: int | None
) -> str | None:
    """Why these kernels do not serve a layer, or None where they do. csa_ratio and key_dim are None but for CSA."""
    if kv_format not in KV_FORMATS or key_format not in KEY_FORMATS:
        return f"no kernel for {kv_format=} with {key_format=}; known are {KV_FORMATS} and {KEY_FORMATS}"
    if nope_dim % VECTOR or rope_dim % VECTOR:
        return f"NoPE and RoPE dims must be divisible by {VECTOR}, got {nope_dim} and {rope_dim}"
    if nope_dim + rope_dim > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, got {nope_dim + rope_dim}"
    if csa_ratio is not None and csa_ratio > MAX_CSA_RATIO:
        return f"CSA ratio must be at most {MAX_CSA_RATIO}, got {csa_ratio}"
    if key_dim is not None and (key_dim & (key_dim - 1) or not MIN_KEY_DIM <= key_dim <= MAX_KEY_DIM):
        return f"indexer_head_dim must be a power of two in [{MIN_KEY_DIM}, {MAX_KEY_DIM}], got {key_dim}"
    return None


def _newest(tokens: NewTokens) -> Any:
    """Whatever array has the axes [B, T, ...]."""
    return tokens.entry.k if tokens.kv is None and tokens.entry is not None else tokens.kv


def _check_tokens(stack: Any, tokens: NewTokens, ratio: int | None) -> None:
    batch, num_tokens = _newest(tokens).shape[:2]
    window, tail = stack.state.window, stack.state.tail
    head_dim = window.nope.shape[-1] + window.rope.shape[-1]
    chex.assert_shape(tokens.layer, (1,))
    chex.assert_shape([tokens.slots, tokens.start, tokens.num_new], (batch,))
    chex.assert_type([tokens.layer, tokens.slots, tokens.start, tokens.num_new], jnp.int32)
    if tokens.kv is not None:
        chex.assert_shape(tokens.kv, (batch, num_tokens, head_dim))
        chex.assert_type(tokens.kv, jnp.float32)
    if tokens.entry is None:
        return
    if ratio is None or tail is None:
        raise ValueError("tokens.entry is for layers with a compressor: this one has no tail or no ratio")
    if (tokens.key is not None) != (tail_kind(tail) == "csa"):
        raise ValueError("tokens.key is for CSA layers, and only for them")
    streams = [(tokens.entry, head_dim)]
    if tokens.key is not None:
        streams.append((tokens.key, stack.state.indexer_tail.ka.shape[-1]))
    for stream, dim in streams:
        width = 2 * dim if tail_kind(tail) == "csa" else dim
        chex.assert_shape([stream.k, stream.z], (batch, num_tokens, width))
        chex.assert_shape(stream.norm, (dim,))
        chex.assert_type([stream.k, stream.z, stream.norm], jnp.float32)
    chex.assert_shape(tokens.rope, (batch, max_blocks(num_tokens, ratio), window.rope.shape[-1]))
    chex.assert_type([tokens.rope, tokens.block_table], [jnp.float32, jnp.int32])
    chex.assert_rank(tokens.block_table, 2)
