"""The rows that a chunk of tokens reads, widened to f16 once.

In a chunk each stored row is read by hundreds of queries. Instead of converting it for each of them, ``widen`` converts
the rows of all requests into a workspace, from which Hopper's kernel copies them. For each request the workspace has
the window rows of positions start - n_win .. start + F - 1, and then its entries in order.

A row becomes the f16 and the factor that ``KeyLoader`` makes of it, so that attention has the same bits either way.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_kernels.attention.inputs import AttentionInputs, WideRows
from pallas_kernels.attention.keys import RowQuad
from pallas_kernels.formats import AttendedFormat, KVRows, Quad
from pallas_kernels.language.lanes import Buffer, Shaped, Team, fold
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Value, select
from pallas_kernels.tuned import h200

_MAGNITUDES, _INFINITE = 0x7FFF7FFF, 0x7C00  # bits of the magnitudes of two f16; those of infinity, and NaN is above
_ROWS = WARPGROUP // Quad.LANES  # of a block


def worth_widening[Array: Shaped](inputs: AttentionInputs[Array]) -> bool:
    """Return whether the queries read each row often enough, and the workspace is small enough.

    Both follow from shapes alone. The workspace has room for all entries for which a request has blocks in its table.
    Windows alone are two tiles for a query, too few to gain much.
    """
    if inputs.entries is None:
        return False
    wide = WideRows.of(inputs)
    read = math.prod(inputs.positions.shape) * (inputs.pos.shape[2] + inputs.max_entries)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in (wide.rows, wide.factors))
    return read >= h200.READS_TO_WIDEN * wide.factors.size and size <= h200.MOST_WIDE_BYTES


def widen(
    inputs: AttentionInputs[jax.Array], form: AttendedFormat, *, simulate: bool = False
) -> AttentionInputs[jax.Array]:
    """Convert the rows of all requests.

    Returns:
      The inputs with ``wide`` in place of the stored rows. A row that is not finite in f16 is zero, and its factor is
      NaN. Rows that do not exist are zero, or if there are picks they may be left unwritten.
    """

    def body(machine: TensorCores, inputs: AttentionInputs[Buffer], wide: WideRows[Buffer]) -> None:
        _widen_row(machine, inputs, wide, form)

    wide = WideRows.of(inputs)
    wide = launch(
        body,
        name="widen_rows",
        grid=(-(-wide.of_request // _ROWS), inputs.slots.shape[0]),
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
    """Write a row of the workspace by each quad of a block."""
    batch, n = machine.block(1), machine.block(0) * _ROWS + machine.thread // Quad.LANES
    _, requests, n_win = inputs.pos.shape
    slot, layer, start = inputs.slots.load_int(batch), inputs.layer.load_int(0), inputs.start.load_int(batch)
    inside = n < wide.of_request
    live = inside & (slot >= 0) & (slot < requests)
    position = (start - n_win + n).maximum(0)
    in_ring = live & (n < n_win) & (start - n_win + n >= 0)
    held = inputs.pos.load_int(layer, slot, position % n_win, where=in_ring, otherwise=-1)
    exists = in_ring & (held == position)
    place = _Place.of(inputs.window, layer, slot, position % n_win)
    written = live & (n < wide.of_window)
    if inputs.fresh is not None:
        there = written & (n >= n_win)
        place = place.instead(there, _Place.of(inputs.fresh, batch, n - n_win))
        exists = exists | there
    if inputs.entries is not None:
        assert inputs.block_table is not None
        _, num_pages, per_page = inputs.entries.nope.shape[:3]
        is_entry, entry = live & (n >= wide.of_window), (n - wide.of_window).maximum(0)
        page = inputs.block_table.load_int(slot, entry // per_page, where=is_entry, otherwise=-1)
        there = is_entry & (page >= 0) & (page < num_pages)
        place = place.instead(there, _Place.of(inputs.entries, layer, page, entry % per_page))
        exists, written = exists | there, written | there
    if inputs.picks is None:
        # Tiles are copied whole, and their rows that a query does not see have weights of 0, times which only a finite
        # number is 0.
        written = inside
    team = RowQuad(machine, form, machine.thread)
    addresses = [team.nope_at(place.nope, i) for i in range(team.loads)]
    nope = [machine.load(address, Quad.LOAD_BYTES, exists, constant=True) for address in addresses]
    rope = team.load_rope(place.rope, exists)
    scale = form.split_scale(team.quad, [] if place.scale is None else form.load_scales(team.quad, place.scale, exists))
    units = list(team.rope(rope, None if scale.factor is None else machine.reciprocal(scale.factor)))
    for i, words in enumerate(nope):
        units += team.nope(words, scale, i)
    largest = fold(machine.maximum_u16, [word & _MAGNITUDES for _, words in units for word in words])
    largest = Team(machine, WARP).neighbours(machine.maximum_u16, largest, Quad.LANES)
    is_finite = ((largest & 0xFFFF) < _INFINITE) & ((largest >> 16 & 0xFFFF) < _INFINITE)
    for unit, words in units:
        words = [select(is_finite, word, 0) for word in words]
        wide.rows.store_words(words, batch * wide.of_request + n, unit * (Quad.LOAD_BYTES // 2), where=written)
    factor = machine.constant(1.0, "f32") if scale.factor is None else scale.factor
    factor = select(exists, select(is_finite, factor, math.nan), -1.0)
    wide.factors.store_floats([factor], batch, n, where=inside & (team.quad.quarter == 0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where a quad's row is stored: i64 addresses."""

    nope: Value
    rope: Value
    scale: Value | None

    @classmethod
    def of(cls, rows: KVRows[Buffer], *index: Value) -> _Place:
        """Return the place of the row at the leading indices of ``rows``."""

        def address(leaf: Buffer) -> Value:
            return leaf.address_of((*index, *(0 for _ in leaf.shape[len(index) :])))

        scale = None if rows.scale is None else address(rows.scale)
        return cls(nope=address(rows.nope), rope=address(rows.rope), scale=scale)

    def instead(self, where: Value, other: _Place) -> _Place:
        """Return another place in lanes where the condition holds, and this one elsewhere."""
        return _Place(
            nope=select(where, other.nope, self.nope),
            rope=select(where, other.rope, self.rope),
            scale=None if self.scale is None or other.scale is None else select(where, other.scale, self.scale),
        )
