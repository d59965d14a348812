"""The router of a mixture of experts: which experts each token goes to, and which tokens each expert multiplies.

tiles   pairs of a token and an expert, cut into tiles of one expert
"""
