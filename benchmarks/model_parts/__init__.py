"""Timings of the parts of a whole model beside attention, which ``python -m benchmarks.model --part`` runs.

experts  the routed experts of a layer
router  picks, weights and tiles of a layer
"""
