"""The cache itself: its contents, and the tables that say which request holds what.

state       the sliding windows and tails, for all layers of a kind
pool        compressed entries in blocks, found through the block table
allocation  blocks for the next tokens of a batch, by a kernel where there is one
tables      slots, blocks and lengths, and every change to them as a pure function
stack       layers of one kind stacked along an axis, and the stacks of all kinds
checked     a debug mode that raises where an ordinary program skips a row
cache       ``KVCache`` and the five calls that drive it
grants      what a batch is granted row by row, and why a row is refused
create      empty caches: on one device, over a mesh, or as shapes alone
sharding    several devices: requests split over one axis of a mesh, heads over another
shards      calls on a cache that knows its mesh, mapped over its shards
inspection  reports on what a cache holds, and checks that it is consistent
plots       pictures of which request holds which block
"""

from dsv4jax.cache.cache import tree_bytes
from dsv4jax.cache.create import abstract_cache
from dsv4jax.cache.grants import Grants, Refusal, explain_forward, prepare_rows
from dsv4jax.cache.inspection import CacheReport
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.cache.tables import Tables

__all__ = [
    "CacheReport",
    "Grants",
    "LayerStack",
    "PooledLayer",
    "Refusal",
    "SlidingWindow",
    "Tables",
    "abstract_cache",
    "explain_forward",
    "prepare_rows",
    "tree_bytes",
]
