"""The steps of a layer as separate public functions, jitted, each donating the state or pool that it updates.

The library itself composes the functions under these jits. Those donate nothing, because only the outermost jit can
decide which buffers to give up. Each function here has its undonated version as ``__wrapped__``, which is useful in a
debugger or a notebook: it can be stepped through, and its arguments stay valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax

from dsv4jax.cache import state
from dsv4jax.layer import attention, gather, indexer, update

__all__ = [
    "append_swa",
    "append_tail",
    "decode_attention",
    "flush_csa",
    "flush_hca",
    "gather_all_compressed",
    "gather_compressed",
    "gather_swa",
    "reset_hca",
    "reset_slots",
    "rotate_csa",
    "select_entries",
]


class Piece[**P, R](Protocol):
    """A jitted function with the signature of the function that it wraps."""

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The function under the jit, which donates nothing."""
        ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Lower the function for these arguments, as ``lower`` of a function under ``jax.jit`` does."""
        ...


_STATIC = ("plan", "kind", "dtype", "backend")


def _piece[**P, R](function: Callable[P, R], *donated: str) -> Piece[P, R]:
    names = inspect.signature(function).parameters
    static = [name for name in _STATIC if name in names]
    return cast(Piece[P, R], jax.jit(function, static_argnames=static, donate_argnames=donated))


append_swa = _piece(update.append_swa, "state")
append_tail = _piece(update.append_tail, "state")
rotate_csa = _piece(update.rotate_csa, "state")
reset_hca = _piece(update.reset_hca, "state")
reset_slots = _piece(state.reset_slots, "state")
flush_csa = _piece(update.flush_csa, "pool")
flush_hca = _piece(update.flush_hca, "pool")

gather_swa = _piece(state.gather_swa)
gather_compressed = _piece(gather.gather_compressed)
gather_all_compressed = _piece(gather.gather_all_compressed)
select_entries = _piece(indexer.select_entries)
decode_attention = _piece(attention.decode_attention)
