"""Generating texts: from prompts to new tokens, in compiled loops.

sampling   drawing tokens, and accepting drafts
drafting   drafts for the loop, whichever block makes them
state      texts in a queue, the rows that work on them, and what else a pass hands to the next
seats      which waiting texts get a row and blocks, and which rows give theirs up
loop       the compiled programs: storing prompts, and passes of sampling, drafts and stopping
held       texts that caches still hold from one call to the next
prefill    which rows a pass over prompts stores
prefixes   beginnings of prompts, kept while texts are generated
prompts    what a call is given: prompts, stop tokens, room for them
generator  prompts in, new tokens out
"""
