"""Benchmarks of the kernels, timed as the library calls them: ``python -m benchmarks.kernels COMMAND``.

cache                      the cache update of a layer, and the gather of stored rows
attention indexer topk     what reads the cache
step                       a decode step of all layers
tune                       attention, indexer and top-k by ways to share their work
plot                       the picture of a file of results

``results`` holds the measured lines that README.md quotes.
"""
