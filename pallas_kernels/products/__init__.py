"""Products of rows of activations with a weight that is stored in FP8 with a scale per block, or in bf16.

both         queries of attention and of the indexer, in one launch
call         ``product``, and which products have a kernel
launches     how those with arguments that were checked are divided and launched
many         the kernels for many rows, on Hopper
heads        queries of attention, made of the sums of such a product
keys         queries of the indexer, made of the sums of such a product
sm90         the kernel for few rows on Hopper
sm100        the kernel for few rows on Blackwell
block        what these two share: the place of a block in the product, its memory, and its last steps
exchange     adds up the sums of the parts of the inputs, of a block and of the blocks of a cluster
residual     what a product of few rows is added to
streamed     rows of x that are copied chunk by chunk: as many as a block has, or where not all of them fit
pair         two products of few rows of the same x, in one launch
queries      queries of few rows, made of such sums
activations  rows of x in shared memory, in the order in which lanes hold the weight, and rounding them to FP8 there
weights      tiles of the weight: copying them to shared memory, and widening them
split        how a product of few rows is divided over the blocks of a launch
"""
