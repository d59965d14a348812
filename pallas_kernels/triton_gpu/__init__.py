"""GPU kernels of the cache written in Triton, for every NVIDIA GPU since Ampere. They need the extra ``triton``.

attention  attention over the stored window rows and entries
device     the GPU that kernels are compiled for
interpreter  kernels in Triton's interpreter, over NumPy arrays
launch     launches through jax-triton, or in Triton's interpreter
numbers    8-bit and 4-bit floats on their bits
"""

from pallas_kernels.triton_gpu.attention import decode_attention, unsupported_attention

__all__ = ["decode_attention", "unsupported_attention"]
