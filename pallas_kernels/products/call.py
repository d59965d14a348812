"""Products of a few rows with a stored weight."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.language import target
from pallas_kernels.language.launch import launch
from pallas_kernels.products import sm90
from pallas_kernels.products.split import fastest_split


def product(x, weight, scales=None, *, block=(128, 128), groups=1, dtype=jnp.float32, simulate=False, **tuned) -> Any:
    rows, width = x.shape
    outputs, inputs = weight.shape
    chunk = 128 // weight.dtype.itemsize
    split = tuned.pop("split", None) or fastest_split(outputs // groups, inputs, groups, chunk, target.gpu_or_first())
    columns = tuned.pop("columns", None) or min(64, -(-rows // 8) * 8)
    tuning = sm90.Tuning(split=split, groups=groups, columns=columns, rows=rows, inputs=chunk, **tuned)
    if scales is not None:
        weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
    return launch(
        functools.partial(sm90.body, tuning, block),
        name="product",
        grid=tuning.grid(),
        inputs=(x, weight, scales),
        state=jax.ShapeDtypeStruct((rows, outputs), dtype),
        simulate=simulate,
    )
