"""Numbers that were found by timing kernels on a card, a module for each card. No kernel's meaning depends on them.

h200   an NVIDIA H200; also used on other cards, none of which has been measured
"""
