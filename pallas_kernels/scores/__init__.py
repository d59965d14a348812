"""The scores of the lightning indexer."""
