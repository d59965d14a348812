"""The score of an expert, sqrt(softplus(logit)), in a lane."""

from __future__ import annotations

from pallas_kernels.language.tensor_cores import TensorCores
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
_LARGEST = 1e30  # from here on a score is 1e15 or more


def sqrt_softplus(machine: TensorCores, x: Value) -> Value:
    """Return sqrt(log(1 + e^x)) of an f32, within 2^-21 + |x| 2^-24 of it; NaN of NaN, and 1e15 above 1e30.

    softplus(x) = max(x, 0) + log1p(u) with u = e^-|x|. Far below 0 the score is e^(x / 2), which is not 0 before x is
    -174, where e^x is 0 from -87 on. Nothing here is a call, which would make scores wait for each other.
    """
    u = machine.exp(machine.from_bits(machine.bits(x) | -(1 << 31)))  # of -|x|
    series = machine.constant(_LOG1P[-1], "f32")
    for coefficient in reversed(_LOG1P[:-1]):
        series = machine.fma(series, u, machine.constant(coefficient, "f32"))
    softplus = machine.fma(series, u, x.maximum(0.0).minimum(_LARGEST))
    # Far below 0 softplus may have no root that is defined here, and is not used.
    return select(x < _FAR, machine.exp(x * 0.5), softplus * machine.normal_inverse_sqrt(softplus))
