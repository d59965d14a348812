"""Kernels with faults, to see whether the simulator finds them: python -m tests.mutants

faults    the faults, as machines that do something too early, too late, or not at all
kernels   a small run of every kernel that has a pipeline
"""
