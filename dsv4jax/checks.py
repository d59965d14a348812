"""Checks of what a call is given, made where it is traced: shapes, dtypes, whole numbers, values that are known."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

type Tree = Any  # a pytree, or a part of one, about which nothing is assumed
type Named = dict[str, Any]  # things of several types by name: arguments, fields, captures

FLOATS = (jnp.float32, jnp.bfloat16)  # dtypes allowed for inputs and weights


def check_array(
    name: str, x: Tree, axes: Mapping[str, int | EllipsisType | None], dtype: DTypeLike | tuple[DTypeLike, ...]
) -> None:
    """Check that an array has the expected rank, sizes and dtype.

    Args:
      name: the argument's name, for the message.
      x: array or tracer.
      axes: the name of each axis -> its size, or None if any size is allowed; "..." -> ... stands for any axes.
      dtype: the allowed dtype, or a tuple of them.

    Raises:
      AssertionError: (chex) the message names the argument, what was expected and what was given.
    """
    wanted = ", ".join(axis if size in (None, ...) else f"{axis}={size}" for axis, size in axes.items())
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    kind = " or ".join(jnp.dtype(one).name for one in dtypes)
    found = f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "dtype") else f"{type(x).__name__}"
    message = f"{name}: expected {kind} [{wanted}], got {found}"
    if not hasattr(x, "dtype"):
        raise AssertionError(message)
    chex.assert_shape(x, tuple(axes.values()), custom_message=message)
    if x.dtype not in dtypes:
        chex.assert_type(x, dtypes[0], custom_message=message)


def check_batch(**rows: jax.Array) -> None:
    """Check that all arguments are int32 vectors of one length, with an element per batch row, such as slots."""
    size: int | None = None
    for name, x in rows.items():
        check_array(name, x, {"B": size}, jnp.int32)
        size = x.shape[0]


def check_type(name: str, value: object, wanted: type) -> None:
    """Require an instance of a class, for an argument that is easily confused with another.

    Raises:
      ValueError: it is something else. If that holds what is wanted, the message says in which field.
    """
    if isinstance(value, wanted):
        return
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    holding = [f".{field.name}" for field in fields if isinstance(getattr(value, field.name), wanted)]
    hint = f": give it {' or '.join(holding)}" if holding else ""
    raise ValueError(f"{name}: expected a {wanted.__name__}, got {type(value).__name__}{hint}")


def integer(name: str, value: Tree, least: int | None = None) -> int:
    """A static argument as an int: Python's, NumPy's or any other that is a whole number.

    Raises:
      ValueError: it is none, is traced, or is below ``least``; the message names the argument.
    """
    wanted = "an integer" if least is None else f"an integer of at least {least}"
    if isinstance(value, Tracer):
        raise ValueError(f"{name} must be {wanted} that is known when the call is traced, got a traced value: {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def integers(name: str, values: Tree, wanted: str, least: int | None = None) -> tuple[int, ...]:
    """A static argument of several whole numbers, as ints.

    Raises:
      ValueError: it is no sequence, and the message says that it must be what is ``wanted``; or as ``integer``.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be {wanted}, got {values!r}")
    return tuple(integer(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def known_size(size: object, otherwise: int) -> int:
    """The size of an axis, or another number where it is symbolic, as ``jax.export`` has them."""
    return size if isinstance(size, int) else otherwise


def real(name: str, value: object) -> float:
    """A static argument as a float: Python's, NumPy's, or an array [] of one.

    Raises:
      ValueError: it is no real number, or is traced; the message names the argument.
    """
    if isinstance(value, Tracer):
        raise ValueError(f"{name} must be a number that is known when the call is traced, got a traced value: {value}")
    number = value.item() if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0 else value
    if not isinstance(number, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(number)


def check_key(key: Tree) -> None:
    """Require a random key. ValueError otherwise."""
    try:
        jax.eval_shape(lambda key: jax.random.fold_in(key, 0), key)
    except (TypeError, ValueError) as error:
        raise ValueError(f"key must be a random key, such as jax.random.key(0), got {key!r}") from error


def check_dtype(name: str, dtype: DTypeLike, known: tuple[DTypeLike, ...]) -> None:
    """Require one of some dtypes. ValueError otherwise, for what is no dtype too."""
    names = [jnp.dtype(one).name for one in known]
    try:
        found = jnp.dtype(dtype).name
    except TypeError:
        found = dtype
    if found not in names:
        raise ValueError(f"{name} must be one of {names}, got {found!r}")


def check_concrete(name: str, tree: object, remedy: str) -> None:
    """Require values for a call that reads them on the host. ValueError under a trace, or if they were donated."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise ValueError(f"{name} reads values on the host, so it cannot be traced by jit or grad: {remedy}")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree)):
        raise ValueError(f"{name}: its arrays were donated to a jitted function and are gone: take what that returned")


def check_one_shard(num_free: jax.Array, name: str, *, on_host: bool = False) -> None:
    """Check that tables belong to a single shard, judging by ``num_free`` [..., shards].

    Slots and block ids are local to a shard, so they are ambiguous in a cache of several. Raises ValueError.
    """
    if (shards := num_free.shape[-1]) != 1:
        remedy = "use it inside jax.shard_map"
        if on_host:
            remedy = "give it one of them: sharding.shard_of(cache, number)"
        raise ValueError(f"{name}: this cache has {shards} shards with slots and blocks of their own: {remedy}")
