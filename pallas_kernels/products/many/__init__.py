"""Products of more than 64 rows on Hopper.

launch       the launch of a product
tiles        what the kernels share: a block's turns, its stages of chunks, its roles, adding the sums of a cluster
tiling       how a product is divided over blocks
bf16         the kernel for rows of bf16 and a weight in FP8
fp8          the kernel for rows that are rounded to FP8
wide         the kernel for rows and a weight of bf16, of a batch with padding
"""
