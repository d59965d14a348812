"""The inputs of decode attention: queries, and the rows and tables in which their keys are found."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import AttendedFormat, KVRows
from pallas_kernels.language.lanes import Shaped
from pallas_kernels.needed import needed_first, past_last_needed

HEAD_DIM, NOPE_DIM, ROPE_DIM = 512, 448, 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs[Array: Shaped]:
    """T queries of each of B requests, and the arrays of the layer that they attend to.

    A query at p sees the positions max(0, p - n_win + 1) .. p of its window, and of its first ``visible`` entries
    either those in ``picks`` or all. Rows are pytrees with leaves ``nope rope scale``, all in the same KV format.
    """

    q: Array  # f16 or bf16 [B, T, H, 512]
    window: KVRows[Array]  # rows [layers, requests, n_win, ...]: rings, with position p in row p % n_win
    pos: (
        Array  # int32 [layers, requests, n_win] position of each ring row, -1 = empty; a row with a wrong one is masked
    )
    fresh: (
        KVRows[Array] | None
    )  # rows [B, F, ...] of positions start .. start + F - 1, which are not in the ring yet; or None
    entries: KVRows[Array] | None  # rows [layers, num_blocks, entries_per_block, ...]; or None
    picks: Array | None  # int32 [B, T, K] entry numbers, -1 = none; None means all below visible
    block_table: Array | None  # int32 [requests, max_blocks], -1 = none; None without entries
    slots: Array  # int32 [B], -1 = none
    start: Array  # int32 [B] position of the first fresh row
    positions: Array  # int32 [B, T] of the queries, -1 = none, for which the output is 0
    visible: Array | None  # int32 [B, T] number of entries that a query may see; None without entries
    sinks: Array  # f32 or bf16 [H]
    angles: Array | None  # f32 [B, T, 64] cosines, then sines, for the inverse rope of the output; or None
    layer: Array  # int32 [1]
    needed: Array | None = (
        None  # bool [B, T], queries whose output anyone reads, which for others may be anything; None: all
    )
    order: QueryOrder[Array] | None = None  # in place of ``needed``
    wide: WideRows[Array] | None = None  # from ``wide.widen``, in place of the window, the fresh rows and the entries

    @property
    def max_entries(self) -> int:
        """The largest number of entries that a query can read."""
        if self.entries is None:
            return 0
        if self.picks is not None:
            return self.picks.shape[2]
        assert self.block_table is not None
        return self.block_table.shape[1] * self.entries.nope.shape[2]


def with_flat_queries(inputs: AttentionInputs[jax.Array]) -> AttentionInputs[jax.Array]:
    """Return queries as f16 [B * T * H, 512], because the hardware copies parts of arrays with two axes."""
    return dataclasses.replace(inputs, q=inputs.q.astype(jnp.float16).reshape(-1, HEAD_DIM))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WideRows[Array: Shaped]:
    """The workspace: the rows of each request, first those of its window, then its entries.

    A row is its f16 times its factor, as ``KeyLoader.store`` has them.
    """

    rows: Array  # f16 [B * (n_win + F + entries), 512]
    factors: Array  # f32 [B, n_win + F + entries]; negative if there is no such row, NaN if it is not finite
    of_window: int = dataclasses.field(metadata=dict(static=True))  # n_win + F

    @property
    def of_request(self) -> int:
        """Number of rows of a request."""
        return self.factors.shape[1]

    @classmethod
    def of[Leaf: Shaped](cls, inputs: AttentionInputs[Leaf]) -> WideRows[jax.ShapeDtypeStruct]:
        """Return the shapes for a call."""
        of_window, entries = inputs.pos.shape[2], 0
        if inputs.fresh is not None:
            of_window += inputs.fresh.nope.shape[1]
        if inputs.entries is not None:
            assert inputs.block_table is not None
            entries = inputs.block_table.shape[1] * inputs.entries.nope.shape[2]
        shape = inputs.slots.shape[0], of_window + entries
        return WideRows(
            rows=jax.ShapeDtypeStruct((math.prod(shape), HEAD_DIM), jnp.float16),
            factors=jax.ShapeDtypeStruct(shape, jnp.float32),
            of_window=of_window,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryOrder[Array: Shaped]:
    """The queries of a launch, those that are needed first, or their buffers."""

    count: Array  # int32 [1], of those that are needed
    numbers: Array | None  # int32 [B T]; None: as they are

    @classmethod
    def of(cls, needed: jax.Array) -> QueryOrder[jax.Array]:
        """The order for bool [B, T]; of one request, without a list."""
        if needed.shape[0] == 1:
            return QueryOrder(count=past_last_needed(needed), numbers=None)
        count, numbers = needed_first(needed.reshape(-1))
        return QueryOrder(count=count.reshape(1), numbers=numbers)


def check_inputs(inputs: AttentionInputs[jax.Array], form: AttendedFormat) -> None:
    """Check that shapes and dtypes agree, and that rows have this format.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: entries are given without a block table, sinks have another dtype, or an array has more rows than an
        int32 can count.
    """
    q, pos, entries = inputs.q, inputs.pos, inputs.entries
    chex.assert_rank([q, inputs.positions, pos], [4, 2, 3])
    batch, tokens, heads, _ = q.shape
    chex.assert_shape(q, (batch, tokens, heads, HEAD_DIM))
    _check_rows(inputs.window, pos.shape, form)
    chex.assert_type([pos, inputs.slots, inputs.start, inputs.positions, inputs.layer], jnp.int32)
    chex.assert_shape([inputs.slots, inputs.start], (batch,))
    chex.assert_shape(inputs.positions, (batch, tokens))
    chex.assert_shape(inputs.sinks, (heads,))
    if inputs.needed is not None:
        chex.assert_shape(inputs.needed, (batch, tokens))
        chex.assert_type(inputs.needed, bool)
    if inputs.sinks.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"sinks must be float32 or bfloat16, got {inputs.sinks.dtype}")
    if inputs.angles is not None:
        chex.assert_shape(inputs.angles, (batch, tokens, ROPE_DIM))
        chex.assert_type(inputs.angles, jnp.float32)
    if inputs.fresh is not None:
        _check_rows(inputs.fresh, (batch, None), form)
    if inputs.picks is not None:
        chex.assert_shape(inputs.picks, (batch, tokens, None))
        chex.assert_type(inputs.picks, jnp.int32)
    if entries is not None:
        if inputs.block_table is None or inputs.visible is None:
            raise ValueError("entries need block_table and visible: got None for one of them")
        chex.assert_shape(inputs.visible, (batch, tokens))
        chex.assert_type([inputs.visible, inputs.block_table], jnp.int32)
        chex.assert_shape(inputs.block_table, (pos.shape[1], None))
        _check_rows(entries, (pos.shape[0], None, None), form)


def _check_rows(rows: KVRows[jax.Array], lead: tuple[int | None, ...], form: AttendedFormat) -> None:
    chex.assert_shape([rows.nope, rows.rope], [(*lead, NOPE_DIM), (*lead, ROPE_DIM)])
    chex.assert_type(rows.rope, jnp.bfloat16)
    chex.assert_equal(rows.nope.dtype.itemsize, form.itemsize)
    chex.assert_equal(0 if rows.scale is None else math.prod(rows.scale.shape[len(lead) :]), form.num_scales(NOPE_DIM))
    if math.prod(rows.nope.shape[:-1]) >= 2**31:
        raise ValueError(f"an array may have 2^31 - 1 rows, got {rows.nope.shape[:-1]}")
