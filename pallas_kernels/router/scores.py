"""The score of an expert, sqrt(softplus(logit)), in a lane."""

from __future__ import annotations

from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import Value, select

_TERMS = 8  # of the series below, whose remainder is below 2^-28 of the sum
_FAR = -16.0  # below this softplus(x) is e^x to within 2^-24 of it


def sqrt_softplus(machine: Machine, x: Value) -> Value:
    """Return sqrt(log(1 + e^x)) of an f32, within some 4 ulp and |x| 2^-25; NaN of NaN.

    softplus(x) = max(x, 0) + log1p(u) with u = e^-|x|, and log1p(u) = 2 atanh(s) with s = u / (2 + u), at most 1/3. All
    terms of the series s + s^3 / 3 + s^5 / 5 + ... are positive, so nothing cancels. Far below 0 the score is
    e^(x / 2), which is not 0 before x is -174, where e^x is 0 from -87 on.
    """
    u = machine.exp(machine.from_bits(machine.bits(x) | -(1 << 31)))  # of -|x|
    s = machine.divide(u, u + 2.0)
    square = s * s
    series = machine.constant(1 / (2 * _TERMS + 1), "f32")
    for n in reversed(range(_TERMS)):
        series = machine.fma(series, square, machine.constant(1 / (2 * n + 1), "f32"))
    softplus = machine.fma(s + s, series, x.maximum(0.0))
    root = softplus * machine.inverse_sqrt(softplus)
    return select(x < _FAR, machine.exp(x * 0.5), root)
