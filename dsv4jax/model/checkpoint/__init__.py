"""A model's folder: config.json and safetensors files.

load     reading one, weight by weight on to the device
tensors  the tensors of a checkpoint: names, shapes, forms
"""
