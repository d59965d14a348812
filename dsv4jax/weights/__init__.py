"""The weights of an attention layer.

params      the pytree of a layer's weights: parts side by side, shapes and shards
deltas      low-rank deltas beside a weight
stored      weights as checkpoints store them: FP8 codes and block scales
initial     random weights, for tests and demos
load        a layer's tensors under the names that they have in checkpoints
files       tensors in safetensors files
checkpoint  reading one layer's tensors from a folder of safetensors files
"""

from dsv4jax.weights.checkpoint import load_safetensors
from dsv4jax.weights.deltas import Delta, WeightWithDelta
from dsv4jax.weights.stored import StoredWeight

__all__ = ["Delta", "StoredWeight", "WeightWithDelta", "load_safetensors"]
