"""Products with stored weights for tests: random inputs, the exact result, and a run with any split."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import pallas_kernels as pk
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.products.block import ProductInputs
from pallas_kernels.products.launches import fastest_layout, launch_many, launch_product
from pallas_kernels.products.many.tiling import fastest_tiling
from pallas_kernels.products.split import TILE, Split

GROUP = 128  # inputs that share a scale where activations are rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Many:
    """What of the fastest tiling of a product of many rows is replaced; 0 keeps it."""

    parts: int = 0
    tile_rows: int = 0
    tile_outputs: int = 0
    stages: int = 0
    multiprocessors: int = 0  # of the GPU

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
    many: Many | None = None  # runs the kernel of many rows

    def __str__(self) -> str:
        stored = "bf16" if self.block is None else f"{self.block[0]}x{self.block[1]}"
        how = "" if self.parts is None else f" {self.parts[0]} blocks of {self.parts[1]} parts, {self.tiles} tiles"
        how += ", streamed" if self.streams else ""
        how += "" if self.many is None else f" many{self.many}"
        groups = f"{self.groups} x " if self.groups > 1 else ""
        return f"{self.rows} rows {groups}{self.inputs} to {self.outputs} {stored} {self.activations}{how}"

    @property
    def form(self) -> pk.WeightForm:
        return pk.WeightForm(block=self.block, groups=self.groups, activations=self.activations)

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

    def run(self, x: jax.Array | None = None, *, simulate: bool, gpu: GPU = HOPPER) -> np.ndarray:
        """Run the kernel of a GPU, which must be this machine's own if it is not simulated. ``x`` replaces its own."""
        weight, scales = self.weight
        if scales is not None:
            weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
        inputs = ProductInputs(x=self.x if x is None else x, weight=weight, scales=scales)
        launch = functools.partial(self._launch(gpu), dtype=self.dtype, simulate=simulate)
        return np.asarray(jax.jit(launch)(inputs).astype(jnp.float32))

    def _launch(self, gpu: GPU) -> Any:
        if self.many is not None:
            changes = {name: value for name, value in dataclasses.asdict(self.many).items() if value}
            if (count := changes.pop("multiprocessors", 0)) > 0:
                gpu = dataclasses.replace(gpu, multiprocessors=count)
            tiling = fastest_tiling(self.rows, self.outputs, self.inputs, self.form, gpu)
            tiling = dataclasses.replace(tiling, **changes)
            return functools.partial(launch_many, tiling if self.many.stages else tiling.with_most_stages())
        layout = fastest_layout(self.rows, (self.groups * self.outputs, self.inputs), self.form, gpu)
        if self.parts is not None:
            cluster, parts = self.parts
            chunks = self.inputs // layout.inputs // (cluster * parts)
            blocks = -(-(self.outputs // TILE) // self.tiles)
            split = Split(cluster=cluster, parts=parts, tiles=self.tiles, blocks=blocks, chunks=chunks)
            layout = dataclasses.replace(layout, split=split, streams=self.streams)
        return functools.partial(launch_product, layout)

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
