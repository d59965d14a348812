"""Decode attention over the stored cache: over the window, and over entries picked by the indexer or all visible ones.

    out_h = sum over keys of exp(l) k / (sum of exp(l) + exp(sink_h)),      l = q_h . k / sqrt(512)

There is one shared key-value head (K = V). Rows are read directly from the cache and converted to f16 for the tensor
cores. This changes a stored value x to x (1 + e) + d with |e| <= 2^-10 and |d| <= 2^-24. Values above 65504 become
infinite.

Calls with many tokens widen the rows of a request once for all of its queries (``wide``), on Hopper.

Queries have a multiple of 8 heads. Where heads are divided over devices that can be fewer than 64. In the kernels for
many queries a block has 64 rows all the same, so its products take as long as those of 64 heads.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.activations import OperandRows, RoundedRows, round_rows
from pallas_kernels.attention import sm90, sm90_few, sm90_spread, sm100
from pallas_kernels.attention.block import HEADS, LEAST_HEADS
from pallas_kernels.attention.inputs import NOPE_DIM, ROPE_DIM, AttentionInputs, check_inputs
from pallas_kernels.attention.keys import KEYS
from pallas_kernels.attention.layout import AttentionLayout, Outputs
from pallas_kernels.attention.wide import widen, worth_widening
from pallas_kernels.formats import ATTENDED_FORMATS, AttendedFormat
from pallas_kernels.language import target
from pallas_kernels.language.launch import launch
from pallas_kernels.trees import Tree
from pallas_kernels.tuned import h200


def unsupported_attention(*, kv_format: str, num_heads: int, nope_dim: int, rope_dim: int) -> str | None:
    """Return why the kernel does not support these formats and sizes, or None if it does."""
    if kv_format not in ATTENDED_FORMATS:
        return f"kv_format must be one of {tuple(ATTENDED_FORMATS)}, got {kv_format!r}"
    if (nope_dim, rope_dim) != (NOPE_DIM, ROPE_DIM):
        return f"a head must have {NOPE_DIM} NoPE and {ROPE_DIM} RoPE channels, got {nope_dim} and {rope_dim}"
    if num_heads % LEAST_HEADS:
        return f"num_heads must be a multiple of {LEAST_HEADS}, got {num_heads}"
    return None


def decode_attention(
    inputs: AttentionInputs[jax.Array],
    *,
    kv_format: str,
    dtype: DTypeLike = jnp.bfloat16,
    is_operand: bool = False,
    layout: AttentionLayout | None = None,
    invariant: bool = False,
    simulate: bool = False,
) -> Tree:
    """Compute attention of each query over its own keys.

    Args:
      inputs: queries, and the rows and tables in which their keys are found.
      kv_format: of all stored rows, a key of ``formats.ATTENDED_FORMATS``.
      dtype: of the result: bf16, f32, or float8_e4m3fn for bf16 that is then rounded (``rounding``). Rounding is a
        launch of its own where blocks share a query, on Blackwell, and where B T is no multiple of 128.
      is_operand: give operand rows, of bf16.
      layout: which kernel, and how it divides a query's work. None means the fastest on this device, from
        ``choose_layout``.
      invariant: without a layout, whether the bits of a query's result must not depend on how many others there are.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      dtype [B, T, H, 512], or ``RoundedRows`` or ``OperandRows`` [B T, H 512]; 0 for queries without a position, if
      needed.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernels do not support these formats or sizes, or this layout.
    """
    q, window = inputs.q, inputs.window
    chex.assert_rank(q, 4)
    batch, tokens, heads, _ = q.shape
    reason = unsupported_attention(
        kv_format=kv_format,
        num_heads=heads,
        nope_dim=window.nope.shape[-1],
        rope_dim=window.rope.shape[-1],
    )
    if reason is not None:
        raise ValueError(reason)
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"q must be float16 or bfloat16, got {q.dtype}")
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn):
        raise ValueError(f"dtype must be bfloat16, float32 or float8_e4m3fn, got {dtype}")
    if is_operand and dtype != jnp.bfloat16:
        raise ValueError(f"operand rows are bfloat16, got {jnp.dtype(dtype)}")
    form = ATTENDED_FORMATS[kv_format]
    check_inputs(inputs, form)
    if inputs.entries is None:
        inputs = dataclasses.replace(inputs, block_table=None, visible=None)
    tiles = -(-inputs.pos.shape[2] // KEYS) - (-inputs.max_entries // KEYS)
    if layout is None:
        layout = choose_layout(target.gpu_or_first(), batch * tokens, heads, tiles, invariant=invariant)
        if layout == sm90.Layout() and worth_widening(inputs):
            layout = sm90.Layout(is_wide=True)
    layout.check(heads, tiles)
    if not simulate and layout.gpu is not (gpu := target.gpu_or_first()):
        raise ValueError(f"the layout is of a kernel for {layout.gpu.architecture}, the target is {gpu.architecture}")
    if isinstance(layout, sm90.Layout) and layout.is_wide:
        inputs = widen(inputs, form, simulate=simulate)
    inputs = dataclasses.replace(inputs, needed=None, order=layout.order(inputs))
    return attend(inputs, form, layout, dtype, is_operand=is_operand, simulate=simulate)


def attend(
    inputs: AttentionInputs[jax.Array],
    form: AttendedFormat,
    layout: AttentionLayout,
    dtype: DTypeLike,
    *,
    is_operand: bool = False,
    simulate: bool = False,
) -> Tree:
    """Launch the kernel of a layout, with rows that are widened where it expects them so, and queries in its order."""
    batch, tokens, heads, dim = inputs.q.shape
    queries, groups = batch * tokens, layout.groups(heads)
    if dtype == jnp.float8_e4m3fn:
        out = RoundedRows.shapes(queries, heads * dim)
        if not isinstance(layout, sm90.Layout) or layout.cluster > 1 or out.scales.shape[1] != queries:
            in_bf16 = attend(inputs, form, layout, jnp.bfloat16, simulate=simulate)
            return round_rows(in_bf16.reshape(queries, heads * dim), simulate=simulate)
    elif is_operand:
        out = OperandRows.shapes(queries, heads * dim)
    else:
        out = jax.ShapeDtypeStruct(inputs.q.shape, dtype)
    if isinstance(layout, sm90.Layout):
        layout = dataclasses.replace(layout, is_picked=inputs.picks is not None)
    outputs: Outputs[jax.Array] = launch(
        functools.partial(layout.body, form=form),
        name="decode_attention",
        grid=layout.grid(queries, groups),
        inputs=layout.arguments(inputs),
        state=Outputs(out=out, scratch=layout.scratch(queries, groups)),
        simulate=simulate,
    )
    return outputs.out


def choose_layout(gpu: target.GPU, queries: int, heads: int, tiles: int, *, invariant: bool = False) -> AttentionLayout:
    """Return the fastest layout: as many blocks as the GPU can run at once, each with at least one tile.

    Args:
      gpu: a row of ``target.GPUS``.
      queries: number of queries of all requests.
      heads: heads per query.
      tiles: the largest number of tiles of ``KEYS`` keys that a query may have.
      invariant: whether the bits of a query's result must be those of any other number of queries. Then all its keys
        are added in the order of one block.
    """
    at_once = sorted(gpu.clusters.items(), reverse=True)  # the largest clusters first
    blocks = queries * -(-heads // HEADS)
    if invariant:
        if gpu is target.BLACKWELL:
            return sm100.Layout(cluster=1)
        run_at_once = blocks <= gpu.clusters[sm90_spread.CLUSTER]
        return sm90_spread.Layout(tiles=tiles) if run_at_once and tiles >= h200.SPREAD_TILES else sm90.Layout()
    cluster = next((size for size, most in at_once if blocks <= most and size <= tiles), 1)
    if gpu is target.BLACKWELL:
        return sm100.Layout(cluster=cluster)
    for some, least in h200.FEW_HEADS.items() if cluster > 1 else ():
        few = sm90_few.Layout(heads=some, cluster=cluster, tiles=-(-tiles // cluster))
        runs_at_once = heads % some == 0 and queries * heads <= some * gpu.clusters[cluster]
        if runs_at_once and few.tiles >= least and few.fits:
            return few
    return sm90.Layout(cluster=cluster)
