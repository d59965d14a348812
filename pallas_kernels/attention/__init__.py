"""Decode attention over the stored rows, window and entries, where they lie.

call      ``decode_attention``, and which kernel serves a call
sm90      the kernel on Hopper
sm90_few  the kernel on Hopper for few queries, where waiting counts
sm100     the kernel on Blackwell
block     what the roles of a block share: its memory, its barriers, the loading of tiles
output    from sums to the output: the parts of a cluster put together, turned back, stored
softmax   a running softmax over the rows of a product
keys      the keys of a query: where they lie, and how they become tiles
layout    how a query is shared by blocks
inputs    the arrays of a call
"""
