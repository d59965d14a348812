"""Conversion of queries from a matrix product to what attention and scores take, in one pass.

    attention_queries   f16(rope(q / rms(q)))                        for ``decode_attention``
    indexer_queries     round(hadamard(rope(q))) in the keys' format  for ``indexer_scores``

A head's row is spread over at most one warp, so that each lane has several 16-byte loads in flight.
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
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Channels, Condition, Value
from pallas_kernels.needed import is_needed
from pallas_kernels.rows import hadamard, load_angles, rope, unit_norm

ATTENTION_LANES, INDEXER_LANES = 32, 8  # number of lanes that hold a head's row


def attention_queries(
    product: jax.Array,
    angles: jax.Array,
    *,
    eps: float,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Apply RMSNorm without a weight and rope, and convert to f16.

    Args:
      product: f32 [B, T, H, head_dim].
      angles: f32 [B, T, rope_dim], cosines and then sines of the angles by which the last channels of each head are
        rotated.
      eps: of the norm.
      needed: bool [B, T], tokens whose queries anyone reads; None for all. Those of others may be anything.
      simulate: run in NumPy on the host, with checks, on any device.

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
    given = product, angles, needed
    return _launch("attention_queries", body, given, out, ATTENTION_LANES, simulate)


def indexer_queries(
    product: jax.Array,
    angles: jax.Array,
    key_row: Any,
    *,
    key_format: str,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> Any:
    """Apply rope and Hadamard transform, and round in the number format of the indexer's keys.

    Args:
      product: f32 [B, T, H, key_dim].
      angles: as for ``attention_queries``.
      key_row: pytree ``codes scale`` of ``jax.ShapeDtypeStruct``, one encoded row.
      key_format: a 4-bit format.
      needed: as for ``attention_queries``.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      A pytree like key_row, with leaves [B, T, H, ...].

    Raises:
      ValueError: the format is not a 4-bit one, or does not support the row's size.
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

    given = product, angles, needed
    return _launch("indexer_queries", body, given, key_row, INDEXER_LANES, simulate)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """One head of one token: the row that a team of lanes works on."""

    row: Row
    number: Value  # its number among the heads of all tokens
    there: Condition
    values: Channels
    angles: Any

    @classmethod
    def load(cls, machine: TensorCores, inputs: tuple[Buffer, Buffer, Buffer | None], heads: int, lanes: int) -> _Head:
        """Load this team's head.

        ``inputs`` are products [rows, dim], angles [rows / heads, rope_dim], and which tokens are needed.
        """
        product, angles, needed = inputs
        (count, dim), per_block = product.shape, WARPGROUP // lanes
        number = machine.block(0) * per_block + machine.thread // lanes
        there = is_needed(needed, number // heads, True if count % per_block == 0 else number < count)
        row = Row(Team(machine, lanes), dim)
        values = row.load(product, number, where=there)
        return cls(row, number, there, values, load_angles(row, angles, number // heads, where=there))

    def turned(self, values: Channels) -> Channels:
        return rope(values, self.angles)


def _launch(
    name: str,
    body: Body,
    given: tuple[jax.Array, jax.Array, jax.Array | None],
    out_row: Any,
    lanes: int,
    simulate: bool,
) -> Any:
    product, angles, needed = given
    chex.assert_rank([product, angles], [4, 3])
    *lead, dim = product.shape
    rope_dim = angles.shape[-1]
    chex.assert_shape(angles, (*lead[:2], rope_dim))
    chex.assert_type([product, angles], jnp.float32)
    if needed is not None:
        chex.assert_shape(needed, lead[:2])
        chex.assert_type(needed, bool)
        needed = needed.reshape(-1)
    if dim % VECTOR or rope_dim % VECTOR or rope_dim > dim:
        raise ValueError(f"dims of a head and of its rope must be multiples of {VECTOR}, got {dim} and {rope_dim}")
    rows = product.reshape(-1, dim)
    out = launch(
        body,
        name=name,
        grid=(-(-len(rows) * lanes // WARPGROUP),),
        inputs=(rows, angles.reshape(-1, rope_dim), needed),
        state=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(rows), *leaf.shape), leaf.dtype), out_row),
        simulate=simulate,
    )
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), out)
