"""How the tests of the kernel language run it: bodies on one block, and functions of one element per lane."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import Value, select
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)
F32 = np.float32
TINY = F32(2.0**-126)  # the smallest normal f32

LANE = np.arange(WARPGROUP, dtype=np.int32)
Body = Callable[[Any, Any, Any], Any]
ROOM = 1 << 16  # shared memory, in bytes, for bodies that need not count it

# Values at which arithmetic is known to go wrong, besides ordinary numbers.
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1 / 3, 88.7, -87.4, -104.0, 1e30, -1e30, 3.4e38, -3.4e38, 2.0**-126, 1e-30, 16777217.0]
    + [np.nan, np.inf, -np.inf],
    F32,
)


def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def run(
    body: Callable[..., None],
    inputs: Any,
    state: Any,
    *,
    simulate: bool,
    name: str = "probe",
    grid: tuple[int, ...] = (1,),
    **sizes: Any,
) -> Any:
    """Launch a body and return its state as NumPy arrays. ``sizes`` are the other fields of ``Grid``."""
    start = functools.partial(launch, body, name=name, grid=Grid(blocks=grid, **sizes), simulate=simulate)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        out = jax.jit(lambda inputs: start(inputs=inputs, state=state))(inputs)
    else:
        out = jax.jit(lambda inputs, state: start(inputs=inputs, state=state))(inputs, jax.device_put(state))
    return jax.tree.map(np.asarray, out)


@functools.cache
def mesh_of(capability: str | None, name: str, platform: str = "gpu") -> jax.sharding.AbstractMesh:
    """Return a mesh of a device that does not exist.

    Under ``jax.sharding.use_abstract_mesh`` kernels are made for it.
    """
    kind = type("Device", (jax.sharding.AbstractDevice,), {"compute_capability": capability})
    device = kind(device_kind=name, num_cores=None, platform=platform)
    axis = jax.sharding.AxisType.Auto
    return jax.sharding.AbstractMesh((1,), ("x",), axis_types=(axis,), abstract_device=device)


def emit(body: Callable[..., None], inputs: Any, state: Any, **sizes: Any) -> str:
    """Run a body on the machine that emits for a GPU, without needing one.

    Returns the module that contains the kernel.
    """
    grid = Grid(blocks=(1,), **sizes)
    call = jax.jit(lambda inputs, state: launch(body, name="probe", grid=grid, inputs=inputs, state=state))
    with jax.sharding.use_abstract_mesh(mesh_of("9.0", "NVIDIA H200")):
        return call.trace(inputs, state).lower(lowering_platforms=("cuda",)).as_text()


def simulated(body: Body, **sizes: Any) -> None:
    """Simulate a body that reads and updates an array with one number per lane."""
    run(body, jax.device_put(LANE), np.zeros_like(LANE), simulate=True, shared_bytes=ROOM, **sizes)


def load_value(buffer: Buffer, at: Value) -> Value:
    return buffer.load_floats(at, count=1)[0] if buffer.dtype == jnp.float32 else buffer.load_int(at)


def store_value(buffer: Buffer, at: Value, value: Value) -> None:
    if value.kind == "bool":
        value = select(value, value.machine.constant(1, "i32"), 0)
    if value.kind == "f32":
        buffer.store_floats([value], at)
    else:
        buffer.store_int(value, at)


def elementwise(
    function: Callable[..., Value | Sequence[Value]],
    *operands: np.ndarray,
    simulate: bool,
    outputs: int = 1,
    dtype: Any = F32,
) -> list[np.ndarray]:
    """Apply a function of a machine and one element of each operand per lane, over as many blocks as needed."""
    size = len(operands[0])
    padded = [np.concatenate([x, np.ones(-size % WARPGROUP, x.dtype)]) for x in operands]

    def body(machine: Machine, inputs: list[Buffer], out: list[Buffer]) -> None:
        n = machine.block(0) * WARPGROUP + machine.thread
        results = function(machine, *[load_value(buffer, n) for buffer in inputs])
        for buffer, value in zip(out, [results] if isinstance(results, Value) else results, strict=True):
            store_value(buffer, n, value)

    inputs = jax.device_put(padded)
    state = [spec(padded[0].shape, dtype)] * outputs
    grid = (len(padded[0]) // WARPGROUP,)
    out = run(body, inputs, state, simulate=simulate, grid=grid, shared_bytes=4 * WARPGROUP)
    return [x[:size] for x in out]


def pairs_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every pair of values."""
    a, b = np.meshgrid(values, values, indexing="ij")
    return a.ravel(), b.ravel()


def random_floats(seed: int, size: int) -> np.ndarray:
    """Return finite f32 of all magnitudes from 1e-30 to 1e30, none of them subnormal."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 10.0 ** rng.uniform(-30, 30, size)).astype(F32)


def random_bits(seed: int, size: int) -> np.ndarray:
    """Return f32 with arbitrary bits, including NaN, infinity and subnormal numbers."""
    return np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32).view(F32)


def assert_same_floats(got: np.ndarray, want: np.ndarray) -> None:
    """Check that bits are equal. Any NaN equals any other, because no machine defines which NaN it gives."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])
