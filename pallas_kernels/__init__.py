"""GPU kernels of the cache, written in Pallas Mosaic GPU for Hopper and Blackwell. They take and return arrays.

In this package a "lane" is one GPU thread. A warp is 32 lanes, which execute together, and a warpgroup is four warps. A
"block" is a block of threads (CTA), whose lanes share on-chip memory. A cluster is several blocks that run at the same
time and can access each other's shared memory. To avoid confusion, a block of the paged pool is called a "page" here.

Packages and modules. The first five packages do not depend on one another:

update     the whole cache update of a layer in one launch, and its steps as separate kernels
attention  attention over the stored window rows and entries
scores     the score of every entry for every query, computed from the stored 4-bit keys
selection  top-k: the positions of the largest scores
products   products with a weight stored as FP8, of few rows and of many

router     the router of a mixture of experts
streams    hyper-connections: what stands between two sublayers

triton_gpu   kernels in Triton for other NVIDIA GPUs; imported only when they are used, because they need an extra

allocation   pages for the next tokens of a batch
gather       stored rows as dense ones
token_parts  what new tokens contribute to a layer, from the matrix products of its input
formats      encoding and decoding of rows, a class for each number format
activations  rows of activations, which products multiply: a class for each way in which they are stored
needed       which rows of a batch with padding are computed
rows         the arithmetic of a row: norm, rope, Hadamard transform, scales
language     the language that kernel bodies are written in, and its two implementations
tuned        numbers that were measured on a card, by kernel
plugin       the CUDA plugin of JAX, which compiles the kernels, and a warning if it compiles slow ones
trees        names for pytrees about which nothing is assumed, and arrays that nobody has written
"""

from pallas_kernels.activations import ExpertRows, OperandRows, RoundedExpertRows, RoundedRows
from pallas_kernels.allocation import Asked, Grants, PageSizes, grant_tokens, unsupported_grants
from pallas_kernels.attention.call import decode_attention, unsupported_attention
from pallas_kernels.attention.inputs import AttentionInputs
from pallas_kernels.gather import gather_request_rows, gather_rows
from pallas_kernels.plugin import SlowKernelsWarning
from pallas_kernels.products.epilogues.attention import AttentionQueries, attention_queries
from pallas_kernels.products.epilogues.gated import SwiGLU
from pallas_kernels.products.epilogues.indexer import IndexerQueries, indexer_queries
from pallas_kernels.products.epilogues.store import AddTo, Store
from pallas_kernels.products.experts.codes import in_order as codes_in_order
from pallas_kernels.products.experts.codes import interleaved as interleaved_codes
from pallas_kernels.products.experts.epilogues import Gated, OfPicks, Routing
from pallas_kernels.products.plan import Plan, Together, plan, rows_taken, together
from pallas_kernels.products.problem import Epilogue, ExpertsSpec, Needed, Problem, RowsSpec, Unsupported, WeightSpec
from pallas_kernels.products.run import Operands, run, run_together
from pallas_kernels.router.call import Routed, most_of_a_part, route, route_in_parts, unsupported_route
from pallas_kernels.router.picks import PickInputs
from pallas_kernels.router.tiles import OwnExperts, RoutedTiles, routed_tiles, tile_rows
from pallas_kernels.scores.call import indexer_scores, unsupported_scores
from pallas_kernels.scores.inputs import ScoreInputs
from pallas_kernels.selection.call import top_k, unsupported_top_k
from pallas_kernels.streams.call import mix_streams, unsupported_mix
from pallas_kernels.streams.mixer import EndedSublayer, MixedStreams, MixRules, StreamWeights
from pallas_kernels.token_parts import (
    TokenParts,
    TokenProducts,
    TokenRounding,
    token_parts,
    unsupported_token_parts,
)
from pallas_kernels.update.batch import NewEntries, NewTokens, ProductStreams, Streams
from pallas_kernels.update.call import append_chunk, cache_step, unsupported
from pallas_kernels.update.pieces import append_swa, flush_entries, reset_hca, rotate_csa
from pallas_kernels.update.token_step import token_step, unsupported_token_step

__all__ = [
    "AddTo",
    "Asked",
    "AttentionInputs",
    "AttentionQueries",
    "EndedSublayer",
    "Epilogue",
    "ExpertRows",
    "ExpertsSpec",
    "Gated",
    "Grants",
    "IndexerQueries",
    "MixRules",
    "MixedStreams",
    "Needed",
    "NewEntries",
    "NewTokens",
    "OfPicks",
    "OperandRows",
    "Operands",
    "OwnExperts",
    "PageSizes",
    "PickInputs",
    "Plan",
    "Problem",
    "ProductStreams",
    "RoundedExpertRows",
    "RoundedRows",
    "Routed",
    "RoutedTiles",
    "Routing",
    "RowsSpec",
    "ScoreInputs",
    "SlowKernelsWarning",
    "Store",
    "StreamWeights",
    "Streams",
    "SwiGLU",
    "Together",
    "TokenParts",
    "TokenProducts",
    "TokenRounding",
    "Unsupported",
    "WeightSpec",
    "append_chunk",
    "append_swa",
    "attention_queries",
    "cache_step",
    "codes_in_order",
    "decode_attention",
    "flush_entries",
    "gather_request_rows",
    "gather_rows",
    "grant_tokens",
    "indexer_queries",
    "indexer_scores",
    "interleaved_codes",
    "mix_streams",
    "most_of_a_part",
    "plan",
    "reset_hca",
    "rotate_csa",
    "route",
    "route_in_parts",
    "routed_tiles",
    "rows_taken",
    "run",
    "run_together",
    "tile_rows",
    "together",
    "token_parts",
    "token_step",
    "top_k",
    "unsupported",
    "unsupported_attention",
    "unsupported_grants",
    "unsupported_mix",
    "unsupported_route",
    "unsupported_scores",
    "unsupported_token_parts",
    "unsupported_token_step",
    "unsupported_top_k",
]
