"""What a layer does with its cache: it stores new tokens, picks entries and attends to them.

layer       the attention layer, for prefill, decode and mixed batches
call        the call of a layer: which requests, how far each is, what their new tokens bring
compressor  from the input of new tokens to streams, and from pooled rows to finished entries
update      append, flush, rotate, reset, and all of it in one step
gather      stored entries as dense rows
indexer     the entries that each query of a CSA layer reads
attention   attention over window and entries
handle      one layer's cache as one call sees it, for those who write their own layer
backend     which implementation serves which op: names, choice, registration
ops         the ops: what each implementation must do
kernels     the bridge to ``pallas_kernels``, which registers its kernels
reference   a full recompute without a cache, for tests and debugging
"""
