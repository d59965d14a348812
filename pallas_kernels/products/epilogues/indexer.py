"""Queries of the indexer: rope, Hadamard transform and rounding of the sums of a product whose outputs are heads.

    q = round(hadamard(rope(sums)))       in the keys' format, over the outputs of a head, for each row of x

A block, or in products of many rows a warpgroup, has whole heads of its rows, so that nobody waits for others. In
registers the four lanes of a quad share a row, and have two adjacent outputs of each eight. Everything is computed in
the order of ``indexer_queries``, so that the same sums give the same bytes.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from pallas_kernels.formats import KEY_FORMATS, Fp4Keys, KeyRows
from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team, fold, maximum, packed_bytes, quad_transposed
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Index, Value, select
from pallas_kernels.products.epilogues.attention import Converted, Head, Heads, PairAngles, launch_conversion
from pallas_kernels.products.epilogues.faces import Extras, Finish, Lines, RowSums
from pallas_kernels.products.problem import Spec, Unsupported, WeightSpec
from pallas_kernels.products.weights import ROWS, TILE
from pallas_kernels.rows import hadamard, load_angles, magnitude, rope
from pallas_kernels.trees import Tree

DIMS = 64, 128, 256  # outputs of a head: they fit in a block
DIM_OF_MANY = 128  # outputs of a head where rows are many
_LANES = 8  # that hold a head's row
_QUAD, _EIGHT = 4, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerQueries(Heads):
    """Heads that are rotated, transformed, and rounded in the format of the indexer's keys."""

    key_format: str  # a 4-bit one
    key_row: KeyRows[Spec] | KeyRows[jax.Array]  # an encoded row, or what describes one

    name_of_many: ClassVar[str] = "product_of_indexer_queries"

    @property
    def dim(self) -> int:
        """Outputs of a head: two codes in a byte."""
        return 2 * self.key_row.codes.shape[0]

    @property
    def keys(self) -> Fp4Keys:
        return _fp4(self.key_format)

    def state(self, rows: int, outputs: int) -> KeyRows[Spec]:
        heads = rows * (outputs // self.dim)
        return jax.tree.map(lambda leaf: Spec((heads, *leaf.shape), leaf.dtype), self.key_row)

    def state_of_many(self, rows: int, outputs: int) -> KeyRows[Spec]:
        heads = outputs // self.dim
        return jax.tree.map(lambda leaf: Spec((rows, heads * leaf.shape[0]), leaf.dtype), self.key_row)

    def finished(self, made: KeyRows[jax.Array], rows: int) -> KeyRows[jax.Array]:
        return jax.tree.map(lambda leaf, row: leaf.reshape(rows, -1, *row.shape), made, self.key_row)

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        dim, outputs = self.dim, weight.shape[0]
        if not isinstance(KEY_FORMATS.get(self.key_format), Fp4Keys):
            reason = f"key_format must be a 4-bit format, got {self.key_format!r}"
            return Unsupported(kind="no kernel", reason=reason)
        if dim not in DIMS or outputs % dim or weight.groups != 1:
            reason = f"outputs must be heads of {DIMS}, got {outputs} outputs and heads of {dim}"
            return Unsupported(kind="no kernel", reason=reason)
        if self.rope_dim % VECTOR or not 0 < self.rope_dim <= dim:
            reason = f"rope_dim must be a multiple of {VECTOR} up to {dim}, got {self.rope_dim}"
            return Unsupported(kind="no kernel", reason=reason)
        if rows > ROWS and (dim != DIM_OF_MANY or self.rope_dim % 16):
            sizes = f"heads of {DIM_OF_MANY} and a rope_dim that is a multiple of 16"
            reason = f"more than {ROWS} rows must have {sizes}, got {dim} and {self.rope_dim}"
            return Unsupported(kind="no kernel", reason=reason)
        return None

    # Few rows: a block has whole heads, in a line for each row.
    @property
    def tiles(self) -> int:
        return self.dim // TILE

    def begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: KeyRows[Buffer]) -> Finish:
        row, mine = Row(Team(machine, _LANES), self.dim), list(lines.each(_LANES))
        angles = [load_angles(row, table, line.row, where=line.there) for line in mine]
        heads = out.codes.shape[0] // lines.rows

        def make(sums: Shared) -> None:
            for line, turns in zip(mine, angles, strict=True):
                values = rope([sums.load_floats(line.loaded, channel) for channel in row.channel], turns)
                head = line.row * heads + lines.output // self.dim
                self.keys.store(row, hadamard(row, values), out, head, where=line.there)

        return Finish(lambda sums, sent: None, make)

    # Many rows: lanes have pairs of the outputs of whole heads.
    def many_rows(self, sums: RowSums, extras: Extras, out: KeyRows[Buffer], begun: None) -> None:
        machine, dim = sums.machine, DIM_OF_MANY
        turns = PairAngles.load(machine, extras["angles"], sums.rows, dim // _EIGHT, True)
        for half, (_, at, where) in enumerate(sums.rows):
            for head in range(2 * len(sums.sums) // dim):
                of_head = sums.sums[head * dim // 2 : (head + 1) * dim // 2]
                pairs = [of_head[n : n + 2] for n in range(2 * half, len(of_head), 4)]
                turned = _hadamard(machine, [turns.rotate(half, n, pair) for n, pair in enumerate(pairs)])
                self._store_head(machine, turned, out, (at, sums.output // dim + head), where)

    def _store_head(
        self,
        machine: TensorCores,
        pairs: list[list[Value]],
        out: KeyRows[Buffer],
        place: tuple[Index, Index],
        where: Condition,
    ) -> None:
        """Round a head and store it in rows [M, all heads].

        Args:
          machine: of the values.
          pairs: after the Hadamard transform, of which a lane has a pair of each eight.
          out: pytree ``codes scale`` of buffers.
          place: row, and number of the head.
          where: whether the row exists.
        """
        (row, head), quarter, team, keys = place, machine.thread % _QUAD, Team(machine, _QUAD), self.keys
        scales, codes, of_group = [], [], keys.per_scale // _EIGHT
        for first in range(0, len(pairs), of_group):
            values = [x for pair in pairs[first : first + of_group] for x in pair]
            amax = machine.bits(fold(maximum, [magnitude(x) for x in values]))
            scale, words = keys.packed(team.neighbours(maximum, amax, _QUAD), values)
            scales.append(scale)
            codes += words
        if of_group < VECTOR:  # words of four codes
            codes = [low | (high << 16) for low, high in zip(codes[::2], codes[1::2], strict=True)]
        words = _quad_rows(machine, codes)
        out.codes.store_words(words, row, head * (DIM_OF_MANY // 2) + quarter * 16, where=where)
        of_head = [packed_bytes(scales[n : n + VECTOR]) for n in range(0, len(scales), VECTOR)]
        scale_bytes = DIM_OF_MANY // keys.per_scale
        assert out.scale is not None
        out.scale.store_words(of_head, row, head * scale_bytes, where=where & (quarter == 0))


def _hadamard(machine: TensorCores, pairs: list[list[Value]]) -> list[list[Value]]:
    """Apply the normalised Walsh-Hadamard transform to a head, of which a lane has a pair of each eight.

    A butterfly per bit of an output's number, from the lowest on: bit 0 is the place in the pair, bits 1 and 2 are the
    lane, and the others the number of the eight.
    """
    pairs = [[a + b, a - b] for a, b in pairs]
    for distance in (1, 2):
        sign = select((machine.thread & distance) > 0, machine.constant(-1.0, "f32"), 1.0)
        pairs = [[machine.fma(x, sign, machine.shuffle_xor(x, distance)) for x in pair] for pair in pairs]
    distance = 1
    while distance < len(pairs):
        for low in range(len(pairs)):
            if not low & distance:
                first, second = pairs[low], pairs[low | distance]
                pairs[low] = [a + b for a, b in zip(first, second, strict=True)]
                pairs[low | distance] = [a - b for a, b in zip(first, second, strict=True)]
        distance *= 2
    return [[x * DIM_OF_MANY**-0.5 for x in pair] for pair in pairs]


def _quad_rows(machine: TensorCores, words: list[Value]) -> list[Value]:
    """Transpose bytes of a quad: byte n of a lane's 16 becomes byte 4 n + lane of the quad's 64.

    A lane gets 16 adjacent ones of these.
    """
    a, b, c, d = quad_transposed(machine, words)
    halves = [[machine.permute_bytes(*pair, selector) for pair in ((a, b), (c, d))] for selector in (0x5140, 0x7362)]
    return [machine.permute_bytes(low, high, selector) for low, high in halves for selector in (0x5410, 0x7632)]


def _fp4(key_format: str) -> Fp4Keys:
    known = {name: form for name, form in KEY_FORMATS.items() if isinstance(form, Fp4Keys)}
    if key_format not in known:
        raise ValueError(f"key_format must be one of {tuple(known)}, got {key_format!r}")
    return known[key_format]


def indexer_queries[Leaf: Shaped](
    product: jax.Array,
    angles: jax.Array,
    key_row: KeyRows[Leaf],
    *,
    key_format: str,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> Tree:
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
    (heads, dim), keys = product.shape[2:], _fp4(key_format)
    if dim & (dim - 1) or dim < keys.per_scale:
        raise ValueError(f"key_dim must be a power of two from {keys.per_scale} on, got {dim}")

    def body(machine: TensorCores, inputs: Converted[Buffer], out: KeyRows[Buffer]) -> None:
        head = Head.load(machine, inputs, heads, _LANES)
        values = hadamard(head.row, head.turned(head.values))
        keys.store(head.row, values, out, head.number, where=head.there)

    given = product, angles, needed
    return launch_conversion("indexer_queries", body, given, key_row, _LANES, simulate=simulate)
