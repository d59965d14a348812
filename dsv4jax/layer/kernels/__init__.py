"""Implementations of the ops that call ``pallas_kernels``, translating this library's types to the kernels' arguments.

Every class is registered twice: as ``pallas``, which requires a supported GPU, and as ``pallas_simulated``, which runs
the kernels in NumPy on any device.

fused     registers the stages that kernels fuse
intake    the first stage: the products of x, what they contribute, and the cache update
queries   the second stage: queries, made of the sums of their product
output    the last stage: the products of attention's rows, and the residual
triton    those that call ``pallas_kernels.triton_gpu``, registered as ``triton``
reads     what reads the cache: scores of the indexer, top-k and attention
cache     what writes to it, and what gathers rows from it
products  products with a layer's weights, and what follows from those of its input
base      what all of them have in common
"""
