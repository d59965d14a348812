"""Benchmarks of the kernels: ``python -m pallas_kernels.bench cache``, then ``plot``."""
