"""What the tokens of a call contribute to a layer, from two matrix products of its input, in one launch.

    q_a_kv     norm(first channels)           latent of the queries
               rope(norm(last channels))      window row, f32 and, for a chunk, as it is stored
    compress   k | z | k | z | head weights   streams of the compressor, then those of the indexer's compressor;
               z + ape[position mod ratio]    head weights times a factor

Every part of a token is done by a block of its own, with all of its loads in flight at once. No block reads two tokens,
so nothing that a token's row holds reaches another row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.activations import OperandRows
from pallas_kernels.formats import KV_FORMATS, KVRows
from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import VECTOR, Channels, Condition, Step, Value, select
from pallas_kernels.rows import load_angles, norm, rope, through_bf16
from pallas_kernels.trees import Tree

_FLOATS = (jnp.float32, jnp.bfloat16)
_PAIR = 2  # a word holds two bf16: no stream may end within one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenProducts[Array: Shaped]:
    """The products of T tokens of each of B requests with the weights that take a layer's input, and what is added.

    The rows of padding tokens may hold anything, NaN included.
    """

    q_a_kv: Array  # f32 [B, T, q_lora_rank + head_dim]
    compress: Array | None  # f32 [B, T, 2 entry widths + 2 key widths + heads]; None for SWA
    q_norm: Array  # f32 or bf16 [q_lora_rank]
    kv_norm: Array  # f32 or bf16 [head_dim]
    entry_ape: Array | None  # f32 or bf16 [ratio, entry width]; None for SWA
    key_ape: Array | None  # f32 or bf16 [ratio, key width]; CSA only
    angles: Array  # f32 [B, T, rope_dim] cosines, then sines, by which the last channels of a window row are rotated
    positions: Array  # int32 [B, T]; below 0 on padding

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of an entry's stream, of a key's stream, and the number of head weights; 0 where there are none."""
        entry, key = (0 if ape is None else ape.shape[1] for ape in (self.entry_ape, self.key_ape))
        return entry, key, 0 if self.compress is None else self.compress.shape[-1] - 2 * (entry + key)

    @property
    def has_aligned_streams(self) -> bool:
        """Whether an update can load the streams where they are (``ProductStreams``); also where there are none."""
        entry, key, _ = self.widths
        return self.compress is None or all(size % VECTOR == 0 for size in (entry, key, self.compress.shape[-1]))

    @property
    def flat(self: TokenProducts[jax.Array]) -> TokenProducts[jax.Array]:
        """The same with one axis for all tokens."""
        count = self.positions.size
        return dataclasses.replace(
            self,
            q_a_kv=self.q_a_kv.reshape(count, -1),
            compress=None if self.compress is None else self.compress.reshape(count, -1),
            angles=self.angles.reshape(count, -1),
            positions=self.positions.reshape(-1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenParts[Array: Shaped]:
    """What tokens contribute to a layer, 0 on padding. Parts that it does not have are None."""

    latent: Array | OperandRows[Array]  # f32 or bf16 [B, T, q_lora_rank], or OperandRows of that shape, after norm
    kv: Array | None  # f32 [B, T, head_dim], after norm and rope
    stored: Tree  # pytree ``nope rope scale`` [B, T, ...]: kv in the format of stored rows
    entry: tuple[Array, Array] | None  # f32 [B, T, entry width] each: k, and z with its bias
    key: tuple[Array, Array] | None  # f32 [B, T, key width] each
    head_weights: Array | None  # f32 [B, T, heads]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRounding:
    """The formats and constants of the parts."""

    eps: float  # of the norms
    latent_dtype: DTypeLike = jnp.bfloat16  # f32 or bf16
    latent_is_operand: bool = False  # operand rows, of bf16
    stream_dtype: DTypeLike = jnp.float32  # k and z are rounded to it, f32 or bf16, and returned as f32
    head_factor: float = 1.0  # by which head weights are multiplied
    kv_format: str | None = None  # of ``TokenParts.stored``; None: there are none


def unsupported_token_parts(*, q_lora_rank: int, head_dim: int, rope_dim: int, rows: int) -> str | None:
    """Return why the kernel does not support these sizes, or None if it does. ``rows``: of the compressors' weights."""
    for name, size in {"q_lora_rank": q_lora_rank, "head_dim": head_dim, "rope_dim": rope_dim}.items():
        if size % VECTOR:
            return f"{name} must be a multiple of {VECTOR}, got {size}"
    return f"the rows of compressors and heads must be even in number, got {rows}" if rows % _PAIR else None


def token_parts[Spec: Shaped](
    products: TokenProducts[jax.Array],
    rounding: TokenRounding,
    *,
    row_spec: KVRows[Spec] | None = None,
    has_streams: bool = True,
    reads_padding: bool = True,
    simulate: bool = False,
) -> TokenParts[jax.Array]:
    """Split the products of new tokens into parts, and norm, rotate, round and scale them.

    Args:
      products: the products, norm weights, biases, angles and positions.
      rounding: the formats and constants.
      row_spec: with ``rounding.kv_format``, a pytree ``nope rope scale`` of ``jax.ShapeDtypeStruct``: one stored row.
      has_streams: make the compressors' streams, too.
      reads_padding: load the products of padding too, which are not used. Then no load waits for a position, which is
        faster where there is little padding.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The parts. ``stored`` is there if ``rounding.kv_format`` is given, and streams if ``has_streams`` says so.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not support these sizes, formats or dtypes.
    """
    check_products(products, rounding, row_spec)
    lead = products.positions.shape
    count, rank, dim = math.prod(lead), products.q_norm.shape[0], products.kv_norm.shape[0]
    entry, key, heads = products.widths

    def rows(size: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, size), dtype)

    out = TokenParts(
        latent=latent_shapes(count, rank, rounding),
        kv=rows(dim),
        stored=None
        if rounding.kv_format is None
        else jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), row_spec),
        entry=(rows(entry), rows(entry)) if entry and has_streams else None,
        key=(rows(key), rows(key)) if key and has_streams else None,
        head_weights=rows(heads) if heads else None,
    )
    units: list[Callable[[Token, TokenParts[Buffer], TokenRounding], None]] = [store_latent, _store_window_row]
    units += [_store_entry_streams] if out.entry is not None else []
    units += [store_keys_and_heads] if out.key is not None or heads else []

    def body(machine: Machine, products: TokenProducts[Buffer], parts: TokenParts[Buffer]) -> None:
        token = Token.of(machine, products, reads_padding=reads_padding)
        for number, unit in enumerate(units):
            with machine.when(machine.block(1) == number):
                unit(token, parts, rounding)

    parts = launch(
        body, name="token_parts", grid=(count, len(units)), inputs=products.flat, state=out, simulate=simulate
    )
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), parts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Token:
    """A block's token."""

    machine: Machine
    products: TokenProducts[Buffer]
    n: Value
    position: Value
    there: Condition  # whether to load its products

    @classmethod
    def of(cls, machine: Machine, products: TokenProducts[Buffer], *, reads_padding: bool) -> Token:
        n = machine.block(0)
        position = products.positions.load_int(n)
        there = True if reads_padding else position >= 0
        return cls(machine=machine, products=products, n=n, position=position, there=there)

    @property
    def is_real(self) -> Value:
        return self.position >= 0


def latent_shapes(
    count: int, rank: int, rounding: TokenRounding
) -> jax.ShapeDtypeStruct | OperandRows[jax.ShapeDtypeStruct]:
    """Return the shapes of the latents of so many tokens."""
    if rounding.latent_is_operand:
        return OperandRows.shapes(count, rank)
    return jax.ShapeDtypeStruct((count, rank), rounding.latent_dtype)


def store_latent(token: Token, parts: TokenParts[Buffer], rounding: TokenRounding) -> None:
    """Store a token's latent."""
    products, n = token.products, token.n
    row = Row(Team(token.machine, WARPGROUP), products.q_norm.shape[0])
    values, weight = row.load(products.q_a_kv, n, where=token.there), row.load(products.q_norm)
    normed, _ = norm(row, values, weight, rounding.eps)
    latent = row.map(lambda x: select(token.is_real, x, 0.0), normed)
    if not isinstance(parts.latent, OperandRows):
        row.store(parts.latent, latent, n)
        return
    for step, values in enumerate(latent):
        parts.latent.store_line(values, n, row.channel[step], row.before(step, row.dim))


def window_row(token: Token, rounding: TokenRounding) -> tuple[Row, Channels, Value]:
    """Return a token's window row, spread over the block, and the largest magnitude of its channels without rope."""
    products, n = token.products, token.n
    row = Row(Team(token.machine, WARPGROUP), products.kv_norm.shape[0])
    values = row.load(products.q_a_kv, n, first=products.q_norm.shape[0], where=token.there)
    weight, angles = row.load(products.kv_norm), load_angles(row, products.angles, n, where=token.there)
    nope_dim = row.dim - products.angles.shape[-1]
    normed, amax = norm(row, values, weight, rounding.eps, nope_dim)
    values = row.map(lambda x: select(token.is_real, x, 0.0), rope(normed, angles))
    return row, values, select(token.is_real, amax, 0.0)


def _store_window_row(token: Token, parts: TokenParts[Buffer], rounding: TokenRounding) -> None:
    row, values, amax = window_row(token, rounding)
    assert parts.kv is not None
    row.store(parts.kv, values, token.n)
    if rounding.kv_format is not None:
        KV_FORMATS[rounding.kv_format].store(row, values, parts.stored, token.n, where=True, amax=amax)


def _store_entry_streams(token: Token, parts: TokenParts[Buffer], rounding: TokenRounding) -> None:
    assert parts.entry is not None
    assert token.products.entry_ape is not None
    _Columns.of(token).copy(_streams(0, parts.entry, token.products.entry_ape, rounding))


def store_keys_and_heads(token: Token, parts: TokenParts[Buffer], rounding: TokenRounding) -> None:
    """Store the streams of keys, if they are among the parts, and the head weights, if there are any."""
    entry, key, _ = token.products.widths
    pieces = [] if parts.key is None else _streams(2 * entry, parts.key, token.products.key_ape, rounding)
    if parts.head_weights is not None:
        pieces.append(_Piece(first=2 * (entry + key), out=parts.head_weights, factor=rounding.head_factor))
    _Columns.of(token).copy(pieces)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Piece:
    """Adjacent columns of the second product, and what becomes of them: (x + bias[phase]) * factor, rounded."""

    first: int  # column
    out: Buffer  # [rows, size]
    bias: Buffer | None = None  # [ratio, size]
    factor: float | None = None
    is_bf16: bool = False  # round to bf16

    @property
    def size(self) -> int:
        return self.out.shape[1]


def _streams(first: int, streams: tuple[Buffer, Buffer], ape: Buffer | None, rounding: TokenRounding) -> list[_Piece]:
    """The pieces k and z of a compressor whose columns begin at ``first``."""
    (k, z), is_bf16 = streams, rounding.stream_dtype == jnp.bfloat16
    return [
        _Piece(first=first, out=k, is_bf16=is_bf16),
        _Piece(first=first + k.shape[1], out=z, bias=ape, is_bf16=is_bf16),
    ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """One token's row of the second product, whose columns are spread over the block."""

    token: Token
    together: int  # columns that a lane moves at once

    @classmethod
    def of(cls, token: Token) -> _Columns:
        assert token.products.compress is not None
        return cls(token, math.gcd(VECTOR, token.products.compress.shape[1], *token.products.widths))

    def copy(self, pieces: list[_Piece]) -> None:
        """Store all pieces. Loads come first, and do not wait for one another."""
        loaded = [self._load(piece) for piece in pieces]
        biases = [self._load_bias(piece) for piece in pieces]
        for piece, values, bias in zip(pieces, loaded, biases, strict=True):
            for (column, there), step, more in zip(self._places(piece), values, bias, strict=True):
                out = [self._finish(piece, x, b) for x, b in zip(step, more, strict=True)]
                piece.out.store_floats(through_bf16(out) if piece.is_bf16 else out, self.token.n, column, where=there)

    def _places(self, piece: _Piece) -> list[tuple[Value, Condition]]:
        """The first column of each step of a piece, and whether the lane has any there."""
        width, places = self.together * WARPGROUP, []
        for first in range(0, piece.size, width):
            column = self.token.machine.thread * self.together + first
            places.append((column, True if first + width <= piece.size else column < piece.size))
        return places

    def _load(self, piece: _Piece) -> list[Step]:
        source, n = self.token.products.compress, self.token.n
        assert source is not None
        return [
            source.load_floats(n, column + piece.first, count=self.together, where=there & self.token.there)
            for column, there in self._places(piece)
        ]

    def _load_bias(self, piece: _Piece) -> list[list[Value | None]]:
        if piece.bias is None:
            return [[None] * self.together for _ in self._places(piece)]
        phase = self.token.position.maximum(0) % piece.bias.shape[0]
        return [
            list(piece.bias.load_floats(phase, column, count=self.together, where=there))
            for column, there in self._places(piece)
        ]

    def _finish(self, piece: _Piece, x: Value, bias: Value | None) -> Value:
        x = x if bias is None else x + bias
        x = x if piece.factor is None else x * piece.factor
        return select(self.token.is_real, x, 0.0)


def check_products[Spec: Shaped](
    products: TokenProducts[jax.Array], rounding: TokenRounding, row_spec: KVRows[Spec] | None
) -> None:
    """Raise what ``token_parts`` does."""
    chex.assert_rank([products.q_a_kv, products.angles, products.positions], [3, 3, 2])
    chex.assert_rank([products.q_norm, products.kv_norm], 1)
    lead, rank, dim = products.positions.shape, products.q_norm.shape[0], products.kv_norm.shape[0]
    rope_dim, rows = products.angles.shape[-1], 0 if products.compress is None else products.compress.shape[-1]
    reason = unsupported_token_parts(q_lora_rank=rank, head_dim=dim, rope_dim=rope_dim, rows=rows)
    if reason is not None:
        raise ValueError(reason)
    chex.assert_shape([products.q_a_kv, products.angles], [(*lead, rank + dim), (*lead, rope_dim)])
    chex.assert_type([products.q_a_kv, products.angles, products.positions], [jnp.float32, jnp.float32, jnp.int32])
    apes = [ape for ape in (products.entry_ape, products.key_ape) if ape is not None]
    if (products.compress is None) != (products.entry_ape is None):
        raise ValueError("compress and entry_ape are for layers with a compressor: give both or neither")
    if products.compress is not None:
        chex.assert_shape(products.compress, (*lead, None))
        chex.assert_type(products.compress, jnp.float32)
        chex.assert_rank(apes, 2)
        if products.widths[2] < 0 or any(ape.shape[1] % _PAIR for ape in apes):
            raise ValueError(f"expected streams of even widths within {rows} columns, got {products.widths[:2]}")
    for name, array in {
        "q_norm": products.q_norm,
        "kv_norm": products.kv_norm,
        "entry_ape": products.entry_ape,
        "key_ape": products.key_ape,
    }.items():
        if array is not None and array.dtype not in _FLOATS:
            raise ValueError(f"{name} must be float32 or bfloat16, got {array.dtype}")
    for name, dtype in {"latent_dtype": rounding.latent_dtype, "stream_dtype": rounding.stream_dtype}.items():
        if dtype not in _FLOATS:
            raise ValueError(f"{name} must be float32 or bfloat16, got {jnp.dtype(dtype)}")
    if rounding.latent_is_operand and rounding.latent_dtype != jnp.bfloat16:
        raise ValueError(f"operand rows are bfloat16, got latent_dtype {jnp.dtype(rounding.latent_dtype)}")
    if (rounding.kv_format is None) != (row_spec is None):
        raise ValueError("kv_format and row_spec belong together: give both or neither")
    if rounding.kv_format is not None:
        if rounding.kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format must be one of {tuple(KV_FORMATS)}, got {rounding.kv_format!r}")
        if reason := KV_FORMATS[rounding.kv_format].unsupported(dim - rope_dim, rope_dim):
            raise ValueError(f"{rounding.kv_format}: {reason}")
