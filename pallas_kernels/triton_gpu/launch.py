"""Launches of Triton kernels from JAX: through jax-triton on a GPU, or in Triton's interpreter over NumPy arrays.

Triton decides at import, by the environment variable ``TRITON_INTERPRET``, whether its kernels are compiled or
interpreted. In a process that interprets them, every device can run them, slowly.

A kernel takes pointers: first those of its inputs, then those of the arrays that it updates, then those of its results.
jax-triton names an updated array once more among the results, at the same address. A kernel that updates n arrays
therefore ends its list of pointers with n names that it does not use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.triton_gpu import device, interpreter

Kernel = Any  # what ``triton.jit`` returns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a kernel is launched, and its constants."""

    grid: tuple[int] | tuple[int, int] | tuple[int, int, int]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 1


def launch(kernel: Kernel, config: Config, inputs: Sequence[jax.Array], results: Sequence[Any]) -> list[jax.Array]:
    """Run a kernel that computes results from inputs.

    Args:
      kernel: decorated with ``triton.jit``. Its arguments are pointers to inputs and results, then constants.
      config: how to launch it.
      inputs: arrays that the kernel reads.
      results: the shape and dtype of each result, as ``jax.ShapeDtypeStruct``.
    """
    if interpreter.interprets(kernel):
        return _interpreted(kernel, config, inputs, (), results)
    return _compiled(kernel, config, inputs, results, {})


def update(
    kernel: Kernel, config: Config, inputs: Sequence[jax.Array], state: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Run a kernel that changes arrays in place, if the caller's jit donates them.

    Args:
      kernel: as for ``launch``. Its arguments are pointers to inputs and state, then as many unused names ``_0``,
        ``_1`` and so on as there are pointers to state, then constants.
      config: how to launch it.
      inputs: arrays that the kernel reads.
      state: arrays that it updates. In the place of None the kernel gets a pointer that it must not use.

    Returns:
      The updated state, None where it is None.
    """
    present = [leaf for leaf in state if leaf is not None]
    given = [inputs[0] if leaf is None else leaf for leaf in state]
    if interpreter.interprets(kernel):
        updated = _interpreted(kernel, config, inputs, given, ())
        return [None if leaf is None else new for leaf, new in zip(state, updated, strict=True)]
    places = [len(inputs) + i for i, leaf in enumerate(state) if leaf is not None]
    aliases = {place: i for i, place in enumerate(places)}
    unused = {f"_{i}": None for i in range(len(present), len(state))}
    config = dataclasses.replace(config, constants=config.constants | unused)
    updated = iter(_compiled(kernel, config, [*inputs, *given], present, aliases))
    return [None if leaf is None else next(updated) for leaf in state]


def _compiled(
    kernel: Kernel, config: Config, inputs: Sequence[jax.Array], results: Sequence[Any], aliases: dict[int, int]
) -> list[jax.Array]:
    import jax_triton  # it takes a second to import, and the interpreter does without

    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        name=kernel.__name__,
        out_shape=[jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results],
        grid=config.grid,
        num_warps=config.warps,
        num_stages=config.stages,
        compute_capability=device.capability(),
        input_output_aliases=aliases,
        **config.constants,
    )


def _interpreted(
    kernel: Kernel,
    config: Config,
    inputs: Sequence[jax.Array],
    state: Sequence[jax.Array],
    results: Sequence[Any],
) -> list[jax.Array]:
    """Run a kernel in the interpreter. Results hold NaN, or the largest integer, where the kernel stores nothing."""
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (*state, *results)]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        # Copies, because the interpreter writes through pointers, and arrays may be aligned to less than their dtype.
        given = [np.array(array, order="C") for array in arrays]
        made = [_poisoned(spec) for spec in specs[len(state) :]]
        interpreter.run(kernel, config.grid, [*given, *made], config.constants)
        return [*given[len(inputs) :], *made]

    found = jax.pure_callback(run, specs, *inputs, *state, vmap_method="sequential")
    return list(found)


def _poisoned(spec: Any) -> np.ndarray:
    dtype = np.dtype(spec.dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return np.full(spec.shape, np.nan if is_float else np.iinfo(dtype).max, dtype)
