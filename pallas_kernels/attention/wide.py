"""The rows that a chunk of tokens reads, widened to f16 once.

In a chunk each stored row is read by hundreds of queries. Instead of converting it for each of them, ``widen`` decodes
the rows of all requests into a workspace, from which Hopper's kernel copies them. For each request the workspace has
the window rows of positions start - n_win .. start + F - 1, and then its entries in order.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs, WideRows
from pallas_kernels.formats import AttendedFormat, KVRows
from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team, fold, maximum
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Index, select
from pallas_kernels.rows import magnitude_bits
from pallas_kernels.tuned import h200

_INFINITE = int(np.float32(65520).view(np.int32))  # the bits of the smallest magnitude that f16 makes infinite
_WARPS = WARPGROUP // WARP


def worth_widening[Array: Shaped](inputs: AttentionInputs[Array]) -> bool:
    """Return whether the queries read each row often enough, and the workspace is small enough.

    Both follow from shapes alone. The workspace has room for all entries for which a request has blocks in its table.
    Windows alone are two tiles for a query, too few to gain much.
    """
    if inputs.entries is None:
        return False
    wide = WideRows.of(inputs)
    read = math.prod(inputs.positions.shape) * (inputs.pos.shape[2] + inputs.max_entries)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in (wide.rows, wide.bias))
    return read >= h200.READS_TO_WIDEN * wide.bias.size and size <= h200.MOST_WIDE_BYTES


def widen(
    inputs: AttentionInputs[jax.Array], form: AttendedFormat, *, simulate: bool = False
) -> AttentionInputs[jax.Array]:
    """Decode the rows of all requests.

    Returns:
      The inputs with ``wide`` in place of the stored rows. A row that is not finite in f16 is zero, and its bias is
      NaN. Rows that do not exist are zero, or if there are picks they may be left unwritten.
    """

    def body(machine: TensorCores, inputs: AttentionInputs[Buffer], wide: WideRows[Buffer]) -> None:
        _widen_row(machine, inputs, wide, form)

    wide = WideRows.of(inputs)
    wide = launch(
        body,
        name="widen_rows",
        grid=(-(-wide.of_request // _WARPS), inputs.slots.shape[0]),
        inputs=dataclasses.replace(inputs, q=None, positions=None, visible=None, sinks=None, angles=None, needed=None),
        state=wide,
        simulate=simulate,
    )
    return instead_of_rows(inputs, wide)


def instead_of_rows[Array: Shaped](inputs: AttentionInputs[Array], wide: WideRows[Array]) -> AttentionInputs[Array]:
    """Return inputs with widened rows in place of the stored ones."""
    return dataclasses.replace(inputs, window=None, fresh=None, entries=None, block_table=None, wide=wide)


def _widen_row(
    machine: TensorCores, inputs: AttentionInputs[Buffer], wide: WideRows[Buffer], form: AttendedFormat
) -> None:
    """Write a row of the workspace by each warp of a block."""
    batch, n = machine.block(1), machine.block(0) * _WARPS + machine.thread // WARP
    _, requests, n_win = inputs.pos.shape
    slot, layer, start = inputs.slots.load_int(batch), inputs.layer.load_int(0), inputs.start.load_int(batch)
    inside = n < wide.of_request
    live = inside & (slot >= 0) & (slot < requests)
    row = Row(Team(machine, WARP), HEAD_DIM)
    channels = row.constant(0.0)

    def load(rows: KVRows[Buffer], *lead: Index, where: Condition) -> None:
        nonlocal channels
        found = form.load(row, rows, *lead, where=where)
        channels = row.map(lambda new, old: select(where, new, old), found, channels)

    position = (start - n_win + n).maximum(0)
    in_ring = live & (n < n_win) & (start - n_win + n >= 0)
    held = inputs.pos.load_int(layer, slot, position % n_win, where=in_ring, otherwise=-1)
    exists = in_ring & (held == position)
    load(inputs.window, layer, slot, position % n_win, where=exists)
    written = live & (n < wide.of_window)
    if inputs.fresh is not None:
        there = written & (n >= n_win)
        load(inputs.fresh, batch, n - n_win, where=there)
        exists = exists | there
    if inputs.entries is not None:
        assert inputs.block_table is not None
        _, num_pages, per_page = inputs.entries.nope.shape[:3]
        is_entry, entry = live & (n >= wide.of_window), (n - wide.of_window).maximum(0)
        page = inputs.block_table.load_int(slot, entry // per_page, where=is_entry, otherwise=-1)
        there = is_entry & (page >= 0) & (page < num_pages)
        load(inputs.entries, layer, page, entry % per_page, where=there)
        exists, written = exists | there, written | there
    if inputs.picks is None:
        # Tiles are copied whole, and their rows that a query does not see have weights of 0, times which only a finite
        # number is 0.
        written = inside
    largest = machine.reduce_warp("max", fold(maximum, [magnitude_bits(value) for step in channels for value in step]))
    is_finite = largest < _INFINITE
    channels = row.map(lambda value: select(is_finite, value, 0.0), channels)
    for channel, step in zip(row.channel, channels, strict=True):
        words = [machine.to_f16(*step[n : n + 2]) for n in range(0, len(step), 2)]
        wide.rows.store_words(words, batch * wide.of_request + n, channel, where=written)
    bias = select(is_finite, machine.constant(0.0, "f32"), math.nan)
    bias = select(exists, bias, -math.inf)
    wide.bias.store_floats([bias], batch, n, where=inside & (row.team.lane == 0))
