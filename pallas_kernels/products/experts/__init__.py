"""Products of tiles of rows with the experts of a mixture, whose weights are stored in FP4, on Hopper.

launch     the launches of a product
sm90       the kernel
fp8        the kernel for rows in FP8
beside     the kernel beside which the shared expert is multiplied
rows       the launch that sorts rows of tokens, and rounds them
codes      the order of codes that takes the fewest instructions to widen
layout     how a product is divided over the blocks of a launch, and over the shared memory of a block
epilogues  what is made of the sums: the gated inputs of the second product, and the outputs of each pick
"""
