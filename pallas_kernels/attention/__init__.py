"""Decode attention over window rows and entries, read directly from where the cache stores them.

call         ``decode_attention``, and the choice of a kernel for a call
sm90         the kernel for Hopper
sm90_few     the kernel for Hopper with few queries, where latency matters more than throughput
sm90_spread  the same with the bits of ``sm90``
sm100        the kernel for Blackwell
block        what the kernels for many queries share: loading tiles, a running softmax, the last steps of the output
wide         rows that are widened once for all queries of a call with many tokens
query_tile   a query's heads in shared memory, as the hardware copies them
keys         the keys of a query: where they are stored, and how they become tiles
layout       how the work on a query is divided among blocks
inputs       the arrays of a call
"""
