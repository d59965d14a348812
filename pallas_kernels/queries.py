"""Queries on their way from a matrix product to what reads the cache: one pass over them.

    attention_queries   f16(rope(q / rms(q)))                        as ``decode_attention`` takes them
    indexer_queries     round(hadamard(rope(q))) in the keys' format  as ``indexer_scores`` takes them

A head's row lies over a part of a warp, so that each lane has several 16-byte loads on their way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language.lanes import Buffer, Row, Team
from pallas_kernels.language.launch import Body, launch
from pallas_kernels.language.machine import VECTOR, WARPGROUP, Channels, Condition, Value
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.rows import hadamard, load_angles, rope, unit_norm

ATTENTION_LANES, INDEXER_LANES = 32, 8  # that hold a head's row


def attention_queries(product: jax.Array, angles: jax.Array, *, eps: float, simulate: bool = False) -> jax.Array:
    """RMSNorm without a weight, rope, f16.

    Args:
      product: f32 [B, T, H, head_dim].
      angles: f32 [B, T, rope_dim] cosines, then sines, that the last channels of a token's heads are turned by.
      eps: of the norm.

    Returns:
      f16 [B, T, H, head_dim].
    """
    heads, dim = product.shape[2:]

    def body(machine: TensorCores, inputs: Any, out: Buffer) -> None:
        head = _Head.load(machine, inputs, heads, ATTENTION_LANES)
        row = head.row
        for step, (a, b, c, d) in enumerate(head.turned(unit_norm(row, head.values, eps))):
            words = [machine.to_f16(a, b), machine.to_f16(c, d)]
            out.store_words(words, head.number, row.channel[step], where=head.there & row.before(step, dim))

    out = jax.ShapeDtypeStruct((dim,), jnp.float16)
    return _launch("attention_queries", body, product, angles, out, ATTENTION_LANES, simulate)


def indexer_queries(
    product: jax.Array, angles: jax.Array, key_row: Any, *, key_format: str, simulate: bool = False
) -> Any:
    """Rope, Hadamard transform, the number format of the indexer's keys.

    Args:
      product: f32 [B, T, H, key_dim].
      angles: as of ``attention_queries``.
      key_row: pytree ``codes scale`` of ``jax.ShapeDtypeStruct``, one encoded row.
      key_format: a 4-bit one.

    Returns:
      pytree as key_row, leaves [B, T, H, ...].
    """
    heads, dim = product.shape[2:]
    known = {name: form for name, form in KEY_FORMATS.items() if isinstance(form, Fp4Keys)}
    if key_format not in known:
        raise ValueError(f"key_format must be one of {tuple(known)}, got {key_format!r}")
    keys = known[key_format]
    if dim & (dim - 1) or dim < keys.per_scale:
        raise ValueError(f"key_dim must be a power of two from {keys.per_scale} on, got {dim}")

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        head = _Head.load(machine, inputs, heads, INDEXER_LANES)
        values = hadamard(head.row, head.turned(head.values))
        keys.store(head.row, values, out, head.number, where=head.there)

    return _launch("indexer_queries", body, product, angles, key_row, INDEXER_LANES, simulate)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The row of a team of lanes: one head of one token."""

    row: Row
    number: Value  # of all tokens' heads
    there: Condition
    values: Channels
    angles: Any

    @classmethod
    def load(cls, machine: TensorCores, inputs: tuple[Buffer, Buffer], heads: int, lanes: int) -> _Head:
        """inputs: products [rows, dim] and angles [rows / heads, rope_dim]."""
        product, angles = inputs
        (count, dim), per_block = product.shape, WARPGROUP // lanes
        number = machine.block(0) * per_block + machine.thread // lanes
        there = True if count % per_block == 0 else number < count
        row = Row(Team(machine, lanes), dim)
        values = row.load(product, number, where=there)
        return cls(row, number, there, values, load_angles(row, angles, number // heads, where=there))

    def turned(self, values: Channels) -> Channels:
        return rope(values, self.angles)


def _launch(
    name: str, body: Body, product: jax.Array, angles: jax.Array, out_row: Any, lanes: int, simulate: bool
) -> Any:
    chex.assert_rank([product, angles], [4, 3])
    *lead, dim = product.shape
    rope_dim = angles.shape[-1]
    chex.assert_shape(angles, (*lead[:2], rope_dim))
    chex.assert_type([product, angles], jnp.float32)
    if dim % VECTOR or rope_dim % VECTOR or rope_dim > dim:
        raise ValueError(f"dims of a head and of its rope must be multiples of {VECTOR}, got {dim} and {rope_dim}")
    rows = product.reshape(-1, dim)
    out = launch(
        body,
        name=name,
        grid=(-(-len(rows) * lanes // WARPGROUP),),
        inputs=(rows, angles.reshape(-1, rope_dim)),
        state=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(rows), *leaf.shape), leaf.dtype), out_row),
        simulate=simulate,
    )
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), out)
