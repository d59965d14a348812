"""Scores of the lightning indexer, from 4-bit keys in pages.

    I_s = sum over heads h of w_h relu(q_h . k_s)

Queries have the format of the keys. Both enter the tensor cores exactly as stored, except for mxfp4 groups whose scale
is far below the row's largest (see ``fp4.Mxfp4``). The sum over a head's dims and its positive part are f16, and the
sum over heads is f32. The error is typically a few 1e-6 of sum_h |w_h| |q_h| |k_s|.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language import target
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.scores import sm90, sm100
from pallas_kernels.scores.fp4 import DIM, FORMATS, Fp4
from pallas_kernels.scores.inputs import HEADS, PAGE_ENTRIES, ScoreInputs, check_inputs
from pallas_kernels.scores.share import TILE_ENTRIES, count_tiles
from pallas_kernels.scores.tuning import Tuning

KERNELS: dict[target.Architecture, type[Tuning]] = {"sm90": sm90.Tuning, "sm100": sm100.Tuning}
MAX_TOKENS = 8  # tokens of a row, whose queries are held in shared memory


def unsupported_scores(*, key_format: str, heads: int, key_dim: int, entries_per_block: int) -> str | None:
    """Return why the kernel does not support these formats and sizes, or None if it does."""
    if key_format not in FORMATS:
        return f"key_format must be one of {tuple(FORMATS)}, got {key_format!r}"
    sizes = {"heads": (heads, HEADS), "key_dim": (key_dim, DIM), "entries_per_block": (entries_per_block, PAGE_ENTRIES)}
    for name, (size, needed) in sizes.items():
        if size != needed:
            return f"{name} must be {needed}, got {size}"
    return None


def indexer_scores(
    inputs: ScoreInputs[jax.Array],
    *,
    key_format: str,
    tuning: Tuning | None = None,
    architecture: target.Architecture | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Compute the scores of the entries that queries see.

    Args:
      inputs: queries, head weights, and the tables in which keys are found.
      key_format: of queries and keys: "mxfp4" or "nvfp4".
      tuning: which kernel, and how it divides the work. None means the fastest for the inputs' sizes.
      architecture: whose kernel to use, "sm90" or "sm100". None means the target's.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      f32 [B, T, max_blocks * 32]. Scores from ``visible`` on are undefined. A key that contains NaN scores +inf. If a
      query contains NaN or a weight is not finite, all its entries score +inf. All other scores are at least the lowest
      finite number.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: no kernel supports this format, these sizes or this target.
    """
    chex.assert_rank([inputs.queries.codes, inputs.keys.codes], 4)
    heads, width = inputs.queries.codes.shape[2:]
    reason = unsupported_scores(
        key_format=key_format, heads=heads, key_dim=2 * width, entries_per_block=inputs.keys.codes.shape[2]
    )
    if reason is not None:
        raise ValueError(reason)
    fp4 = FORMATS[key_format]
    check_inputs(inputs, fp4)
    architecture = architecture or target.architecture()
    if architecture not in KERNELS:
        raise ValueError(f"architecture must be one of {tuple(KERNELS)}, got {architecture!r}")
    if tuning is not None and not isinstance(tuning, KERNELS[architecture]):
        raise ValueError(f"tuning must be one for the {architecture} kernel, got {tuning}")
    batch, tokens = inputs.visible.shape
    if tokens <= MAX_TOKENS:
        return _launch(inputs, fp4, tuning, KERNELS[architecture], simulate)
    scores = _launch(inputs.in_rows_of(MAX_TOKENS), fp4, tuning, KERNELS[architecture], simulate)
    return scores.reshape(batch, -(-tokens // MAX_TOKENS) * MAX_TOKENS, scores.shape[2])[:, :tokens]


def _launch(
    inputs: ScoreInputs[jax.Array], fp4: type[Fp4], tuning: Tuning | None, kernel: type[Tuning], simulate: bool
) -> jax.Array:
    batch, tokens = inputs.visible.shape
    max_entries = inputs.block_table.shape[1] * PAGE_ENTRIES
    tiles = batch * -(-max_entries // TILE_ENTRIES)
    tuning = tuning or kernel.fastest(fp4, tokens, tiles)
    blocks = max(1, min(tuning.blocks, tiles))
    if tokens > 1:
        inputs = dataclasses.replace(inputs, tiles=count_tiles(inputs))
    return launch(
        functools.partial(tuning.body, fp4=fp4, blocks=blocks),
        name="indexer_scores",
        grid=Grid(blocks=(blocks,), warpgroups=tuning.warpgroups, shared_bytes=tuning.shared_bytes(fp4, tokens)),
        inputs=inputs,
        state=jax.ShapeDtypeStruct((batch, tokens, max_entries), jnp.float32),
        simulate=simulate,
    )
