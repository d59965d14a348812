"""Benchmarks of the kernels, timed as the library calls them: ``python -m benchmarks.kernels COMMAND``.

cache                      the cache update of a layer, and the gather of stored rows
attention indexer topk     what reads the cache
step                       a decode step of all layers
tune                       attention, indexer and top-k by ways to share their work
plot                       the picture of a file of lines, as SVG
report                     the tables and pictures of README.md and docs/speed.md

``results`` holds the recorded lines, which ``lines`` describes.
"""
