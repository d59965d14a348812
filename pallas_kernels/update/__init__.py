"""The cache update of a layer, in one launch."""
