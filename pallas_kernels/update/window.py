"""Window rows: the newest n_win of a request's new tokens are written to ring rows position mod n_win.

    window[slot, p mod n_win] = encode(kv[p]);  pos[slot, p mod n_win] = p

Each row is written by one warp.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.language.lanes import Row
from pallas_kernels.language.values import Value
from pallas_kernels.update.batch import Block, Call, NewTokens
from pallas_kernels.update.work import Jobs


def window_jobs(call: Call, tokens: NewTokens, state: Any) -> Jobs:
    """Return the jobs for the window rows that a request's new tokens can fill, one for each row."""
    return Jobs(count=_num_rows(call, state), dim=tokens.kv.shape[-1], run=write_window_row)


def _num_rows(call: Call, state: Any) -> int:
    return min(call.num_tokens, state.pos.shape[2])


def write_window_row(block: Block, row: Row, i: Value) -> None:
    """Write the ``i``-th of the newest rows; ``i`` is the same in all lanes of the row's team."""
    call, request, state, kv = block.call, block.request, block.stack.state, block.tokens.kv
    # If several tokens map to one row, only the newest is written.
    token = request.count - _num_rows(call, state) + i
    stored = request.live & (token >= 0)
    # If there is only one token, its row can be loaded before the slot is known.
    is_only = call.num_tokens == 1
    values = row.load(kv, request.batch, 0 if is_only else token, where=is_only or stored)
    position = request.start + token
    lead = request.layer, request.slot, position % state.pos.shape[2]
    with block.machine.when(stored):
        call.kv_format.store(row, values, state.window, *lead, where=True)
        state.pos.store_int(position, *lead, where=row.team.lane == 0)
