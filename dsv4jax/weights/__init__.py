"""The weights of an attention layer.

params      the pytree that a layer reads, its shapes, random values and shards
checkpoint  one layer's tensors out of a folder of safetensors files
"""
