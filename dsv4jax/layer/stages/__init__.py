"""The five stages of an attention layer, each of which always succeeds.

    x -> intake -> queries -> selection -> attention -> output -> y

compose    which stages serve a layer: fused ones where their ops have one backend, else those that go step by step
steps      the stages step by step, one op after another, in whatever backends these have
interface  what a stage takes and gives
entries    the entries that a call completed, for a probe
weights    the weights that heads give to keys, computed beside attention
probe      what is looked at on the way, and what is changed
"""
