"""The pieces of a layer as users call them: jitted, and donating the state or the pool that they update.

The functions themselves, which the library composes, donate nothing, because only the outermost jit may decide what is
given away. Each piece has its own as ``__wrapped__``: a debugger steps through it, and its arguments stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax

from dsv4jax.cache import state
from dsv4jax.layer import attention, gather, indexer, update


class Piece[**P, R](Protocol):
    """A jitted function with the signature of the one under the jit."""

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The function under the jit, which donates nothing."""
        ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As ``jax.jit``'s."""
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
