"""Low-rank deltas of linear weights (LoRA): two narrow factors beside a weight that stays as it is.

    x (W + scale up down)' = x W' + scale (x down') up',        scale = alpha / rank

The weight may be an array or stored, of one layer or of all its experts. Whoever multiplies by a weight does not ask:
the product of the weight itself is computed as without a delta, and what the deltas add in plain JAX beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import FLOATS, Tree, check_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is added to some rows of a weight [out, in], or of the weights of all experts [E, out, in]."""

    down: jax.Array  # f32 or bf16 [rank, in] or [E, rank, in]; PEFT's lora_A
    up: jax.Array  # f32 or bf16 [rows, rank] or [E, rows, rank]; PEFT's lora_B
    first: int = dataclasses.field(default=0, metadata={"static": True})  # row of the weight at which it begins
    alpha: float = dataclasses.field(metadata={"static": True})  # PEFT's lora_alpha

    @property
    def rank(self) -> int:
        return self.down.shape[-2]

    @property
    def rows(self) -> int:
        return self.up.shape[-2]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def widened(self, out: int) -> jax.Array:
        """Return what it adds to a weight of ``out`` rows: f32 [..., out, in]."""
        up, down = self.up.astype(jnp.float32), self.down.astype(jnp.float32)
        added = self.scale * jnp.matmul(up, down, precision=lax.Precision.HIGHEST)
        return _placed(jnp.swapaxes(added, -1, -2), self.first, out).swapaxes(-1, -2)

    def product(self, x: jax.Array, out: int, groups: int = 1) -> jax.Array:
        """Return what it adds to the product of x [..., in] with a weight [out, in]: f32 [..., out].

        With ``groups``, x is [..., groups, in] and the result [..., groups, out / groups].
        """
        narrow = self.scale * _product(x, self.down)
        if groups == 1:
            return _placed(_product(narrow, self.up), self.first, out)
        up = self.up.astype(jnp.float32).reshape(groups, out // groups, self.rank)
        return jnp.einsum("...gr,gor->...go", narrow, up, precision=lax.Precision.HIGHEST)

    def product_of_experts(self, x: jax.Array, experts: jax.Array, out: int) -> jax.Array:
        """Return what it adds to the products of x [G, tile, in] with the weights of experts int32 [G]: f32."""
        down, up = self.down[experts].astype(jnp.float32), self.up[experts].astype(jnp.float32)
        narrow = jnp.einsum("gti,gri->gtr", x.astype(jnp.float32), down, precision=lax.Precision.HIGHEST)
        added = jnp.einsum("gtr,gor->gto", self.scale * narrow, up, precision=lax.Precision.HIGHEST)
        return _placed(added, self.first, out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightWithDelta:
    """A linear weight with low-rank deltas beside it. It stands wherever a weight does.

    What stands side by side in one weight, such as W_qa and W_kv, has a delta for each.
    """

    base: Tree  # an array, a StoredWeight or StoredExperts
    deltas: tuple[Delta, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: (out, in), or (E, out, in) of experts."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        return len(self.base.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight without its deltas."""
        return self.base.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its deltas."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def add_to(self, product: jax.Array, x: jax.Array, groups: int = 1) -> jax.Array:
        """Add what the deltas contribute to ``product``, f32, of x with the weight alone."""
        for delta in self.deltas:
            product = product + delta.product(x, self.shape[0], groups)
        return product

    def add_to_experts(self, product: jax.Array, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Add what the deltas contribute to ``product``, f32 [G, tile, out], of x with the weights of experts [G]."""
        for delta in self.deltas:
            product = product + delta.product_of_experts(x, experts, self.shape[1])
        return product

    def merged(self, wide: jax.Array) -> jax.Array:
        """Return ``wide``, the weight as one array, plus the deltas, in its dtype and rounded once."""
        total = wide.astype(jnp.float32)
        for delta in self.deltas:
            total = total + delta.widened(self.shape[-2])
        return total.astype(wide.dtype)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the deltas of a weight of this shape.

        Raises:
          AssertionError: (chex) a factor's shape or dtype is wrong.
          ValueError: a delta is of rows that the weight does not have.
        """
        experts = {f"axis {i}": size for i, size in enumerate(shape[:-2])}
        for number, delta in enumerate(self.deltas):
            full = f"{name}.deltas[{number}]"
            check_array(f"{full}.down", delta.down, {**experts, "rank": None, "in": shape[-1]}, FLOATS)
            check_array(f"{full}.up", delta.up, {**experts, "rows": None, "rank": delta.rank}, FLOATS)
            if delta.first < 0 or delta.first + delta.rows > shape[-2]:
                said = f"{full} is of rows {delta.first} to {delta.first + delta.rows}"
                raise ValueError(f"{said}, the weight has {shape[-2]}")


def has_delta(node: object) -> bool:
    """Whether a node of a tree is a weight with deltas; for ``is_leaf`` of tree functions."""
    return isinstance(node, WeightWithDelta)


def split_delta(weight: Tree) -> tuple[Tree, tuple[Delta, ...]]:
    """Return a weight without its deltas, and the deltas, of which there may be none."""
    return (weight.base, weight.deltas) if isinstance(weight, WeightWithDelta) else (weight, ())


def checked_base(name: str, weight: Tree, shape: tuple[int, ...]) -> tuple[str, Tree]:
    """Check the deltas of a weight of this shape, if there are any. Returns the name and the weight without them."""
    if not isinstance(weight, WeightWithDelta):
        return name, weight
    weight.check(name, shape)
    return f"{name}.base", weight.base


def with_delta(weight: Tree, deltas: Sequence[Delta]) -> Tree:
    """Return a weight with deltas besides those that it has. Without any it stays what it is."""
    base, old = split_delta(weight)
    deltas = (*old, *deltas)
    return WeightWithDelta(base=base, deltas=deltas) if deltas else base


def of_rows(deltas: Sequence[Delta], start: int, stop: int) -> tuple[Delta, ...]:
    """Return the deltas of rows [start, stop) of a weight, of that part."""
    found = []
    for delta in deltas:
        low, high = max(start, delta.first), min(stop, delta.first + delta.rows)
        if low < high:
            up = delta.up[..., low - delta.first : high - delta.first, :]
            found.append(dataclasses.replace(delta, up=up, first=low - start))
    return tuple(found)


def moved(deltas: Sequence[Delta], rows: int) -> tuple[Delta, ...]:
    """Return the deltas of a weight that has so many rows above it now."""
    return tuple(dataclasses.replace(delta, first=delta.first + rows) for delta in deltas)


def _product(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply x [..., in] by factor [out, in]: f32. Of bf16 by bf16 on the tensor cores, else in full f32."""
    dtype = x.dtype if x.dtype == factor.dtype else jnp.float32
    factors = x.astype(dtype), factor.astype(dtype)
    precision = lax.Precision.HIGHEST
    return jnp.einsum("...i,oi->...o", *factors, precision=precision, preferred_element_type=jnp.float32)


def _placed(columns: jax.Array, first: int, count: int) -> jax.Array:
    """Columns [..., n] among ``count``, from number ``first`` on; the others are 0."""
    after = count - first - columns.shape[-1]
    return columns if not first and not after else jnp.pad(columns, [(0, 0)] * (columns.ndim - 1) + [(first, after)])
