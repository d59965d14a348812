"""Weights of an attention layer: the pytree that a layer reads, and the checkpoints that fill it."""
