"""Products of rows of activations with weights that are stored in FP8 with a scale per block, or in bf16.

run        solves a problem by its plan
plan       which kernel solves a problem, or why none does; where one becomes faster than another
few        the kernels for few rows, on Hopper and on Blackwell
many       the kernels for many rows, on Hopper
experts    the kernel for tiles of rows, each of which is multiplied by one expert of a mixture, on Hopper
epilogues  what is made of sums before they are stored
problem    what a product is, in shapes and dtypes alone
weights    tiles of a weight: copying them to shared memory, and widening them
"""
