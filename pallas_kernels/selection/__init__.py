"""The positions of the largest scores."""
