"""Random weights of a layer, for tests and demos."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dsv4jax.checks import FLOATS, Named, check_dtype, check_key
from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.kinds import AttentionType
from dsv4jax.weights.params import ALWAYS_F32, QUANTISED, AttentionParams, named_shapes
from dsv4jax.weights.stored import BLOCK, CODES, SCALES, Stored, StoredWeight, dtype_of, num_blocks

_SMALL = 1 << 18  # leaves of at most so many numbers are drawn together, however their sizes differ


def init_attention_params(
    key: jax.Array,
    cfg: DSV4Config,
    layer: int,
    dtype: DTypeLike = jnp.float32,
    weights: str = "wide",
    activations: str = "bf16",
    block: tuple[int, int] | None = None,
) -> AttentionParams:
    """Random weights, for tests and demos: linear weights of variance 1 / in, norms and sinks near 1 and 0.

    The layers of a kind share one compiled program.

    Args:
      key: a random key.
      cfg: the model's sizes.
      layer: number of the layer in the model.
      dtype: float32 or bfloat16, of what is not FP8.
      weights: "wide", the default here, because what is drawn is to be trained or tried; "stored": the linear weights
        that checkpoints store as FP8 are drawn as FP8 codes and block scales, and no wider copy of them is made; "bf16"
        or "f32": "wide" in this dtype, sinks and position biases in float32.
      activations: for stored weights, "bf16", "fp8" or "fp8_all", as for ``load_attention_params``.
      block: for stored weights, rows and columns per scale; 128 x 128 if None.

    Raises:
      ValueError: the model has no such layer, dtype is neither float32 nor bfloat16, an option is unknown, or key is
        none.
    """
    check_dtype("dtype", dtype, FLOATS)
    check_key(key)
    stored, named = Stored.choose(weights, activations, block), dtype_of(weights)
    params = random_params(key, cfg, layer_kind(cfg, layer), jnp.dtype(dtype) if named is None else named, stored)
    return params if named is None else with_f32(params)


def with_f32(params: AttentionParams) -> AttentionParams:
    """The weights with those in float32 that checkpoints store so."""

    def cast(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if path[-1].name in ALWAYS_F32 else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


# Jitted whole: run op by op, the layers of a model would compile some 50 programs, each in up to half a second.
@functools.partial(jax.jit, static_argnames=("cfg", "kind", "dtype", "stored"))
def random_params(
    key: jax.Array, cfg: DSV4Config, kind: AttentionType, dtype: DTypeLike, stored: Stored | None = None
) -> AttentionParams:
    shapes = named_shapes(cfg, kind)
    names = list(shapes)
    fp8 = [] if stored is None else [name for name in names if name in QUANTISED]
    # One for each weight, and those of codes and of scales.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(len(names) + 2, dtype=jnp.uint32))
    parts: Named = {}
    if stored is not None:
        parts = random_stored(keys[-2], keys[-1], {name: shapes[name] for name in fp8}, stored)
    wide = [i for i, name in enumerate(names) if name not in parts]
    sizes = {i: math.prod(shapes[names[i]]) for i in wide}
    for group in _of_similar_size(sizes):
        draw = functools.partial(jax.random.normal, shape=(sizes[group[0]],), dtype=jnp.float32)
        noise = jax.vmap(draw)(keys[np.asarray(group)])
        distributions = [_distribution(names[i], shapes[names[i]]) for i in group]
        noise *= jnp.asarray([scale for scale, _ in distributions], jnp.float32)[:, None]
        # Else XLA compiles the generator, which is long, into every leaf once more.
        noise = lax.optimization_barrier(noise)
        for row, i, (_, offset) in zip(noise, group, distributions, strict=True):
            parts[names[i]] = (row[: sizes[i]].reshape(shapes[names[i]]) + offset).astype(dtype)
    return AttentionParams.join(parts)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Scale and offset of a weight's random numbers."""
    if len(shape) == 1:
        return 0.1, 0.0 if "sinks" in name else 1.0
    return (0.1 if "ape" in name else shape[-1] ** -0.5), 0.0


def _of_similar_size(sizes: dict[int, int]) -> list[list[int]]:
    """Numbers of weights, the largest first, in groups that draw rows of the same length and cut them to size.

    A weight is at least a quarter of its group's first, or both are small.
    """
    groups: list[list[int]] = []
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        longest = sizes[groups[-1][0]] if groups else None
        if longest is not None and (longest <= _SMALL or 4 * sizes[i] >= longest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# A random byte's sign and five lowest bits are a code: sign, two bits of exponent above _EXPONENT, mantissa. Codes are
# so made of bytes by bytes, and no wider number is drawn for them.
_SIGN, _BITS, _EXPONENT = 0x80, 0x1F, 5
_MAGNITUDES = (np.arange(_BITS + 1, dtype=np.uint8) + np.uint8(_EXPONENT << 3)).view(CODES).astype(np.float64)
_CODE_VARIANCE = float(np.mean(_MAGNITUDES**2))


def random_stored(
    codes_key: jax.Array, scales_key: jax.Array, shapes: dict[str, tuple[int, ...]], stored: Stored
) -> dict[str, StoredWeight]:
    """Draw codes, and for each block one of two neighbouring powers of two, so that the variance is 1 / in."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    words = jax.random.bits(codes_key, (-(-sum(sizes) // 4),), jnp.uint32)
    numbers = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)
    codes = (numbers & _SIGN) | ((numbers & _BITS) + (_EXPONENT << 3))
    block, drawn, first = stored.block or BLOCK, {}, 0
    blocks = [num_blocks(shape, block) for shape in shapes.values()]
    # The scales of all in rows of one length, because XLA compiles the generator, which is long, for each length.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(scales_key, jnp.arange(len(blocks), dtype=jnp.uint32))
    rows = jax.vmap(functools.partial(jax.random.uniform, shape=(max(map(math.prod, blocks)),)))(keys)
    for i, (name, shape) in enumerate(shapes.items()):
        part = codes[first : first + sizes[i]].reshape(shape)
        first += sizes[i]
        uniform = rows[i, : math.prod(blocks[i])].reshape(blocks[i])
        drawn[name] = StoredWeight(
            codes=lax.bitcast_convert_type(part, CODES),
            scales=random_scales(uniform, 1 / (shape[-1] * _CODE_VARIANCE)),
            block=block,
            activations=stored.of(name),
        )
    return drawn


def random_scales(uniform: jax.Array, variance: float) -> jax.Array:
    """Make of each number a scale, E8M0, one of two neighbouring powers of two whose squares' mean is ``variance``."""
    lower = math.floor(math.log2(variance) / 2)
    share = (variance / 4**lower - 1) / 3  # of blocks with twice the lower scale
    larger = uniform < share
    return lax.bitcast_convert_type(larger.astype(jnp.uint8) + (127 + lower), SCALES)
