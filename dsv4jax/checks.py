"""Checks of shapes and dtypes at trace time."""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp

FLOATS = (jnp.float32, jnp.bfloat16)  # dtypes allowed for inputs and weights


def check_array(name: str, x: Any, axes: dict[str, int | None], dtype: Any) -> None:
    """Check that an array has the expected rank, sizes and dtype.

    Args:
      name: the argument's name, for the message.
      x: array or tracer.
      axes: the name of each axis -> its size, or None if any size is allowed.
      dtype: the allowed dtype, or a tuple of them.

    Raises:
      AssertionError: (chex) the message names the argument, what was expected and what was given.
    """
    wanted = ", ".join(axis if size is None else f"{axis}={size}" for axis, size in axes.items())
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    kind = " or ".join(jnp.dtype(one).name for one in dtypes)
    found = f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "dtype") else f"{type(x).__name__}"
    message = f"{name}: expected {kind} [{wanted}], got {found}"
    if not hasattr(x, "dtype"):
        raise AssertionError(message)
    chex.assert_shape(x, tuple(axes.values()), custom_message=message)
    if x.dtype not in dtypes:
        chex.assert_type(x, dtypes[0], custom_message=message)


def check_batch(**rows: Any) -> None:
    """Check that all arguments are int32 vectors of one length, with an element per batch row, such as slots."""
    size: int | None = None
    for name, x in rows.items():
        check_array(name, x, {"B": size}, jnp.int32)
        size = x.shape[0]


def check_one_shard(num_free: Any, name: str, *, on_host: bool = False) -> None:
    """Check that tables belong to a single shard, judging by ``num_free`` [..., shards].

    Slots and block ids are local to a shard, so they are ambiguous in a cache of several. Raises ValueError.
    """
    if (shards := num_free.shape[-1]) != 1:
        remedy = "use it inside jax.shard_map"
        if on_host:
            remedy = "give it one shard's part of each leaf, cut as partition_specs says, under a plan of that size"
        raise ValueError(f"{name}: this cache has {shards} shards with slots and blocks of their own: {remedy}")
