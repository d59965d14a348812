"""The language that kernel bodies are written in, and its two implementations, called machines.

One machine emits GPU code. The other, the simulator, runs the same body in NumPy with checks.

launch         one launch: a body run on a grid of blocks
tensor_memory  operations on products whose sums are in tensor memory, on Blackwell
tensor_cores   matrix products, and roles of warpgroups
pipeline       stages of shared memory that some warps fill and others read
fragment       matrices in the registers of a warpgroup, with arithmetic by row and by column
tiles          tiles that know the dtype of their elements
barriers       barriers in shared memory, at which warps wait for each other
shared         arrays in a block's shared memory
lanes          arrays in device memory, and rows spread over teams of lanes
machine        what a lane can do: arithmetic, loads, stores, shuffles, barriers, branches and loops
values         numbers, one per lane, and arithmetic with them
checks         checks of instructions' operands, used by both machines
carries        what loops carry: any pytree of values
regions        where a value may be used: only within the scope that made it
kinds          the kinds of values, and which numbers each can represent
target         the table of supported GPUs, and which of them is compiled for
ptx            the machine that emits a Mosaic GPU kernel
simulator      the machine that runs kernels in NumPy, with checks
"""
