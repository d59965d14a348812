"""GPU kernels of the cache: Pallas Mosaic GPU, for Hopper and Blackwell. Arrays in, arrays out.

The rooms, and the modules beneath them. The first four know nothing of one another:

update     the whole cache update of a layer in one launch, and its parts alone
attention  attention over the stored window rows and entries
scores     the score of every entry for every query, from the stored 4-bit keys
selection  the positions of the largest scores

gather     stored rows as dense ones
queries    matrix products as attention and scores take them: norm, rope, rounding
formats    how a row becomes bytes and comes back, a class for each number format
rows       the formulas on the way: norm, rope, Hadamard transform, scales
language   the language that kernel bodies are written in, and its two machines
plugin     the CUDA plugin of JAX, which compiles the kernels, and a warning where it makes slow ones
"""

from pallas_kernels.attention.call import decode_attention, unsupported_attention
from pallas_kernels.attention.inputs import AttentionInputs
from pallas_kernels.gather import gather_request_rows, gather_rows
from pallas_kernels.plugin import SlowKernelsWarning
from pallas_kernels.queries import attention_queries, indexer_queries
from pallas_kernels.scores.call import indexer_scores, unsupported_scores
from pallas_kernels.scores.inputs import ScoreInputs
from pallas_kernels.selection.call import top_k, unsupported_top_k
from pallas_kernels.update.batch import NewEntries, NewTokens, Streams
from pallas_kernels.update.call import append_chunk, cache_step, unsupported
from pallas_kernels.update.pieces import append_swa, flush_entries, reset_hca, rotate_csa

__all__ = [
    "AttentionInputs",
    "NewEntries",
    "NewTokens",
    "ScoreInputs",
    "SlowKernelsWarning",
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
