"""Forms of the ops of a layer, in plain JAX, in which what a request gets does not depend on the batch, bit for bit.

XLA adds in another order where a shape is another one: its products, its reductions, and what it merges with them are
chosen by the shape. So these forms compute in shapes that do not change: products in tiles of ``ROWS`` rows, attention
and scores for each token alone, entries for each block alone. Each is the plain form, called with such a part of its
arguments.

products  those with the layer's weights, and what new tokens contribute
update    the entries that new tokens complete, and the tails
reads     scores of the indexer, and attention
"""
