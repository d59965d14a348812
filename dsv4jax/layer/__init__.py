"""What a layer does with its cache: it stores new tokens, picks entries, and attends to them.

layer            the attention layer, for prefill, decode and mixed batches
stages           the five stages of a layer, and which of them are fused
call             the arguments of one call of a layer: its requests, their lengths, and what the new tokens contribute
projections      products with the layer's weights, and what tokens contribute, in plain JAX
stored_products  products with weights that are stored as FP8, in plain JAX
tiles            long chunks, some tokens at a time
invariant        forms of the ops in plain JAX that give a request the same bits whatever the batch
dense            matrix product, norm and Hadamard transform
compressor       the streams of new tokens, and finished entries from pooled rows
update           append, flush, rotate and reset, separately and all in one step
gather           stored entries as dense rows
indexer          which entries each query of a CSA layer reads
attention        attention over window and entries
sequence         the layer over whole sequences, without a cache, for training
handle           one layer's cache in one call, for those who write their own layer
backend          the choice of an implementation for each op
ops              the ops, and the interface that implementations of each must have
kernels          implementations of the ops that call ``pallas_kernels``, in Mosaic GPU and in Triton
reference        the same layer recomputed without a cache, for tests and debugging
"""
