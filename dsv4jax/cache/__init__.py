"""What a cache holds, and who holds what in it.

state       the sliding windows, and the state of a kind's layers as a whole
pool        compressed entries in blocks, found through the block table
tables      who holds which slots and blocks: every change of hands as a pure function
stack       layers of one kind side by side, and the stacks of all kinds
cache       ``KVCache`` and the five calls that drive it
create      empty caches: on one device, over a mesh, as shapes alone
sharding    several devices: requests over one axis of a mesh, heads over another
inspection  what a cache holds, and whether it is sound
plots       pictures of who holds which block
"""
