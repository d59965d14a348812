"""Names for pytrees about which nothing is assumed, and what simulated kernels find in results at first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A checker of types looks into none of them.
type Tree = Any  # a pytree: of arrays, of their shapes and dtypes, of buffers, or of values
type Structure = Any  # what ``jax.tree.structure`` returns, which jaxlib gives no type


def uninitialised(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return an array of a number that no kernel stores on purpose: NaN, True, or the largest integer."""
    is_float, is_bool = (jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.floating, jnp.bool))
    return np.full(leaf.shape, np.nan if is_float else is_bool or jnp.iinfo(leaf.dtype).max, leaf.dtype)
