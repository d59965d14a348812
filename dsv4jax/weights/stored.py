"""Weights as checkpoints store them: FP8 codes with one power-of-two scale per block.

    weight[o, i] = codes[o, i] * scales[o // block[0], i // block[1]]

Codes are E4M3, scales UE8M0 (an exponent alone). A product takes them like this, so a wider copy of the weight is never
kept, neither on the host nor on the device. ``widened`` makes one, for debugging and for long chunks.

Rows are cut and joined by their bytes, because XLA on CPU widens 8-bit floats for that.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from dsv4jax.checks import FLOATS, Tree, check_array
from dsv4jax.weights.deltas import WeightWithDelta, checked_base, has_delta, moved, of_rows, split_delta, with_delta

CODES, SCALES = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu)
BLOCK = (128, 128)  # rows and columns per scale in DeepSeek's checkpoints
ACTIVATIONS = ("bf16", "fp8")
LAYER_ACTIVATIONS = (*ACTIVATIONS, "fp8_all")  # options of a layer: the input of no weight, of all but W_oa, or of all
# How weights are held, everywhere: as checkpoints store them, FP8 and FP4 included; times their scales, exactly;
# that, and then all in one dtype, but for what checkpoints always have as float32.
WEIGHTS = ("stored", "wide", "bf16", "f32")
_SIDES = [8, 16, 32, 64, 128, 256, 512]  # of square blocks that shapes are tried for
_PART = 1 << 18  # codes that are looked at together on the host
LARGEST_SCALE = 7  # exponent: the kernel adds it to a code's own in bf16 and has no room for more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A linear weight [out, in] as FP8 codes and block scales.

    ``activations`` says how a product treats its input: "bf16" takes it as it is (f32 stays f32); "fp8" first rounds it
    to E4M3 with a power-of-two scale per token and 128 inputs, as DeepSeek's own inference does.
    """

    codes: jax.Array  # float8_e4m3fn [out, in], without NaN
    scales: jax.Array  # float8_e8m0fnu [ceil(out / block[0]), ceil(in / block[1])], at most 2^7
    block: tuple[int, int] = dataclasses.field(default=BLOCK, metadata={"static": True})
    activations: str = dataclasses.field(default="bf16", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype:
        """Of the codes."""
        return self.codes.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return math.prod(self.codes.shape) + math.prod(self.scales.shape)

    def widened(self, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        """Return the weight as one array [out, in].

        bfloat16 and float32 hold every value exactly, if scales are at least 2^-117: below that, the smallest codes
        underflow.
        """
        return _widen(self.codes, self.scales, self.block, jnp.dtype(dtype))


Weight = jax.Array | StoredWeight | WeightWithDelta


def is_stored(weight: object) -> bool:
    """Whether a weight is stored as FP8; for ``is_leaf`` of tree functions."""
    return isinstance(weight, StoredWeight)


def is_weight(node: object) -> bool:
    """Whether a node is a linear weight that is a tree itself: stored, or with deltas; for ``is_leaf``."""
    return isinstance(node, StoredWeight | WeightWithDelta)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How the weights of a layer are stored as FP8; the options of ``weights="stored"``."""

    block: tuple[int, int] | None = None  # rows and columns per scale; None = as found, or 128 x 128
    activations: str = "bf16"  # one of LAYER_ACTIVATIONS

    def of(self, name: str) -> str:
        """The ``activations`` of one weight: those of W_oa are "fp8" for "fp8_all" alone.

        DeepSeek's own inference does not round the input of W_oa. vLLM's, on Hopper, does.
        """
        return "bf16" if self.activations == "bf16" or (self.activations, name) == ("fp8", "o_a") else "fp8"

    @classmethod
    def choose(cls, weights: str, activations: str, block: tuple[int, int] | None = None) -> Stored | None:
        """Return how weights are stored; None for the other words of ``WEIGHTS``.

        Raises:
          ValueError: an option is unknown, or weights that are not stored are asked to round activations.
        """
        check_weights(weights)
        check_activations("activations", activations, LAYER_ACTIVATIONS)
        if block is not None:
            check_block("block", block)
        if weights == "stored":
            return cls(block=block, activations=activations)
        if activations != "bf16":
            raise ValueError(f"activations={activations!r} is for weights='stored', got weights={weights!r}")
        return None


@functools.partial(jax.jit, static_argnames=("block", "dtype"))
def _widen(codes: jax.Array, scales: jax.Array, block: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    return (codes.astype(jnp.float32) * per_number(scales.astype(jnp.float32), block, codes.shape)).astype(dtype)


def per_number[Scales: (jax.Array, np.ndarray)](
    scales: Scales, block: tuple[int, int], shape: tuple[int, ...]
) -> Scales:
    """Repeat block scales [ceil(out / block[0]), ceil(in / block[1])] for every number of a weight of this shape."""
    repeat: Tree = np.repeat if isinstance(scales, np.ndarray) else jnp.repeat
    rows = repeat(scales, block[0], 0)[: shape[0]]
    return repeat(rows, block[1], 1)[:, : shape[1]]


def num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of a weight of this shape."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def as_bytes(x: jax.Array) -> jax.Array:
    """Return an array of 8-bit floats as uint8."""
    return lax.bitcast_convert_type(x, jnp.uint8)


def rows_of(weight: Tree, start: int, stop: int) -> Tree:
    """Return rows [start, stop) of a weight, which may be an array, a StoredWeight or a ``jax.ShapeDtypeStruct``.

    Deltas beside it are cut with it.

    Raises:
      ValueError: the rows begin within a block of a stored weight.
    """
    if isinstance(weight, WeightWithDelta):
        return with_delta(rows_of(weight.base, start, stop), of_rows(weight.deltas, start, stop))
    if isinstance(weight, StoredWeight):
        height = weight.block[0]
        if start % height:
            raise ValueError(f"rows {start} to {stop} of a stored weight begin within a block of {height} rows")
        scales = rows_of(weight.scales, start // height, -(-stop // height))
        return dataclasses.replace(weight, codes=rows_of(weight.codes, start, stop), scales=scales)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((stop - start, *weight.shape[1:]), weight.dtype)
    if isinstance(weight, np.ndarray) or weight.dtype.itemsize > 1:
        return weight[start:stop]
    return lax.bitcast_convert_type(as_bytes(weight)[start:stop], weight.dtype)


def join(*weights: Tree) -> Tree:
    """Return a weight with the rows of several, in order: all stored ones, or all arrays. Their deltas come along.

    Blocks become lower where one would hold rows of two weights; the values are the same. Arrays of two dtypes become
    float32.

    Raises:
      ValueError: some are stored and some are not, or they differ in the width of their blocks or in ``activations``.
    """
    if any(map(has_delta, weights)):
        bases, deltas = zip(*map(split_delta, weights), strict=True)
        above = np.cumsum([0, *(base.shape[0] for base in bases[:-1])]).tolist()
        found = [delta for of, rows in zip(deltas, above, strict=True) for delta in moved(of, rows)]
        return with_delta(join(*bases), found)
    stored = [isinstance(weight, StoredWeight) for weight in weights]
    if not any(stored):
        return _join_rows(list(weights))
    if not all(stored):
        raise ValueError("weights that one input feeds must all be stored as FP8, or none of them")
    first = weights[0]
    for weight in weights:
        if (weight.block[1], weight.activations) != (first.block[1], first.activations):
            of = [(weight.block, weight.activations) for weight in weights]
            raise ValueError(f"stored weights that one input feeds must be stored alike, got (block, activations) {of}")
    height = math.gcd(*(weight.block[0] for weight in weights), *(weight.shape[0] for weight in weights[:-1]))
    codes = _join_rows([weight.codes for weight in weights])
    scales = _join_rows([_lower(weight, height) for weight in weights])
    return dataclasses.replace(first, codes=codes, scales=scales, block=(height, first.block[1]))


def _lower(weight: StoredWeight, height: int) -> jax.Array | np.ndarray:
    """The scales of a weight for blocks of fewer rows, of which its own are a multiple."""
    times, count = weight.block[0] // height, -(-weight.shape[0] // height)
    if times == 1:
        return weight.scales
    if isinstance(weight.scales, np.ndarray):
        return np.repeat(weight.scales, times, 0)[:count]
    repeated = jnp.repeat(as_bytes(weight.scales), times, 0)[:count]
    return lax.bitcast_convert_type(repeated, weight.scales.dtype)


def _join_rows(parts: list[Tree]) -> Tree:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):  # on the host, without a copy on the device
        return np.concatenate(parts)
    dtype = parts[0].dtype
    if dtype.itemsize == 1:
        return lax.bitcast_convert_type(jnp.concatenate([as_bytes(part) for part in parts]), dtype)
    if any(part.dtype != dtype for part in parts):
        parts = [part.astype(jnp.float32) for part in parts]
    return jnp.concatenate(parts)


def check_weight(name: str, weight: object, shape: tuple[int, ...]) -> None:
    """Check a linear weight [out, in], an array or a stored one, and its deltas.

    Raises:
      AssertionError: (chex) a shape or dtype is wrong.
      ValueError: a stored weight's ``block`` or ``activations`` is none, or a delta is of other rows.
    """
    name, weight = checked_base(name, weight, shape)
    if not isinstance(weight, StoredWeight):
        check_array(name, weight, _axes(shape), FLOATS)
        return
    check_block(f"{name}.block", weight.block)
    check_activations(f"{name}.activations", weight.activations)
    check_array(f"{name}.codes", weight.codes, _axes(shape), CODES)
    check_array(f"{name}.scales", weight.scales, _axes(num_blocks(shape, weight.block)), SCALES)


def _axes(shape: tuple[int, ...]) -> dict[str, int | None]:
    return {f"axis {i}": size for i, size in enumerate(shape)}


def check_block(name: str, block: object) -> None:
    """Require a pair of positive integers. ValueError otherwise."""
    if not isinstance(block, tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(f"{name} must be a pair of positive integers, rows and columns per scale; got {block!r}")


def check_weights(weights: object) -> None:
    """Require one of ``WEIGHTS``. ValueError otherwise."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {list(WEIGHTS)}, got {weights!r}")


def dtype_of(weights: str) -> np.dtype | None:
    """Return the dtype that a word of ``WEIGHTS`` names; None for "stored" and "wide"."""
    return {"bf16": jnp.dtype(jnp.bfloat16), "f32": jnp.dtype(jnp.float32)}.get(weights)


def check_activations(name: str, activations: object, known: tuple[str, ...] = ACTIVATIONS) -> None:
    """Require a known value. ValueError otherwise."""
    if activations not in known:
        raise ValueError(f"{name} must be one of {list(known)}, got {activations!r}")


def find_block(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return the block of a weight of this shape whose scales have that shape.

    Args:
      shape: (..., out, in), where axes before the last two are of several weights, such as experts.
      scales: the shape of its scales.
      block: what the checkpoint says. Otherwise 128 x 128 where that fits, else the one square block that does, with a
        power of two as its side.

    Raises:
      ValueError: no block fits.
    """
    message = f"block scales of shape {scales} do not fit a weight of shape {shape}"

    def fits(block: tuple[int, int]) -> bool:
        return (*shape[:-2], *num_blocks(shape[-2:], block)) == scales

    if block is not None:
        if not fits(block):
            raise ValueError(f"{message} in blocks of {block[0]} x {block[1]}")
        return block
    sides = [side for side in _SIDES if fits((side, side))]
    if BLOCK[0] in sides:
        return BLOCK
    if len(sides) != 1:
        raise ValueError(message + (f": blocks may be {sides} square" if sides else ""))
    return sides[0], sides[0]


def check_codes(codes: jax.Array | np.ndarray) -> None:
    """Raise ValueError if a code is NaN, which the kernel would take for 480. Traced values are not checked."""
    if isinstance(codes, Tracer):
        return
    if isinstance(codes, jax.Array):
        count = int(jnp.isnan(codes).sum())
    else:  # a part at a time, and as bytes: NumPy's isnan would widen each code, which takes six times as long
        flat = np.ascontiguousarray(codes).reshape(-1).view(np.uint8)
        parts = (flat[first : first + _PART] for first in range(0, flat.size, _PART))
        count = sum(int(np.count_nonzero((part & 0x7F) == 0x7F)) for part in parts)
    if count:
        raise ValueError(f"{count} of its FP8 codes are NaN")


def to_e8m0(scales: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Return scales as E8M0, exactly. Scales that are E8M0 already are returned as they are, traced ones too.

    Raises:
      ValueError: a scale is no power of two, or above 2^7, or the dtype is another and the values are traced.
    """
    if isinstance(scales, Tracer):
        if scales.dtype != SCALES:
            raise ValueError(f"block scales are {scales.dtype}, and traced ones must be {SCALES}: their values decide")
        return scales
    values = np.asarray(scales)
    if values.dtype not in (SCALES, np.float32):
        raise ValueError(f"block scales are {values.dtype}, expected {SCALES} or float32")
    # Comparisons with NaN are false.
    wide = values.astype(np.float32)
    if not np.all(wide <= 2.0**LARGEST_SCALE):
        raise ValueError(f"block scales go up to {np.max(wide)}, and 2^{LARGEST_SCALE} is the largest that is served")
    if values.dtype == SCALES:
        return scales
    narrow = wide.astype(SCALES)
    if not np.array_equal(narrow.astype(np.float32), wide):
        raise ValueError("block scales are not all powers of two")
    return narrow
