"""Implementations of the model's ops that call ``pallas_kernels``, registered as those of layers are.

experts            routed experts that are stored in FP4
router             picks, their weights and tiles
hyper_connections  what stands between two sublayers
head               logits, by the kernels of a layer's products
base               what all of them have in common
"""
