"""Timings of the parts of a whole model beside attention, which ``python -m benchmarks.model --part`` runs.

experts  the routed experts of a layer
shared_expert  the expert of every token
router  picks, weights and tiles of a layer
hyper_connections  what stands between two sublayers
head  the head, and drawing tokens
drafts  drafts by DSpark: their parts, and passes of the loop with them
whole  a layer, a step, generation and a prompt of the whole model
mesh  the whole model on several devices
host_experts  a model that keeps experts of some layers in host memory
"""
