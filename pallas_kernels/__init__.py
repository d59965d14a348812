"""GPU kernels of the cache: Pallas Mosaic GPU, for Hopper and Blackwell. Arrays in, arrays out.

cache_update      the whole cache update of a layer in one launch: ``cache_step`` (decode), ``append_chunk`` (prefill)
pieces            its parts alone: ``append_swa``, ``flush_entries``, ``rotate_csa``, ``reset_hca``
gather            ``gather_rows``, ``gather_request_rows``: stored rows as dense ones
queries           ``attention_queries``, ``indexer_queries``: matrix products as the next two take them
indexer_scores    the score of every entry for every query, from the stored 4-bit keys
top_k             the positions of the largest scores
decode_attention  attention over the stored window rows and entries

batch window csa hca rows          what the cache update is made of
indexer_parts indexer_keys fp4     what scores are made of; top_k: kth_key marks; attention: attention_keys
*_sm90 *_sm90_few *_sm100          kernels of one architecture, where they differ: Hopper (few queries apart), Blackwell
machine lanes                      the language they are written in; ``ptx`` and ``simulator`` are its two machines
tensor_cores tensor_memory         its words for products of matrices, on the same two machines
launch target                      one kernel launch; what is compiled for
"""

from pallas_kernels.attention.call import decode_attention, unsupported_attention
from pallas_kernels.gather import gather_request_rows, gather_rows
from pallas_kernels.queries import attention_queries, indexer_queries
from pallas_kernels.scores.call import indexer_scores, unsupported_scores
from pallas_kernels.selection.call import top_k, unsupported_top_k
from pallas_kernels.update.batch import NewTokens, Streams
from pallas_kernels.update.call import append_chunk, cache_step, unsupported
from pallas_kernels.update.pieces import append_swa, flush_entries, reset_hca, rotate_csa

__all__ = [
    "NewTokens",
    "Streams",
    "append_chunk",
    "append_swa",
    "attention_queries",
    "cache_step",
    "decode_attention",
    "flush_entries",
    "gather_request_rows",
    "gather_rows",
    "indexer_queries",
    "indexer_scores",
    "reset_hca",
    "rotate_csa",
    "top_k",
    "unsupported",
    "unsupported_attention",
    "unsupported_scores",
    "unsupported_top_k",
]
