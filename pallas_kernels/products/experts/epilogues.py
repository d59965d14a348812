"""What is made of the sums of experts' products: gated rows, which the second product takes, and outputs of picks."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.activations import ExpertRows, RoundedExpertRows
from pallas_kernels.language.lanes import swapped
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Value, select
from pallas_kernels.products.epilogues.faces import BlockSums, LastSteps
from pallas_kernels.products.problem import NOT_WRITTEN, Epilogue, Spec, Unsupported, WeightSpec
from pallas_kernels.router.tiles import SMALL, RoutedTiles
from pallas_kernels.rows import swiglu, through_bf16

_GATHERED_ROWS = 16  # of a tile, up to which the kernel's own copies of rows take hardly any time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How many tokens pick how many of how many experts, and how many pairs of these a tile holds."""

    tokens: int
    picks: int
    experts: int
    rows: int
    activations: str = "bf16"  # of the weights, as of ``WeightSpec``

    @property
    def pairs(self) -> int:
        return self.tokens * self.picks

    @property
    def shapes(self) -> RoutedTiles:
        return RoutedTiles.shapes(self.pairs, self.experts, self.rows)

    @property
    def has_large(self) -> bool:
        """Whether there may be tiles that are not small."""
        return self.rows > SMALL

    @property
    def is_sorted(self) -> bool:
        """Whether the first product multiplies rows that were sorted, which is faster in large tiles."""
        return self.rows > _GATHERED_ROWS

    @property
    def row_kind(self) -> type[ExpertRows | RoundedExpertRows]:
        """The class of rows that experts multiply. Rows of few tokens in bf16 are taken as they are."""
        return RoundedExpertRows if self.activations == "fp8" else ExpertRows


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PairSums:
    """Sums of a lane: for each eight rows of the tile two adjacent rows of an output, and the same of another output.

    The lane whose number differs by ``distance`` has the same rows of the adjacent output.
    """

    machine: TensorCores
    sums: list[Value]
    output: Value  # the first, among those of the expert
    second: int  # distance of the other
    is_odd: Value  # whether it is the later one of the two adjacent outputs
    distance: int

    @property
    def even(self) -> Value:
        """The first of the two adjacent outputs."""
        return select(self.is_odd, self.output - 1, self.output)

    def pairs(self, values: list[Value]) -> Value:
        """Return two adjacent outputs of a row as bf16, for the same output of two rows.

        The row is the second one where the output is odd.
        """
        first, second = values
        return self.machine.to_bf16(*swapped(self.machine, self.is_odd, (first, second), self.distance))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertEpilogue(Epilogue):
    """What is made of the sums of a product with experts."""

    routing: Routing

    takes_tokens: ClassVar[bool]  # whether rows of x are tokens. Otherwise they are the sorted pairs

    @property
    def routed(self) -> dict[str, Spec]:
        shapes = self.routing.shapes
        return {"pairs": shapes.pairs, "tiles": shapes.tiles, "count": shapes.count}

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        if rows != self.x_rows:
            return Unsupported(kind="impossible", reason=f"expected {self.x_rows} rows of {self.routing}, got {rows}")
        return None

    @property
    def x_rows(self) -> int:
        """Rows of x."""
        return self.routing.tokens if self.takes_tokens else self.routing.pairs

    @abc.abstractmethod
    def target(self, place: Value, pair: Value) -> Value:
        """Return the row of what is stored."""

    @abc.abstractmethod
    def store(self, sums: PairSums, rows: list[tuple[Value, list[Value]]], out: Any) -> None:
        """Store what is made of a lane's sums.

        Args:
          sums: for each eight rows, two rows of the first output and of the second.
          rows: for each eight rows, which row is stored to (none if it is below 0), after ``PairSums.pairs``; and the
            weights of the two rows.
          out: rows of bf16. Those of ``Gated`` have ``values`` [rows, ...], and say in which ``column`` a number is.
        """

    def few(self, block: BlockSums, extras: dict[str, Any], out: Any) -> LastSteps:
        raise TypeError(NOT_WRITTEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated(ExpertEpilogue):
    """SwiGLU of each pair times its weight, as rows [pairs, outputs / 2] of the sorted pairs: ``Routing.row_kind``.

    The first half of the outputs are gates. Gates and ups are rounded to bf16 first. The gate is clamped from above
    alone, before silu. Rows of x are tokens. Rows past the last real pair are not written.
    """

    limit: float = 0.0  # 0 for none

    name: ClassVar[str] = "experts_gate_up"
    is_gated: ClassVar[bool] = True
    takes_tokens: ClassVar[bool] = True

    def extras(self, rows: int, outputs: int) -> dict[str, Spec]:
        return self.routed | {"weights": Spec((self.routing.pairs,), jnp.float32)}

    def state(self, rows: int, outputs: int) -> Any:
        return self.routing.row_kind.shapes(self.routing.pairs, outputs // 2)

    def target(self, place: Value, pair: Value) -> Value:
        return place

    def store(self, sums: PairSums, rows: list[tuple[Value, list[Value]]], out: Any) -> None:
        column = out.column(sums.even)
        for n, (row, weights) in enumerate(rows):
            gates, ups = through_bf16(sums.sums[4 * n : 4 * n + 2]), through_bf16(sums.sums[4 * n + 2 : 4 * n + 4])
            values = [
                swiglu(sums.machine, gate, up, self.limit) * weight
                for gate, up, weight in zip(gates, ups, weights, strict=True)
            ]
            out.values.store_words([sums.pairs(values)], row, column, where=row >= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfPicks(ExpertEpilogue):
    """The outputs of each token's picks, bf16 [tokens, picks, outputs]. Those of padding are not written.

    Rows of x are the sorted pairs, as ``Gated`` gives them.
    """

    name: ClassVar[str] = "experts_down"
    takes_tokens: ClassVar[bool] = False

    def extras(self, rows: int, outputs: int) -> dict[str, Spec]:
        return self.routed

    def state(self, rows: int, outputs: int) -> Any:
        return Spec((self.routing.pairs, outputs), jnp.bfloat16)

    def finished(self, made: Any, rows: int) -> jax.Array:
        return made.reshape(self.routing.tokens, self.routing.picks, -1)

    def target(self, place: Value, pair: Value) -> Value:
        return pair

    def store(self, sums: PairSums, rows: list[tuple[Value, list[Value]]], out: Any) -> None:
        for n, (row, _) in enumerate(rows):
            for box in range(2):
                word = sums.pairs(sums.sums[4 * n + 2 * box : 4 * n + 2 * box + 2])
                out.store_words([word], row, sums.even + box * sums.second, where=row >= 0)
