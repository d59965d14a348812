"""Products of few rows, up to 128 in a block, and of more in the same order, on Hopper and on Blackwell.

launch   which layout a product gets, and its launch
sm90     the kernel on Hopper
sm100    the kernel on Blackwell
block    what these two share: a block's place in the product, its memory, its chunks, and its last steps
split    how a product is divided over the blocks of a launch
layout   the shared memory of a block
staging  rows of x in shared memory, in the order in which lanes hold the weight
"""
