"""Benchmarks of the kernels, timed as the library calls them: ``python -m benchmarks.kernels COMMAND``.

cache                      the cache update of a layer, and the gather of stored rows
attention indexer topk     the kernels that read the cache
step                       a decode step of all layers
tune                       attention, indexer and top-k, for several ways to divide their work
plot                       draws the picture of a file of results

``results`` holds the measured lines that README.md quotes.
"""
