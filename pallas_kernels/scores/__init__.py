"""The scores of the lightning indexer, from stored 4-bit keys.

call     ``indexer_scores``
sm90     the kernel on Hopper
sm100    the kernel on Blackwell
tuning   what a kernel of one architecture is to the call that launches it
tiles    a warpgroup's tiles of a request
queries  a request's queries and head weights as operands in shared memory
keys     stored keys on their way to a product
fp4      rows of 4-bit codes as operands of tensor cores
share    how the work of a call is shared by its blocks
inputs   the arrays of a call
"""
