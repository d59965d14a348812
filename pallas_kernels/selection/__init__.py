"""Top-k: the positions of the largest scores.

call         ``top_k``, and the order of its steps
bound        a bound that at least k scores reach, but usually not many more
lists        lists of the scores that reach the bound
largest      the k largest of these, stored in the order of their positions
kth_largest  a search for the k-th largest of many numbers
marks        a bitmap of positions
part         a block's part of a row, and how its lanes read it
split        how a row is divided among lanes and blocks
memory       the shared memory of a block
"""
