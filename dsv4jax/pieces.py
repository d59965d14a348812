"""The steps of a layer as separate public functions, jitted, each donating the state or pool that it updates.

The library itself composes the functions under these jits. Those donate nothing, because only the outermost jit can
decide which buffers to give up. Each function here has its undonated version as ``__wrapped__``, which is useful in a
debugger or a notebook: it can be stepped through, and its arguments stay valid.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax

from dsv4jax.cache import state
from dsv4jax.cache.pool import PagedPool
from dsv4jax.layer import attention, gather, indexer, update
from dsv4jax.layer.ops import NewEntries

__all__ = [
    "NewEntries",
    "append_swa",
    "append_tail",
    "decode_attention",
    "flush_entries",
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
flush_entries = _piece(update.flush_entries, "pool")

gather_swa = _piece(state.gather_swa)
gather_compressed = _piece(gather.gather_compressed)
gather_all_compressed = _piece(gather.gather_all_compressed)
select_entries = _piece(indexer.select_entries)
decode_attention = _piece(attention.decode_attention)


# What ``flush_entries`` was in version 0.1. Version 0.2 will not have these.


def flush_csa(pool: PagedPool, index: Any, entries: Any, indexer_entries: Any, *places: Any, **named: Any) -> PagedPool:
    """Call ``flush_entries`` with keys. ``places`` are block_table, slots, first and count."""
    return _flush("flush_csa", (pool, index, entries, indexer_entries), places, named)


def flush_hca(pool: PagedPool, index: Any, entries: Any, *places: Any, **named: Any) -> PagedPool:
    """Call ``flush_entries`` without keys. ``places`` are block_table, slots, first and count."""
    return _flush("flush_hca", (pool, index, entries, None), places, named)


def _flush(name: str, given: tuple[Any, ...], places: tuple[Any, ...], named: dict[str, Any]) -> PagedPool:
    message = f"dsv4jax.pieces.{name} is now dsv4jax.pieces.flush_entries, which takes NewEntries"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    pool, index, entries, keys = given
    fields = "block_table", "slots", "first", "count"
    at = dict(zip(fields, places, strict=False)) | {field: named.pop(field) for field in fields if field in named}
    return flush_entries(pool, index, NewEntries(entries=entries, keys=keys, **at), **named)
