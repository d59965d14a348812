"""Operations on whole requests.

fork       several continuations of one request, which share what it has stored
speculate  drafts for speculative decoding, of which only the accepted tokens are stored
snapshot   requests as values, taken out of one cache and inserted into another
storage    caches and snapshots in files
"""
