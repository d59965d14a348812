"""Whole requests.

fork       several continuations of a request, which share what it has stored
speculate  drafts: staged beside the cache, and stored as far as they are accepted
snapshot   requests as values: taken out of one cache, put into another
storage    caches and snapshots in files
"""
