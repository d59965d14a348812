"""Operations on whole requests.

placing       the shard of a cache over a mesh that takes a new request
fork          several continuations of one request, which share what it has stored
speculate     drafts for speculative decoding, of which only the accepted tokens are stored
snapshot      requests as values, taken out of one cache and inserted into another
prefixes      a store of prefixes: prompts that begin alike are computed once
prefix        a prefix, the hashes by which it is found, and a report
prefix_slots  what that store reads of a cache, and does to it
prefix_files  what it writes to a file
storage       caches and snapshots in files
dividing      a cache that is restored over another number of shards
"""

from dsv4jax.requests.placing import admit_anywhere, choose_shards
from dsv4jax.requests.prefix import Prefix, PrefixReport
from dsv4jax.requests.prefixes import PrefixStore
from dsv4jax.requests.snapshot import Snapshot
from dsv4jax.requests.speculate import StagedLayer
from dsv4jax.requests.storage import restore, save

__all__ = [
    "Prefix",
    "PrefixReport",
    "PrefixStore",
    "Snapshot",
    "StagedLayer",
    "admit_anywhere",
    "choose_shards",
    "restore",
    "save",
]
