"""The weights of an attention layer.

params      the pytree of a layer's weights: shapes, random values and shards
checkpoint  reading one layer's tensors from a folder of safetensors files
"""
