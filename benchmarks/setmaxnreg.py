"""Does the installed CUDA plugin heed ``setmaxnreg``? python -m benchmarks.setmaxnreg [--compile]

The reproduction for upstream_setmaxnreg.md: a kernel of JAX alone, whose two warpgroups divide their registers. It runs
on an H100 or H200; with ``--compile`` it is compiled for one on a machine without a GPU (extra ``cross``). Where the
counts are ignored, what the compiler prints says so: ``'setmaxnreg' ignored``.
"""

import os
import sys

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic reads it when a kernel is compiled

from tests.support.compile_for_gpu import compile_for, prepare_environment

if "--compile" in sys.argv:
    prepare_environment()  # before JAX is imported

import importlib.metadata

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def body(x_ref, out_ref) -> None:
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

    @pl.when(warpgroup == 1)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        out_ref[...] = x_ref[...] + 1


def add_one(x: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, grid=(1,), grid_names=("block",), num_threads=2, thread_name="warpgroup")(x)


def main() -> None:
    for name in ("jax", "jaxlib", "jax-cuda13-plugin"):
        print(name, importlib.metadata.version(name))
    if "--compile" in sys.argv:
        compile_for("h200", add_one, jax.ShapeDtypeStruct((128,), jnp.float32))
    else:
        print(jax.jit(add_one)(jnp.zeros(128))[:4])


if __name__ == "__main__":
    main()
