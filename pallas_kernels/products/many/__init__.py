"""Products on Hopper of more rows than ``tuned.h200.THRESHOLDS`` leaves to the kernel of few.

launch       the launch of a product
tiles        what the kernels share: a block's turns, its stages of chunks, its roles, what becomes of its sums
tiling       how a product is divided over blocks
bf16         the kernel for rows of bf16 and a weight in FP8
codes        that weight's codes as operands, in the order in which rows have the inputs
fp8          the kernel for rows that are rounded to FP8
wide         the kernel for rows and a weight of bf16: of a batch with padding, or in the order of few rows
"""
