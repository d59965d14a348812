"""The positions of the largest scores.

call         ``top_k``, and the order of its steps
bound        a number that at least k scores reach, and as a rule not many more
lists        the scores that reach it
largest      the k largest of these, in the order of their positions
kth_largest  the k-th largest of many numbers
marks        a bitmap of positions
part         a block's part of a row, and how its lanes read it
split        how a row lies over lanes and blocks
memory       the shared memory of a block
"""
