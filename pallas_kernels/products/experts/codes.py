"""FP4 codes in an order that takes the fewest instructions to widen: to bf16, or to E4M3 beside rows in FP8.

**To bf16.** A code has four bits: sign, two of the exponent, one of the fraction. In a bf16 they belong at bits 15, 8,
7 and 6. Two words hold 16 codes, that is eight pairs of adjacent ones, whose bits are ``SHIFTS`` lower than they belong
in the low half of a word for the first code of a pair, and 16 higher than that for the second: all modulo 32. Three
pairs are in each word. The bits of the other two are where these leave room. They make a word of their own, of which
those in ``KEPT`` come from the first word, and the others from the second word, where they are ``MERGED`` lower.

    pair = rotate left (word, shift) & 0x81C081C0

**To E4M3.** A word holds eight codes, whose magnitudes stay where they are: they select bytes of a table. The signs of
the first four are the top bits of the word's bytes, where they belong in four E4M3. Those of the other four are four
bits lower.

    signs = word & 0x80808080, word << 4 & 0x80808080
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products.problem import ACTIVATIONS

SHIFTS = (0, 4, 10), (0, 4, 10), (6, 12)  # of the pairs in the first word, in the second, and in the one made of both
KEPT, MERGED = 0x06030603, 2
_PLACES = 6, 7, 8, 15  # in a bf16 of a code's bits, from the lowest on
_BITS, _WORD, _CODES = 4, 32, 8
_GROUP_BYTES = 8  # of 16 codes


def interleaved(codes: jax.Array, activations: str = "bf16") -> jax.Array:
    """Return FP4 codes, uint8 [..., n] of two each with the first in the low bits, in the order for ``activations``.

    They are "bf16" or "fp8", as of ``ExpertsSpec``. Raises ValueError for others, and unless n is a multiple of 8.
    """
    return _moved(codes, activations, back=False)


def in_order(codes: jax.Array, activations: str = "bf16") -> jax.Array:
    """Return interleaved codes, uint8 [..., n], in the order that they had."""
    return _moved(codes, activations, back=True)


type _Moves = dict[tuple[int, int, int], int]


@functools.cache
def _moves(activations: str) -> _Moves:
    """Return which bits move: (word in order, word in this order, bits that they rotate left) -> mask in the former."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")
    return _moves_for_e4m3() if activations == "fp8" else _moves_for_bf16()


def _moves_for_e4m3() -> _Moves:
    found: _Moves = {}
    for word, number, bit in itertools.product(range(2), range(_CODES), range(_BITS)):
        source = to = number * _BITS + bit
        if bit == _BITS - 1:
            later, place = divmod(number, _CODES // 2)
            to = (place + 1) * 8 - 1 - later * _BITS
        key = word, word, (to - source) % _WORD
        found[key] = found.get(key, 0) | 1 << source
    return found


def _moves_for_bf16() -> _Moves:
    found: _Moves = {}
    pairs = [(of, shift) for of, shifts in enumerate(SHIFTS) for shift in shifts]
    for pair, (of, shift) in enumerate(pairs):
        for half in range(2):
            number = 2 * pair + half
            for bit, place in enumerate(_PLACES):
                to, at = of, (place + _WORD // 2 * half - shift) % _WORD
                if of == 2:
                    is_first = KEPT >> at & 1
                    to, at = (0, at) if is_first else (1, at - MERGED)
                source = number % _CODES * _BITS + bit
                key = number // _CODES, to, (at - source) % _WORD
                found[key] = found.get(key, 0) | 1 << source
    return found


@functools.partial(jax.jit, static_argnames=("activations", "back"))
def _moved(codes: jax.Array, activations: str, *, back: bool) -> jax.Array:
    if codes.dtype != jnp.uint8 or codes.shape[-1] % _GROUP_BYTES:
        raise ValueError(f"codes: expected uint8 [..., a multiple of {_GROUP_BYTES}], got {codes.dtype} {codes.shape}")
    words = lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2, 4), jnp.uint32)
    made = [jnp.zeros(words.shape[:-1], jnp.uint32)] * 2
    for (source, to, turn), bits in _moves(activations).items():
        mask = jnp.uint32(bits)
        if back:
            made[source] = made[source] | (_rotated(words[..., to], -turn % _WORD) & mask)
        else:
            made[to] = made[to] | _rotated(words[..., source] & mask, turn)
    return lax.bitcast_convert_type(jnp.stack(made, -1), jnp.uint8).reshape(codes.shape)


def _rotated(words: jax.Array, turn: int) -> jax.Array:
    return words << turn | words >> (_WORD - turn) if turn else words
