"""GPU kernels of the cache: Pallas Mosaic GPU, for Hopper and Blackwell. Arrays in, arrays out.

cache_update   the whole cache update of a layer in one launch: ``cache_step`` (decode), ``append_chunk`` (prefill)
pieces         its parts alone: ``append_swa``, ``flush_csa``, ``flush_hca``, ``rotate_csa``, ``reset_hca``
gather         ``gather_rows``, ``gather_request_rows``: stored rows as dense ones

batch window csa hca rows   what they are made of
machine lanes               the language they are written in; ``ptx`` and ``simulator`` are its two machines
launch                      one kernel launch
"""

from pallas_kernels.batch import NewTokens, Streams
from pallas_kernels.cache_update import append_chunk, cache_step, unsupported
from pallas_kernels.gather import gather_request_rows, gather_rows
from pallas_kernels.pieces import append_swa, flush_entries, reset_hca, rotate_csa

__all__ = [
    "NewTokens",
    "Streams",
    "append_chunk",
    "append_swa",
    "cache_step",
    "flush_entries",
    "gather_request_rows",
    "gather_rows",
    "reset_hca",
    "rotate_csa",
    "unsupported",
]
