"""Products with weights that are stored as FP8, in plain JAX.

They are exact: a code times its scale is what the weight is, and sums are f32. For few tokens, as in decode, no wide
copy of a weight is made:

    on a CPU    rows are widened in tiles of at most ``TILE`` numbers, one after the other
    elsewhere   x is scaled, once per row of blocks, and multiplied with bare codes, which XLA converts as it loads them

Scaling x is exact as long as the products stay in the range of normal bf16 numbers, 2^-126 to 2^128. For many tokens
the weight is widened.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.checks import known_size
from dsv4jax.derivatives import refuse_derivative, straight_through
from dsv4jax.formats import fp8_tiles
from dsv4jax.weights.stored import CODES, SCALES, StoredWeight, as_bytes, per_number

FEW = 64  # tokens for which no wide copy of a weight is made
TILE = 1 << 18  # numbers of a weight that are widened at a time, in place of all
GROUP = 128  # inputs that are rounded to FP8 with one scale


def stored_product(x: jax.Array, weight: StoredWeight, groups: int) -> jax.Array:
    """Multiply x [M, groups, in] by weight [out, in], whose rows are divided over the groups.

    Returns f32 [M, groups, out / groups]. x is f32 or bf16. A product of bf16 by codes runs on the tensor cores,
    anything else in full f32.
    """
    weight = refuse_derivative(
        "a weight stored as FP8 has no derivative: differentiate by the inputs, or load weights='wide'", weight
    )
    # A batch of symbolic size may be as small as any.
    product = _of_few if known_size(x.shape[0], FEW) <= FEW else _of_many
    if weight.activations == "bf16":
        return product(x, weight, groups)
    # Straight through the rounding of x. Without a derivative the second product is dead code.
    return straight_through(_of_rounded(lax.stop_gradient(x), weight, groups), product(x, weight, groups))


def _dot(x: jax.Array, weight: jax.Array, form: str) -> jax.Array:
    return jnp.einsum(form, x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _of_many(x: jax.Array, weight: StoredWeight, groups: int) -> jax.Array:
    wide = weight.widened(x.dtype)
    return _dot(x, wide.reshape(groups, -1, wide.shape[1]), "mgi,goi->mgo")


def _of_few(x: jax.Array, weight: StoredWeight, groups: int) -> jax.Array:
    operands = x, as_bytes(weight.codes), as_bytes(weight.scales)

    def tiles(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        return _in_tiles(x, codes, scales, weight.block, groups)

    def scaled(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        return _with_scaled_inputs(x, codes, scales, weight.block, groups)

    return lax.platform_dependent(*operands, cpu=tiles, default=scaled)


def _in_tiles(x: jax.Array, codes: jax.Array, scales: jax.Array, block: tuple[int, int], groups: int) -> jax.Array:
    """``stored_product`` with codes and scales as bytes, which is how XLA on CPU can cut them without widening them."""
    if known_size(x.shape[0], FEW) == 1:  # XLA on CPU multiplies one row 10 times slower than two
        return _in_tiles(jnp.repeat(x, 2, 0), codes, scales, block, groups)[:1]
    (rows, width), of_group = codes.shape, codes.shape[0] // groups
    tile = next(n for n in range(of_group, 0, -1) if of_group % n == 0 and (n == 1 or n * width <= TILE))
    count = rows // tile

    def multiply(given: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        codes, scales, group = given
        values = lax.bitcast_convert_type(codes, CODES).astype(x.dtype)
        values *= per_number(lax.bitcast_convert_type(scales, SCALES).astype(x.dtype), (1, block[1]), codes.shape)
        part = x[:, 0] if groups == 1 else lax.dynamic_index_in_dim(x, group, 1, keepdims=False)
        return _dot(part, values, "mi,oi->mo")

    of_rows = jnp.repeat(scales, block[0], 0)[:rows]
    group = np.arange(count, dtype=np.int32) // (of_group // tile)
    given = codes.reshape(count, tile, width), of_rows.reshape(count, tile, -1), group
    product = multiply(jax.tree.map(lambda leaf: leaf[0], given))[None] if count == 1 else lax.map(multiply, given)
    return jnp.moveaxis(product, 0, 1).reshape(x.shape[0], groups, of_group)


def _with_scaled_inputs(
    x: jax.Array, codes: jax.Array, scales: jax.Array, block: tuple[int, int], groups: int
) -> jax.Array:
    """``stored_product`` with codes and scales as bytes, for devices that convert codes as they load them."""
    (rows, width), of_group = codes.shape, codes.shape[0] // groups
    height = math.gcd(block[0], of_group)  # rows of a group that share their scales
    of_rows = jnp.repeat(lax.bitcast_convert_type(scales, SCALES).astype(x.dtype), block[0] // height, 0)
    of_rows = of_rows[: rows // height].reshape(groups, of_group // height, -1)
    factors = jnp.repeat(of_rows, block[1], 2)[..., :width]
    shape = (x.shape[0], *factors.shape)
    inputs = jnp.broadcast_to(x[:, :, None], shape) * jnp.broadcast_to(factors[None], shape)
    values = lax.bitcast_convert_type(codes, CODES).astype(x.dtype).reshape(groups, -1, height, width)
    return _dot(inputs, values, "mgni,gnoi->mgno").reshape(x.shape[0], groups, of_group)


def _of_rounded(x: jax.Array, weight: StoredWeight, groups: int) -> jax.Array:
    """``stored_product`` with x rounded to E4M3, a scale for each token and ``GROUP`` inputs.

    Sums over the inputs that share both scales are f32; they are scaled and added up in f32, in order.
    """
    tokens, (rows, width) = x.shape[0], weight.shape
    padded = -(-width // GROUP) * GROUP
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, padded - width)))
    rounded, of_x = fp8_tiles(x.reshape(tokens, groups, -1, GROUP))
    step = math.gcd(GROUP, weight.block[1])
    rounded = rounded.astype(jnp.bfloat16).reshape(tokens, groups, -1, step)
    codes = jnp.pad(as_bytes(weight.codes), ((0, 0), (0, padded - width)))
    of_weight = jnp.repeat(as_bytes(weight.scales), weight.block[0], 0)[:rows]

    def add(i: jax.Array | int, total: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(codes, i * step, step, axis=1).reshape(groups, -1, step)
        values = lax.bitcast_convert_type(part, CODES).astype(jnp.bfloat16)
        product = _dot(lax.dynamic_index_in_dim(rounded, i, 2, keepdims=False), values, "mgi,goi->mgo")
        ours = lax.dynamic_index_in_dim(of_x, i * step // GROUP, 2, keepdims=False)
        theirs = lax.dynamic_index_in_dim(of_weight, i * step // weight.block[1], 1, keepdims=False)
        theirs = lax.bitcast_convert_type(theirs, SCALES).astype(jnp.float32).reshape(groups, -1)
        scale = jnp.broadcast_to(ours[..., None], total.shape) * jnp.broadcast_to(theirs[None], total.shape)
        return total + product * scale

    total = jnp.zeros((tokens, groups, rows // groups), jnp.float32)
    return lax.fori_loop(0, -(-width // step), add, total)
