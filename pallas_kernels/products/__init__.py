"""Products of a few rows of activations with a weight that is stored in FP8 with a scale per block, or in bf16.

call         ``product``, and which products have a kernel
sm90         the kernel for Hopper
sm100        the kernel for Blackwell
block        what both kernels share: the place of a block in the product, its memory, and its last steps
activations  rows of x in shared memory, in the order in which lanes hold the weight
weights      tiles of the weight: copying them to shared memory, and widening them
split        how a product is divided over the blocks of a launch
"""
