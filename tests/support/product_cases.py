"""Products with stored weights for tests: random inputs, the exact result, and a run with any split."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import pallas_kernels as pk
from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.products.few.launch import Few, fastest_layout
from pallas_kernels.products.few.split import Split
from pallas_kernels.products.many import launch
from pallas_kernels.products.many.tiling import Tiling, fastest_tiling, fastest_tiling_in_order, tiling_of_heads
from pallas_kernels.products.weights import TILE

GROUP = 128  # inputs that share a scale where activations are rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Many:
    """What of the fastest tiling of a product of many rows is replaced; 0 keeps it."""

    parts: int = 0
    own_parts: int = 0
    tile_rows: int = 0
    tile_outputs: int = 0
    stages: int = 0
    multiprocessors: int = 0  # of the GPU

    def tiling(self, problem: pk.Problem, gpu: GPU) -> Tiling:
        (weight,), (made,), rows = problem.weights, problem.epilogues, problem.rows.count
        if count := self.multiprocessors:
            clusters = gpu.clusters | {2: -(-count // 2)}
            gpu = dataclasses.replace(gpu, multiprocessors=count, clusters=clusters)
        makes_heads = isinstance(made, pk.AttentionQueries | pk.IndexerQueries)
        if problem.rows.kind is OperandRows or (weight.block is None and self.own_parts):
            found = fastest_tiling_in_order(rows, weight, made, gpu, self.own_parts or 1)
        else:
            found = (tiling_of_heads if makes_heads else fastest_tiling)(rows, weight, made, gpu)
        names = "parts", "own_parts", "tile_rows", "tile_outputs", "stages"
        found = dataclasses.replace(found, **{name: value for name in names if (value := getattr(self, name))})
        return found if self.stages else found.with_most_stages()

    def __str__(self) -> str:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value}
        return "".join(f" {name} {value}" for name, value in given.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A product of random numbers."""

    rows: int
    outputs: int  # of a group
    inputs: int
    block: tuple[int, int] | None = (128, 128)
    groups: int = 1
    activations: str = "bf16"
    dtype: Any = jnp.float32
    parts: tuple[int, int] | None = None  # blocks of a cluster, and parts of a block; None for the fastest
    tiles: int = 1  # of a block, if parts are given
    streams: bool = False  # whether x is copied chunk by chunk, if parts are given
    turns: int = 1  # parts that a warpgroup computes one after the other, if parts are given
    columns: int | None = None  # rows of x in a block, if parts are given; None for the fastest
    many: Many | None = None  # runs the kernel of many rows

    def __str__(self) -> str:
        stored = "bf16" if self.block is None else f"{self.block[0]}x{self.block[1]}"
        how = "" if self.parts is None else f" {self.parts[0]} blocks of {self.parts[1]} parts, {self.tiles} tiles"
        how += ", streamed" if self.streams else ""
        how += f", {self.turns} turns" if self.turns > 1 else ""
        how += f", {self.columns} columns" if self.columns else ""
        how += "" if self.many is None else f" many{self.many}"
        groups = f"{self.groups} x " if self.groups > 1 else ""
        return f"{self.rows} rows {groups}{self.inputs} to {self.outputs} {stored} {self.activations}{how}"

    @property
    def spec(self) -> pk.WeightSpec:
        shape = self.groups * self.outputs, self.inputs
        return pk.WeightSpec(shape=shape, block=self.block, groups=self.groups, activations=self.activations)

    def problem(
        self,
        epilogue: pk.Epilogue | None = None,
        kind: type[ActivationRows] = PlainRows,
        needed: pk.Needed = pk.Needed.ALL,
    ) -> pk.Problem:
        """The product as a problem; of which sums are stored, if nothing else is made of them."""
        rows = pk.RowsSpec(count=self.rows, width=self.groups * self.inputs, kind=kind)
        made = pk.Store(dtype=self.dtype) if epilogue is None else epilogue
        return pk.Problem(rows=rows, weights=(self.spec,), epilogues=(made,), needed=needed)

    def plan(self, problem: pk.Problem | None = None, gpu: GPU = HOPPER) -> pk.Plan:
        """The plan of the product with what the case replaces, also where another program is faster."""
        problem = self.problem() if problem is None else problem
        if self.many is not None:
            tiling = self.many.tiling(problem, gpu)
            return pk.Plan(problem=problem, gpu=gpu, kernel=launch.Many(tiling=tiling))
        if self.parts is None:
            return any_plan(problem, gpu)
        (made,), (cluster, parts) = problem.epilogues, self.parts
        layout = fastest_layout(problem.rows, self.spec, made, gpu)
        chunks = self.inputs // layout.inputs // (cluster * parts * self.turns)
        blocks = -(-(self.outputs // TILE) // self.tiles)
        split = Split(cluster=cluster, parts=parts, tiles=self.tiles, blocks=blocks, chunks=chunks, turns=self.turns)
        columns = self.columns or layout.columns
        layout = dataclasses.replace(layout, split=split, streams=self.streams, columns=columns)
        return pk.Plan(problem=problem, gpu=gpu, kernel=Few(layout=layout))

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The weight as ``run`` takes it."""
        weight, scales = self.weight
        return (weight,) if scales is None else (weight, scales)

    @functools.cached_property
    def x(self) -> jax.Array:
        """bf16, rows of all magnitudes; the last one is 0."""
        rng = np.random.default_rng(self.rows)
        x = rng.standard_normal((self.rows, self.groups * self.inputs))
        x *= 2.0 ** rng.integers(-12, 12, (self.rows, 1))
        x[-1] = 0
        return jax.device_put(x.astype(ml_dtypes.bfloat16))  # jnp.asarray would compile a program for each shape

    @functools.cached_property
    def weight(self) -> tuple[jax.Array, jax.Array | None]:
        """Codes of all values but NaN, subnormal ones too, and scales."""
        rng, shape = np.random.default_rng(1), (self.groups * self.outputs, self.inputs)
        if self.block is None:
            return jax.device_put(rng.standard_normal(shape).astype(ml_dtypes.bfloat16)), None
        codes = rng.integers(0, 256, shape, np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        scales = rng.integers(110, 134, (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])), np.uint8)
        scales[0, 0] = 134  # the largest
        return jax.device_put((codes.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu)))

    @property
    def wide(self) -> np.ndarray:
        weight, scales = self.weight
        wide = np.asarray(weight).astype(np.float64)
        if scales is not None:
            assert self.block is not None
            full = np.repeat(np.repeat(np.asarray(scales).astype(np.float64), self.block[0], 0), self.block[1], 1)
            wide *= full[: wide.shape[0], : wide.shape[1]]
        return wide

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the product in f64, and the same of magnitudes, to which errors are compared."""
        x = np.asarray(self.x).astype(np.float64)
        if self.activations == "fp8":
            groups = x.reshape(self.rows, -1, GROUP)
            peak = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(1e-4))
            scale = 2.0 ** np.ceil(np.log2(peak / 448))
            x = ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)

        def multiply(x: np.ndarray, wide: np.ndarray) -> np.ndarray:
            x, wide = x.reshape(self.rows, self.groups, -1), wide.reshape(self.groups, -1, self.inputs)
            return np.einsum("mgi,goi->mgo", x, wide).reshape(self.rows, -1)

        return multiply(x, self.wide), multiply(np.abs(x), np.abs(self.wide))

    def made(self, plan: pk.Plan, x: Any, *extras: Any, simulate: bool) -> Any:
        """Run a plan of the product, in a program of its own."""

        def run(x: Any, arrays: Any, *extras: Any) -> Any:
            (found,) = pk.run(plan, x, [arrays], *extras, simulate=simulate)
            return found

        return jax.jit(run)(x, self.arrays, *extras)

    def run(self, x: Any = None, *, simulate: bool, gpu: GPU = HOPPER) -> np.ndarray:
        """Run the kernel of a GPU, which must be this machine's own if it is not simulated. ``x`` replaces its own."""
        x = self.x if x is None else x
        kind = type(x) if isinstance(x, ActivationRows) else PlainRows
        plan = self.plan(self.problem(kind=kind), gpu)
        return np.asarray(self.made(plan, x, simulate=simulate).astype(jnp.float32))

    def check(self, found: np.ndarray, *, simulate: bool) -> None:
        """Check a result.

        The products of the operands are exact in f32. Their sums are not. A GPU's tensor cores keep fewer bits than f32
        of what they add: of bf16, errors on an H200 are up to 3e-6 of the sum of magnitudes. With FP8 on both sides
        every instruction cuts its 32 products and the sum before them to 13 bits below the largest one's first, so it
        errs by 33 times 2^-13 of that one at most. Of random numbers the largest is some sixth of the 32 magnitudes. A
        result in bf16 is rounded to 2^-8.
        """
        want, magnitude = self.exact()
        rounding = 2.0**-8 * np.abs(want) if self.dtype == jnp.bfloat16 else 0.0
        assert found.shape == want.shape
        relative = 2.0**-10 if self.activations == "fp8" and not simulate else 2.0**-17
        assert np.all(np.abs(found - want) <= relative * magnitude + rounding)


def random_angles(rows: int, rope_dim: int) -> np.ndarray:
    """Cosines and then sines, as products that make queries take them: f32 [rows, rope_dim]."""
    turns = np.random.default_rng(0).uniform(0, 2 * np.pi, (rows, rope_dim // 2))
    return np.concatenate([np.cos(turns), np.sin(turns)], 1, dtype=np.float32)


def any_plan(problem: pk.Problem, gpu: GPU = HOPPER) -> pk.Plan:
    """The plan of a problem that has one, be it slower than another program."""
    found = pk.plan(problem, gpu)
    plan = found.plan if isinstance(found, pk.Unsupported) else found
    assert isinstance(plan, pk.Plan), found
    return plan
