"""What is made of the sums of a product: a file for each formula, with a face for few rows and one for many.

both       queries of attention and of the indexer, from two weights whose tiles are in the same blocks
indexer    queries of the indexer: rope, Hadamard transform and rounding in the keys' format
attention  queries of attention: norm, rope and rounding to f16; conversion of products that are in memory
gated      SwiGLU of gates and ups, from one weight that has both
store      the sums themselves, as they are, rounded, or added to other rows
faces      what the kernels give an epilogue
"""
