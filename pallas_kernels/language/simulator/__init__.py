"""The machine that runs kernel bodies in NumPy, all blocks and lanes at once, and checks them for races.

tensor_memory  products that sum up in tensor memory, on Blackwell
tensor_cores   products of matrices, on Hopper, and warpgroups in roles
lanes          loads, stores, shuffles, barriers, control
arithmetic     what a lane computes for itself, with what follows from values that mean nothing
memory         bytes, who touched each of them last, and which were never written
"""
