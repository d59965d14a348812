"""Hyper-connections: what stands between two sublayers of a model whose tokens have several residual streams.

call    ``mix_streams``, and how its work is divided over blocks
mixer   the kernel's body: new streams, their numbers, and the next sublayer's input
shares  what the numbers of a token become: shares of streams, with Sinkhorn's algorithm
"""
