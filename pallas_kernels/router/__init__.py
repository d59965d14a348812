"""The router of a mixture of experts: which experts each token goes to, and which tokens each expert multiplies.

call     ``route``, and which launches do it
product  logits of few tokens, on Hopper
scores   the score of a logit
picks    the picks of a token, by a warp
lists    pairs of a token and an expert in tiles, by the warps of some blocks
tiles    what tiles are, and the same in plain JAX
"""
