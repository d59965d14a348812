"""Benchmarks of the kernels, timed as the library calls them: ``python -m benchmarks.kernels COMMAND``.

cache                      the cache update of a layer, and the gather of stored rows
attention indexer topk     the kernels that read the cache
step                       a decode step of all layers
tune                       attention, indexer and top-k, for several ways to divide their work
plot                       draws the picture of a file of results, as SVG
report                     writes the tables and pictures of README.md and docs/

``results`` holds the recorded lines, which ``lines`` describes.
"""
