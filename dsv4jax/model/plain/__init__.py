"""The model's ops in plain JAX: the reference for their kernels, and what runs where there are none.

router             which experts each token goes to
experts            the outputs of those experts, and of the shared one
hyper_connections  what stands between two sublayers
head               logits
invariant          the same without regard to the batch
"""
