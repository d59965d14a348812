"""Operations on whole requests.

fork       several continuations of one request, which share what it has stored
speculate  drafts for speculative decoding, of which only the accepted tokens are stored
snapshot   requests as values, taken out of one cache and inserted into another
storage    caches and snapshots in files
"""

from dsv4jax.requests.snapshot import Snapshot
from dsv4jax.requests.speculate import StagedLayer
from dsv4jax.requests.storage import restore, save

__all__ = ["Snapshot", "StagedLayer", "restore", "save"]
