"""Decode attention over window rows and entries, read directly from where the cache stores them.

call         ``decode_attention``, and the choice of a kernel for a call
sm90         the kernel for Hopper
sm90_pairs   how its two multiplying warpgroups share pairs of tiles
sm90_memory  its shared memory
sm90_few     the kernel for Hopper with few queries, where latency matters more than throughput
sm100        the kernel for Blackwell
turns        the queries that a block of Hopper's kernel computes one after the other
handover     weights passed between the multiplying warpgroups of Hopper's kernel
block        what the kernels for many queries share: memory, barriers, and the loading of tiles
output       the last steps: merging the parts of a cluster, the inverse rope, storing
softmax      a running softmax over the rows of a product
copies       the loading of tiles from rows that were widened before
wide         those rows: a workspace of a call with many tokens
keys         the keys of a query: where they are stored, and how they become tiles
layout       how the work on a query is divided among blocks
inputs       the arrays of a call
"""
