"""Products of a few rows of activations with a weight that is stored in FP8 with a scale per block, or in bf16.

call         the public function, and which products have a kernel
split        how a product is divided over the blocks of a launch
activations  x in shared memory, in the order in which the weights' lanes hold their inputs
weights      loading a tile of the weight and widening it
sm90, sm100  the kernels of the two architectures
"""
