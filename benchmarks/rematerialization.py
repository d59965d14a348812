"""Does XLA read a donated array after it was overwritten? python -m benchmarks.rematerialization [--compile]

The reproduction for upstream_rematerialization.md, of JAX alone. On a GPU it prints a sum with the array donated and
without. With ``--compile`` it is compiled for an H200 on a machine without a GPU (extra ``cross``), and prints the
instructions of the program, in their order, that use the donated array.
"""

import os
import sys

from tests.support.compile_for_gpu import compile_for, prepare_environment

if "--compile" in sys.argv:
    prepare_environment()  # before JAX is imported
# XLA may use 1 % of the memory that it would otherwise, so that memory is short.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_memory_limit_slop_factor=1"

import jax
import jax.numpy as jnp

SIZE = 16384
SHAPES = jax.ShapeDtypeStruct((SIZE,), jnp.int32), jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)


def program(count: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Read ``count`` before it grows, and use what was made of it once more at the end."""
    wide = jnp.sin(count[:, None].astype(jnp.float32) * jnp.arange(SIZE, dtype=jnp.float32)[None])
    y = wide @ w
    grown = count + jnp.where(y[:, 0] < 1e30, 1, 0)  # in the memory of ``count``, if it is donated
    y = y * grown[:, None].astype(jnp.float32)
    z = y @ w
    z = ((jnp.tanh(z) @ y) @ z) @ y  # so many arrays at once that ``wide`` is dropped and made again
    return grown, jnp.sum(z @ wide)


def uses_of_donated(text: str) -> list[str]:
    """The instructions that read the first argument, and the name of that which is returned for it."""
    entry = text[text.index("\nENTRY ") :]
    lines = [line.strip().split(", kind=")[0] for line in entry.splitlines()]
    (donated,) = (line.split(" = ")[0] for line in lines if "s32" in line and "parameter(0)" in line)
    return [line for line in lines if f"{donated})" in line or f"{donated}," in line or "ROOT" in line]


def main() -> None:
    print("jax", jax.__version__)
    if "--compile" in sys.argv:
        for line in uses_of_donated(compile_for("h200", program, *SHAPES, donate_argnums=0).as_text() or ""):
            print(line)
        return
    count, w = jnp.arange(SIZE, dtype=jnp.int32) % 7, jnp.eye(SIZE)
    kept = jax.jit(program)(count, w)[1]
    donated = jax.jit(program, donate_argnums=0)(count, w)[1]
    print(f"{jax.devices()[0].device_kind}: {kept} without donation, {donated} with it")


if __name__ == "__main__":
    main()
