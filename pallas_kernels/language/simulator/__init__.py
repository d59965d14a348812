"""The machine that runs kernel bodies in NumPy, all blocks and lanes at once, and checks them for races.

tensor_memory  products whose sums are in tensor memory, on Blackwell
tensor_cores   matrix products on Hopper, and warpgroups in roles
barriers       barriers in shared memory, and copies that they wait for
lanes          loads, stores, shuffles, barriers and control flow
arithmetic     what each lane computes by itself, and which results are undefined
memory         bytes, which lanes accessed each of them last, and which were never written
"""
