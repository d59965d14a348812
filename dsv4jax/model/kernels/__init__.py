"""Implementations of the model's ops that call ``pallas_kernels``, registered as those of layers are.

base  what all of them have in common
"""
