"""The cache update of a layer, in one launch.

call         ``cache_step`` and ``append_chunk``: the whole update
token_step   ``token_step``: that of a decode step, straight from the products of its tokens
pieces       its steps as separate kernels: ``append_swa``, ``flush_entries``, ``rotate_csa``, ``reset_hca``
csa          entries of two overlapping streams, and their tails
hca          entries of one stream over long groups, and their two tails
tail_update  the interface of a tail's update, and the last steps of its entries
batch        the arrays of a call, what each CTA derives from them first, and how the work on a request is split
"""
