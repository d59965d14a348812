"""The inputs of the indexer's scores: queries, head weights, and the tables in which keys are found."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KeyRows
from pallas_kernels.language.lanes import Shaped
from pallas_kernels.scores.fp4 import CODE_BYTES, Fp4

HEADS = 64
PAGE_ENTRIES = 32  # entries per page; a page is a block of the pool, and "block" here means a block of threads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInputs[Array: Shaped]:
    """T queries of each of B requests, and the arrays of the layer whose indexer keys they are compared with.

    Queries and keys are pytrees with leaves ``codes scale``, in the same 4-bit format. A page is a block of the pool:
    the keys of 32 consecutive entries of a request.
    """

    queries: KeyRows[Array]  # codes u8 [B, T, 64, 64], scale u8 [B, T, 64, scale_bytes]
    weights: Array  # f32 [B, T, 64] signed weights of the heads
    keys: KeyRows[Array]  # codes u8 [layers, num_blocks, 32, 64], scale u8 [layers, num_blocks, 32, scale_bytes]
    layer: Array  # int32 [1]
    block_table: Array  # int32 [requests, max_blocks] pages of each request, -1 = none: their entries score 0
    slots: Array  # int32 [B], -1 = none: nothing is read or written for the row
    visible: Array  # int32 [B, T] number of entries that each query sees
    tiles: Array | None = None  # from ``share.count_tiles``; None: the kernel counts them itself

    def in_rows_of(self: ScoreInputs[jax.Array], count: int) -> ScoreInputs[jax.Array]:
        """Return the inputs with more rows of ``count`` tokens each, in order. Those that are added see nothing."""
        batch, tokens = self.visible.shape
        rows = -(-tokens // count)

        def divided(x: jax.Array) -> jax.Array:
            padding = [(0, 0), (0, rows * count - tokens)] + [(0, 0)] * (x.ndim - 2)
            return jnp.pad(x, padding).reshape(batch * rows, count, *x.shape[2:])

        queries, weights, visible = jax.tree.map(divided, (self.queries, self.weights, self.visible))
        slots = jnp.repeat(self.slots, rows)
        return dataclasses.replace(self, queries=queries, weights=weights, visible=visible, slots=slots)


def check_inputs(inputs: ScoreInputs[jax.Array], fp4: type[Fp4]) -> None:
    """Check that shapes and dtypes agree, and are those of the format.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
    """
    queries, keys, bytes_of_row = inputs.queries, inputs.keys, (CODE_BYTES, fp4.scale_bytes)
    batch, tokens = inputs.queries.codes.shape[:2]
    layers, num_blocks = inputs.keys.codes.shape[:2]
    chex.assert_shape([queries.codes, queries.scale], [(batch, tokens, HEADS, n) for n in bytes_of_row])
    chex.assert_shape([keys.codes, keys.scale], [(layers, num_blocks, PAGE_ENTRIES, n) for n in bytes_of_row])
    chex.assert_shape([inputs.weights, inputs.visible], [(batch, tokens, HEADS), (batch, tokens)])
    chex.assert_shape([inputs.layer, inputs.slots, inputs.block_table], [(1,), (batch,), (None, None)])
    chex.assert_type([queries.codes, queries.scale, keys.codes, keys.scale], jnp.uint8)
    chex.assert_type(inputs.weights, jnp.float32)
    chex.assert_type([inputs.layer, inputs.block_table, inputs.slots, inputs.visible], jnp.int32)
