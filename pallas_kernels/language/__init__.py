"""The language that kernel bodies are written in, and the two machines that run it.

launch         one launch: a body over a grid of blocks
tensor_memory  words for products that sum up in tensor memory, on Blackwell
tensor_cores   words for products of matrices, and for roles of warpgroups
barriers       barriers in shared memory, at which warps wait for each other
shared         arrays in a block's shared memory
lanes          arrays in device memory, and rows spread over teams of lanes
machine        one number per lane, and what a lane can do that is no formula
checks         what instructions take; both machines ask before they use one
carries        what loops carry: any pytree of values
regions        where a value may be used: inside the scope that made it
kinds          the kinds of values, and which numbers each takes
target         the table of GPUs, and what is compiled for
ptx            the machine that emits a Mosaic GPU kernel
simulator      the machine that runs kernels in NumPy, with checks
"""
