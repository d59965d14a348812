"""Window rows: of a request's new tokens, the newest n_win go to ring rows position mod n_win.

    window[slot, p mod n_win] = encode(kv[p]);  pos[slot, p mod n_win] = p

One warp per row.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.language.lanes import Row
from pallas_kernels.language.machine import Value
from pallas_kernels.rows import store_kv
from pallas_kernels.update.batch import Request


def num_window_rows(num_tokens: int, n_win: int) -> int:
    """Rows that T new tokens can fill."""
    return min(num_tokens, n_win)


def write_window_row(request: Request, row: Row, state: Any, i: Value, num_tokens: int, kv_format: str) -> None:
    """Write the ``i``-th of the newest rows; ``i`` is the same in all lanes of the row's team."""
    machine, tokens = request.machine, request.tokens
    n_win = state.pos.shape[2]
    # Of several tokens for one row only the newest lands.
    token = request.count - num_window_rows(num_tokens, n_win) + i
    stored = request.live & (token >= 0)
    # One token's row does not wait for the slot.
    kv = row.load(tokens.kv, request.batch, 0 if num_tokens == 1 else token, where=num_tokens == 1 or stored)
    position = request.start + token
    lead = request.layer, request.slot, position % n_win
    with machine.when(stored):
        store_kv(row, kv, state.window, *lead, kv_format=kv_format, where=True)
        state.pos.store_int(position, *lead, where=row.team.lane.equals(0))
