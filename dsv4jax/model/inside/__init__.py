"""A pass of a model from within: its layers, looking inside, and changing what is computed.

blocks       the layers of a pass
captures     what can be captured and patched, by name, and what a pass returns of it
devices      several devices: where each weight lives, and what they send to one another
host_memory  experts in the host's memory, and fetching those that are picked
lens         what the head makes of the streams after any layer
weights      the weights that heads give to keys
choices      the experts and entries that a pass uses, as values
"""
