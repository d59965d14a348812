"""GPU kernels of the cache written in Triton, for every NVIDIA GPU since Ampere. They need the extra ``triton``.

They take and return what the kernels of the same names in ``pallas_kernels`` do.

update     the cache update of a layer: checks, and the two launches
attention  attention over the stored window rows and entries
scores     the score of every entry for every query
top_k      the positions of the largest scores
gather     stored rows as dense ones

pool         the first launch of a cache update: pooling of a compressor's rows
store        the second: window rows, finished entries, tails
rows         the arithmetic and the formats of one row
operands     what kernels are given: arrays by name, and the sizes that they are compiled for
numbers      8-bit and 4-bit floats on their bits
launch       launches through jax-triton, or in Triton's interpreter
interpreter  kernels in Triton's interpreter, over NumPy arrays
device       the GPU that kernels are compiled for
"""

from pallas_kernels.selection.call import unsupported_top_k
from pallas_kernels.triton_gpu.attention import decode_attention, unsupported_attention
from pallas_kernels.triton_gpu.gather import gather_request_rows, gather_rows
from pallas_kernels.triton_gpu.scores import indexer_scores, unsupported_scores
from pallas_kernels.triton_gpu.top_k import top_k
from pallas_kernels.triton_gpu.update import append_chunk, append_swa, cache_step, flush_entries, unsupported

__all__ = [
    "append_chunk",
    "append_swa",
    "cache_step",
    "decode_attention",
    "flush_entries",
    "gather_request_rows",
    "gather_rows",
    "indexer_scores",
    "top_k",
    "unsupported",
    "unsupported_attention",
    "unsupported_scores",
    "unsupported_top_k",
]
