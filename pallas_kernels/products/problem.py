"""What a product is: rows, the weights that multiply them, what is made of the sums of each, and which rows are needed.

    y[m, o] = sum over i of x[m, i] weight[o, i] scales[o // block[0], i // block[1]]

Sums are f32. Everything here is hashable, and made of shapes and dtypes alone. ``plan.plan`` says how a problem is
solved, and ``run.run`` solves it.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.activations import ActivationRows, PlainRows
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.products.epilogues.faces import (
    Begun,
    BlockSums,
    ColumnSums,
    Extras,
    LastSteps,
    Made,
    RowSums,
    TileShape,
)

Spec = jax.ShapeDtypeStruct
ACTIVATIONS = ("bf16", "fp8")  # of weights: see ``WeightSpec``
NOT_WRITTEN = "this epilogue has no form for these sums"


class Needed(enum.Enum):
    """Which rows of x anyone reads. Results of others may be anything, NaN too: of many rows, tiles are left out."""

    ALL = "all"
    PREFIX = "prefix"  # of one request, bool [1, M]: the rows up to the last needed one count as needed
    MASK = "mask"  # bool [M]

    def spec(self, rows: int) -> Spec | None:
        """Return what says so, beside the other arrays of a product."""
        shapes = {Needed.PREFIX: (1, rows), Needed.MASK: (rows,)}
        return Spec(shapes[self], jnp.bool_) if self in shapes else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """Why a problem has no plan."""

    kind: Literal["impossible", "no kernel", "slower"]  # it has no meaning; nobody wrote it; other programs are faster
    reason: str
    plan: Any = None  # the ``Plan`` that is slower, if there is one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpec:
    """The rows of x."""

    count: int
    width: int  # inputs of all groups of a weight
    kind: type[ActivationRows] = PlainRows
    dtype: DTypeLike = jnp.bfloat16  # of plain rows

    @property
    def shapes(self) -> ActivationRows:
        if self.kind is PlainRows:
            return PlainRows.shapes(self.count, self.width, dtype=self.dtype)
        return self.kind.shapes(self.count, self.width)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """How a weight is stored, and how a product with it is meant."""

    shape: tuple[int, ...]  # [groups * outputs, inputs]
    groups: int = 1  # outputs of group g are products with inputs [g * inputs, (g + 1) * inputs) of x
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None for a weight without scales
    # "bf16" takes x as it is. "fp8" first rounds each 128 inputs of a row to E4M3, by the smallest power of two of
    # which 448 times is at least 1e-4 and their largest magnitude. Sums over 128 inputs are then added up in f32.
    activations: str = "bf16"
    dtype: DTypeLike = jnp.bfloat16  # of a weight without scales

    @property
    def outputs(self) -> int:
        """Of a group."""
        return self.shape[0] // self.groups

    @property
    def inputs(self) -> int:
        """Of a group."""
        return self.shape[1]

    @property
    def arrays(self) -> tuple[Spec, ...]:
        """The weight; of FP8 its codes, without NaN, and its scales, at most 2^7: larger ones give NaN."""
        if self.block is None:
            return (Spec(self.shape, self.dtype),)
        scales = tuple(-(-size // by) for size, by in zip(self.shape, self.block, strict=True))
        return Spec(self.shape, jnp.float8_e4m3fn), Spec(scales, jnp.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec(WeightSpec):
    """How the weights of all experts of a mixture are stored, of which each tile of rows is multiplied by one.

    ``shape`` is that of one expert, [outputs, inputs].
    """

    experts: int
    block: tuple[int, int] | None = (1, 32)
    interleaved: bool = False  # whether codes are as ``interleaved_codes`` orders them for these activations

    @property
    def arrays(self) -> tuple[Spec, ...]:
        """Pairs of FP4 codes (E2M1, the even input in the low nibble), and their scales, at most 2^9.

        Larger scales give NaN.
        """
        assert self.block is not None
        outputs, inputs = self.shape
        scales = self.experts, -(-outputs // self.block[0]), -(-inputs // self.block[1])
        return Spec((self.experts, outputs, inputs // 2), jnp.uint8), Spec(scales, jnp.float8_e8m0fnu)


class Epilogue(abc.ABC):
    """What is made of the sums of a product before they are stored. Subclasses are frozen dataclasses.

    An epilogue has a formula and two faces: one works on lines of shared memory, where a block has few rows, and the
    other on registers, where it has many (``epilogues.faces``).
    """

    name: ClassVar[str] = "product"  # of the kernel of few rows, in profiles
    name_of_many: ClassVar[str] = "product_of_many"

    def extras(self, rows: int, outputs: int) -> dict[str, Spec]:
        """Return the arrays that it takes beside the sums, by name."""
        del rows, outputs
        return {}

    @abc.abstractmethod
    def state(self, rows: int, outputs: int) -> Made:
        """Return the shapes of what the kernel of few rows stores."""

    def state_of_many(self, rows: int, outputs: int) -> Made:
        """Return the same of that of many rows."""
        return self.state(rows, outputs)

    def finished(self, made: Made, rows: int) -> Made:
        """Return what a kernel stored as the result: a class of rows, or arrays [M, ...]."""
        del rows
        return made.values if isinstance(made, PlainRows) else made

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        """Return why no kernel makes this of the sums of so many rows, or None."""
        del rows, weight
        return None

    # Whether outputs of the weight's first half are computed beside those of the second one that belong to them.
    is_gated: ClassVar[bool] = False

    # Products of few rows.
    blocks: ClassVar[int] = 1  # of a cluster, which share what is made
    most_parts: ClassVar[int | None] = None  # of the inputs, whose sums meet; None for any number

    @property
    def tiles(self) -> int | None:
        """Tiles of a block, of 64 outputs each; None for any number."""
        return None

    @property
    def beside(self) -> int:
        """Tiles of a block, its last ones, that are of a second weight."""
        return 0

    def shared_bytes(self, lines: int) -> int:
        """Return the bytes of shared memory that a block of so many lines takes beside the sums."""
        del lines
        return 0

    def sent_bytes(self, lines: int) -> int:
        """Return the bytes that the blocks of a cluster send to each of them."""
        del lines
        return 0

    @abc.abstractmethod
    def few(self, block: BlockSums, extras: Extras, out: Made) -> LastSteps:
        """Load what the sums need, and return what is done when they are there."""

    # Products of many rows.
    keeps_rows: ClassVar[bool] = True  # whether registers are free to keep the numbers of rows from tile to tile

    @property
    def keeps_needed(self) -> bool:
        """Whether registers are free to keep what says which rows are needed."""
        return True

    def neighbours(self, tile_outputs: int) -> int:
        """Return how many blocks of a cluster have adjacent tiles that make something together."""
        del tile_outputs
        return 1

    def shared_bytes_of_many(self, tile: TileShape) -> int:
        del tile
        return 0

    def begin_many(self, machine: TensorCores, tile: TileShape, extras: Extras) -> Begun:
        """Take shared memory and barriers. All lanes of the cluster call it. The result is passed to ``many_rows``."""
        del machine, tile, extras

    def many_rows(self, sums: RowSums, extras: Extras, out: Made, begun: Begun) -> None:
        """Store what is made of sums with rows of x along rows."""
        raise TypeError(NOT_WRITTEN)

    def many_columns(self, sums: ColumnSums, extras: Extras, out: Made) -> None:
        """Store what is made of sums with outputs along rows."""
        raise TypeError(NOT_WRITTEN)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A product of rows with one weight, or with several in one launch."""

    rows: RowsSpec
    weights: tuple[WeightSpec, ...]
    epilogues: tuple[Epilogue, ...]  # one for each weight
    needed: Needed = Needed.ALL

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.epilogues) or not self.weights:
            raise ValueError(f"each weight has an epilogue, got {len(self.weights)} and {len(self.epilogues)}")
        for weight in self.weights:
            if weight.groups * weight.inputs != self.rows.width:
                inputs = f"{weight.groups} groups of {weight.inputs} inputs"
                raise ValueError(f"rows of {self.rows.width} numbers do not fit {inputs}")

    @property
    def extras(self) -> dict[str, Spec]:
        """What ``run`` takes after the weights, in this order: what epilogues take, and which rows are needed."""
        found: dict[str, Spec] = {}
        for weight, epilogue in zip(self.weights, self.epilogues, strict=True):
            found |= epilogue.extras(self.rows.count, weight.shape[0])
        needed = self.needed.spec(self.rows.count)
        return found if needed is None else found | {"needed": needed}
