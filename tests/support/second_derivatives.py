"""Second derivatives, forward over reverse mode, against differences of the gradient, and of plain straight-through."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dsv4jax.layer import reference

# Of a central difference of the gradient. Its error is of the second order of the step, and by it f32's rounding of the
# gradient is divided: with functions whose inputs and outputs have size 1, 5e-5 to 1.3e-3 was seen. With a derivative
# that is missing on one path of several, 0.4 and more.
STEP, DIFFERENCE = 5e-3, 5e-3
SAME = 5e-5  # f32 sums in another order, as of first derivatives


def with_second(function: Callable[[Any], jax.Array]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The gradient of a scalar function at x, and its derivative along u: (x, u) -> two trees like x."""

    def both(x: Any, u: Any) -> tuple[Any, Any]:
        return jax.jvp(jax.grad(function), (x,), (u,))

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})


def check_second_derivative(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> None:
    """Compare the second derivative of a smooth function at x with a difference, and require that it is symmetric."""
    both = with_second(function)
    u, v = (jnp.asarray(np.random.default_rng(seed).standard_normal(x.shape, np.float32)) for seed in (0, 1))
    (_, of_u), (_, of_v) = both(x, u), both(x, v)
    (after, _), (before, _) = (both(x + sign * STEP * u, u) for sign in (1, -1))
    error = relative_error(of_u, (after - before) / (2 * STEP))
    assert error < DIFFERENCE, error
    assert_symmetric(u, of_u, v, of_v)


def assert_symmetric(u: Any, of_u: Any, v: Any, of_v: Any) -> None:
    """Require of the second derivatives along two directions that one along the other is the other along the one."""
    u, of_u, v, of_v = (np.asarray(part, np.float64).ravel() for part in (u, of_u, v, of_v))
    assert abs(v @ of_u - u @ of_v) < SAME * np.linalg.norm(v) * np.linalg.norm(of_u), (v @ of_u, u @ of_v)


def relative_error(found: Any, wanted: Any) -> float:
    """The norm of the difference of two arrays, relative to that of the wanted one."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def plainly_through(rounded: jax.Array, exact: jax.Array) -> jax.Array:
    """What ``straight_through`` is, but for the last bit, written so that JAX has all its derivatives."""
    return exact + lax.stop_gradient(rounded - exact)


def round_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``reference_layer`` round rows and keys without the library's rule of derivatives."""

    def rows_of(x: jax.Array, rows: Any, rope_dim: int) -> jax.Array:
        return plainly_through(rows.decode(rows.encode(lax.stop_gradient(x), rope_dim)), x)

    def keys_of(x: jax.Array, keys: Any) -> jax.Array:
        return plainly_through(keys.decode(keys.encode(lax.stop_gradient(x))), x)

    monkeypatch.setattr(reference, "_rounded", rows_of)
    monkeypatch.setattr(reference, "_rounded_keys", keys_of)
