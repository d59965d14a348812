"""Names for pytrees about which nothing is assumed. A checker of types looks into none of them."""

from typing import Any

type Tree = Any  # a pytree: of arrays, of their shapes and dtypes, of buffers, or of values
type Structure = Any  # what ``jax.tree.structure`` returns, which jaxlib gives no type
