"""The machine that emits MLIR and PTX into the body of a Mosaic GPU kernel.

tensor_memory  products whose sums are in tensor memory, on Blackwell
tensor_cores   matrix products, on Hopper
lanes          everything else
naming         the name of a kernel's module, which compilation caches look up
"""
