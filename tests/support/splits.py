"""Four requests fed in chunks, with what any split of them must give. Tests of the rules use it."""

import functools

import jax.numpy as jnp

import dsv4jax as d4
from tests.support import driver
from tests.support.driver import (
    BATCH,
    CFG,
    LAYERS,
    THREE_FORMATS,
    TOKENS,
    contents,
    even_split,
    feed,
    moved_values,
    random_params,
    sequence,
    small_plan,
)

# fp32 sums in another order: values of rms about 1 differ by a few 1e-7, entries and outputs by a few 1e-6.
TOLERANCE = 2e-5
# A stored value sits within fp32 rounding of a boundary between two codes about once in 2^24 / 2^4 values of FP8 and
# less often elsewhere; one moved scale takes a whole tile along.
MOVED = 1e-3

LENGTHS = (63, 37, 16, 50)


def inputs(lengths=LENGTHS, seed=0):
    return [sequence(seed + b, length, CFG.hidden_size) for b, length in enumerate(lengths)]


def admitted(n=BATCH, **options):
    cache, slots, ok = d4.admit(d4.init_cache(small_plan(**options)), n)
    assert ok
    return cache, slots


def run(splits, *, width=TOKENS, order=(0, 1, 2, 3), **options):
    """Feed the sequences of ``inputs`` in chunks. Returns (outputs [layer][row], cache, slots)."""
    cache, slots = admitted(**options)
    slots = slots[jnp.asarray(order)]
    outputs, cache = feed(random_params(), inputs(), cache, slots, splits, layers=LAYERS, width=width)
    return outputs, cache, slots


@functools.cache
def expected(name):
    """Return what every other split is compared with.

    This is one pass, or full chunks if a third step would have to be compiled.
    """
    whole = name in ("f32", "fp8_tile64, mxfp4, online")
    splits = [[length] if whole else even_split(length, TOKENS) for length in LENGTHS]
    with driver.BACKEND(None):  # of the default backend, whichever one a test compares with it
        outputs, cache, slots = run(splits, width=64 if whole else TOKENS, **THREE_FORMATS[name])
    return outputs, [contents(cache, int(slot)) for slot in slots]


def assert_equal_up_to_rounding(name, outputs, cache, slots):
    expected_outputs, expected_contents = expected(name)
    held = [contents(cache, int(slot)) for slot in slots]
    moved, total = moved_values(held, expected_contents, TOLERANCE)
    moved_outputs, total_outputs = moved_values(outputs, expected_outputs, TOLERANCE)
    if name == "f32":
        assert moved == 0
        assert moved_outputs == 0
    else:
        assert moved <= MOVED * total, f"{moved} of {total} stored values differ"
        # A moved value of a key shows in each query that reads it.
        assert moved_outputs <= 0.02 * total_outputs, f"{moved_outputs} of {total_outputs} outputs differ"
