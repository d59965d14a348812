"""What each stage of a layer takes and gives.

Selection and attention are an op or two each, which have several implementations. Intake, queries and output consist of
several ops, which a kernel may fuse, so that they have several implementations themselves.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.cache.pool import ExactEntries, PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.layer.ops import RowForm, Rows
from dsv4jax.layer.tiles import pad_tokens
from dsv4jax.weights.params import AttentionParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """What the queries of new tokens are made of."""

    rows: jax.Array | pk.OperandRows  # [B, T, q_lora_rank] after norm, in the dtype of x
    positions: jax.Array  # int32 [B, T], -1 = padding
    head_weights: jax.Array | None  # f32 [B, T, indexer_heads], with the indexer's scale factors; CSA only

    def padded(self, count: int) -> Latents:
        """Return these with so many tokens of padding after them."""
        rows, head_weights = pad_tokens((self.rows, self.head_weights), count)
        return Latents(rows=rows, positions=pad_tokens(self.positions, count, -1), head_weights=head_weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """New tokens whose entries are in the cache, and in decode their window rows."""

    call: LayerCall  # with the updated stack
    latents: Latents
    kv: jax.Array | None = None  # f32 [B, T, head_dim] window rows before rounding
    fresh: KVRows | None = None  # the same as they will be stored, where they are not stored yet
    rows: TokenRows | None = None  # all that the tokens contribute, where that is in memory: always for a draft
    exact: ExactEntries | None = None  # entries before rounding, from which derivatives are taken

    @property
    def window(self) -> SlidingWindow:
        return self.call.window(self.fresh, self.kv)

    @property
    def entries(self) -> PooledLayer | None:
        entries = self.call.entries
        return None if entries is None else dataclasses.replace(entries, exact=self.exact)


class Intake(Protocol):
    """The products of x, and what they contribute to the cache."""

    def take(self, params: AttentionParams, x: jax.Array, call: LayerCall, *, is_draft: bool) -> Taken:
        """Store what new tokens x [B, T, hidden] contribute, but for window rows if T > 1.

        The first ``call.batch.num_new`` tokens of a row are real. A draft stores entries only.
        """
        ...

    def close(self, taken: Taken, stack: LayerStack) -> LayerStack:
        """Write window rows that are not stored yet to ``stack``, that of ``taken`` after all reads."""
        ...


class Queries(NamedTuple):
    """The queries of attention and of the indexer."""

    q: jax.Array  # [B, T, H, head_dim], f32 or f16
    keys: jax.Array | KeyRows | None  # [B, T, indexer_heads, ...], f32 or rounded as keys are; None without an indexer


class QueryStage(Protocol):
    """Products of the latents whose outputs are heads, with norm, rope and rounding."""

    def make(self, params: AttentionParams, latents: Latents) -> Queries:
        """Make queries of attention, and of the indexer if the layer has one."""
        ...

    def token_bytes(self, params: AttentionParams, tokens: int) -> int:
        """Return the memory that one of so many tokens takes while its queries are made."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is done with the product of W_ob: it is summed over the devices that share it, cut, and added to x."""

    positions: jax.Array  # int32 [B, T], -1 = padding
    num_tokens: int  # of T that the caller gave; the others fill the last tile of queries
    dtype: DTypeLike  # of the result
    residual: jax.Array | None  # [B, num_tokens, hidden]
    axis: str | None  # the mesh axis over which heads are split

    def end(self, product: jax.Array) -> jax.Array:
        """Return y [B, num_tokens, hidden] of a product [B, T, hidden]."""
        if self.axis is not None:
            product = lax.psum(product, self.axis).astype(self.dtype)
        real = self.positions >= 0
        y = jnp.where(real[..., None], product, jnp.zeros((), product.dtype))[:, : self.num_tokens]
        return y if self.residual is None else self.residual + y


class Output(Protocol):
    """The products of attention's rows with W_oa and W_ob."""

    def takes(self, params: AttentionParams, latents: Latents) -> RowForm:
        """Return the form in which ``narrow`` takes the rows of the tokens of these latents, and in their dtype."""
        ...

    def narrow(self, params: AttentionParams, rows: Rows, positions: jax.Array, tokens: int) -> Rows:
        """Multiply rows of a tile by W_oa: [B, T, o_groups * o_lora_rank], of values in f32 or bf16.

        Args:
          params: the layer's weights.
          rows: from attention, in the form that ``takes`` names for the tile's tokens.
          positions: int32 [B, T] of the tile's tokens, -1 = padding.
          tokens: of all tiles. If this tile has all of them, the result may have any form that ``finish`` takes.
        """
        ...

    def finish(self, params: AttentionParams, rows: Rows, ending: Ending) -> jax.Array:
        """Multiply what ``narrow`` gave by W_ob, and end the layer: y [B, num_tokens, hidden]."""
        ...
