"""The cache update of a layer, in one launch.

call         ``cache_step`` and ``append_chunk``: the whole update
token_step   ``token_step``: that of a decode step, straight from the products of its tokens
pieces       its steps as separate kernels: ``append_swa``, ``flush_entries``, ``rotate_csa``, ``reset_hca``
tails        the tails that are supported, one for each way to compress
csa          entries of two overlapping streams, and their tails
hca          entries of one stream over long groups, and their two tails
tail_update  the interface of a tail's update
window       window rows
entries      the last steps of a pooled row: norm, rope, encoding, and its place in the pool
work         how the work on one request is split over CTAs and warps
batch        the arrays of a call, and what each CTA derives from them first
"""
