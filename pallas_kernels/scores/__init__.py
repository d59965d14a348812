"""The scores of the lightning indexer, computed from the stored 4-bit keys.

call     ``indexer_scores``
sm90     the kernel for Hopper
sm100    the kernel for Blackwell
tuning   the interface between ``indexer_scores`` and an architecture's kernel
tiles    the tiles of a request that a warpgroup scores
queries  a request's queries and head weights, as operands in shared memory
keys     loading stored keys for a product
fp4      conversion of 4-bit codes to operands of tensor cores
share    how the work of a call is divided among its blocks
inputs   the arrays of a call
"""
