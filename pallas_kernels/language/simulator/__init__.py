"""The machine that runs kernel bodies in NumPy, all blocks and lanes at once, and checks them for races.

tensor_memory  products whose sums are in tensor memory, on Blackwell
tensor_cores   matrix products on Hopper, and warpgroups in roles
barriers       barriers in shared memory, and copies that they wait for
lanes          loads, stores, shuffles, barriers and control flow
arithmetic     what each lane computes by itself, and which results are undefined
shared         shared memory: who accessed what last, and what copies and products that run may still access
memory         bytes, which of them were never written, and which lanes accessed device memory last
clocks         what has happened before what: vector clocks of warps, products and barriers
"""
