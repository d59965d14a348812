"""The score of an expert, sqrt(softplus(logit)), in a lane."""

from __future__ import annotations

from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import Value, select

# Of log1p(u) / u for u in [0, 1], the constant first: within 2^-25 of it, by Lawson's iteration.
_LOG1P = (
    0.99999997,
    -0.499994931,
    0.333190968,
    -0.24842982,
    0.19106006,
    -0.136632442,
    0.0782259335,
    -0.0295052275,
    0.00523269146,
)
_FAR = -16.0  # below this softplus(x) is e^x to within 2^-24 of it
_GUESS = 0x5F3759DF  # this less half of a number's bits are the bits of its inverse root, within 4 %
_STEPS = 3  # of Newton's method, which end within 2^-23 or so
_LARGEST = 1e30  # from here on a score is 1e15 or more


def sqrt_softplus(machine: Machine, x: Value) -> Value:
    """Return sqrt(log(1 + e^x)) of an f32, within 2^-21 + |x| 2^-24 of it; NaN of NaN, and 1e15 above 1e30.

    softplus(x) = max(x, 0) + log1p(u) with u = e^-|x|. Far below 0 the score is e^(x / 2), which is not 0 before x is
    -174, where e^x is 0 from -87 on. Nothing here is a call, and there are few instructions: where the L2 cache is
    cold, a launch waits for its instructions too.
    """
    u = machine.exp(machine.from_bits(machine.bits(x) | -(1 << 31)))  # of -|x|
    series = machine.constant(_LOG1P[-1], "f32")
    for coefficient in reversed(_LOG1P[:-1]):
        series = machine.fma(series, u, machine.constant(coefficient, "f32"))
    softplus = machine.fma(series, u, x.maximum(0.0).minimum(_LARGEST))
    inverse = _inverse_root(machine, softplus)
    root = softplus * inverse
    root = machine.fma(machine.fma(root * -1.0, root, softplus), inverse * 0.5, root)
    return select(x < _FAR, machine.exp(x * 0.5), root)


def _inverse_root(machine: Machine, x: Value) -> Value:
    guess = machine.from_bits((machine.bits(x) >> 1) * -1 + _GUESS)
    half = x * -0.5
    for _ in range(_STEPS):
        guess = guess * machine.fma(half * guess, guess, machine.constant(1.5, "f32"))
    return guess
