"""What compressors keep between steps, and how entries are computed from it (paper: equations 9 to 12).

Each token contributes a key row k and a gate logit z per channel. An entry is the gate-weighted mean over the tokens of
its block, separately for each channel:

    CSA  entry i = sum softmax(Z) * K over 2m slots: the b-stream of block i - 1, then the a-stream of block i
    HCA  entry i = sum softmax(Z) * K over the m' tokens of block i

Here a block is the group of m = 4 (CSA) or m' = 128 (HCA) tokens that become one entry. A forward pass brings T new
tokens of each request, which may begin anywhere within a block. A tail holds what earlier passes contributed to the
unfinished block. There is a class for each form of tail. It defines the tail's shapes, how entries are pooled from the
tail and the new tokens, how new tokens are appended, and what happens at the end of a block.

Position p of a request is kept in tail row p mod ratio. Rows are not cleared: the next token that maps to a row
overwrites it, and nothing reads the row between the end of its block and that write.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dsv4jax.checks import Named
from dsv4jax.config import DSV4Config
from dsv4jax.indexing import Batch, put, put_newest, quotient, read_slots, remainder, take_tokens
from dsv4jax.kinds import AttentionType

EMPTY_GATE = -1e9  # gate of an empty slot: its weight is 0; finite, so that a softmax of empty slots alone is not NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What T new tokens contribute, as it comes from the projections: a- and b-stream for CSA, one stream for HCA.

    In checkpoints, columns [0:dim] are CSA's b-stream and columns [dim:2 dim] its a-stream. HCA's one stream is treated
    as an a-stream.
    """

    k: jax.Array  # f32 [B, T, dim], CSA: [B, T, 2 dim]
    z: jax.Array  # f32, shape of k
    overlap: bool = dataclasses.field(metadata={"static": True})  # True if k and z hold CSA's two streams

    def _part(self, both: jax.Array, number: int) -> jax.Array:
        dim = both.shape[-1] // 2
        return both[..., number * dim : (number + 1) * dim] if self.overlap else both

    @property
    def ka(self) -> jax.Array:
        """Keys of the a-stream, used by the entry of a token's own block. f32 [B, T, dim]."""
        return self._part(self.k, 1)

    @property
    def za(self) -> jax.Array:
        """Gate logits of the a-stream, f32 [B, T, dim]."""
        return self._part(self.z, 1)

    @property
    def kb(self) -> jax.Array:
        """Keys of CSA's b-stream, used by the entry of the next block. f32 [B, T, dim]."""
        return self._part(self.k, 0)

    @property
    def zb(self) -> jax.Array:
        """Gate logits of the b-stream, f32 [B, T, dim]."""
        return self._part(self.z, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CSATail:
    """Streams that a CSA compressor keeps between steps.

    A token has two learned streams of keys k and gate logits z. Its a-stream goes into the entry of its own block, and
    its b-stream into the entry of the next block, as the overlapping half.
    """

    ka: jax.Array  # [layers, requests, m, dim] a-stream of the current block
    za: jax.Array  # [layers, requests, m, dim]
    kb_next: jax.Array  # [layers, requests, m, dim] b-stream of the current block
    zb_next: jax.Array  # [layers, requests, m, dim]
    kb: jax.Array  # [layers, requests, m, dim] b-stream of the previous block
    zb: jax.Array  # [layers, requests, m, dim]

    CURRENT: ClassVar[tuple[str, ...]] = ("ka", "za", "kb_next", "zb_next")  # leaves with rows of the unfinished block
    PREVIOUS: ClassVar[tuple[str, ...]] = ("kb", "zb")  # leaves with rows of the block before it
    RUNNING: ClassVar[tuple[str, ...]] = ()  # leaves with sums over the unfinished block, without an axis of rows

    @classmethod
    def spec(cls, ratio: int, dim: int, dtype: DTypeLike) -> CSATail:
        """Return the shapes of one request's tail, as ``jax.ShapeDtypeStruct`` leaves."""
        return cls(**_leaves(cls, jax.ShapeDtypeStruct((ratio, dim), dtype)))

    def pool(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
        """Pool every block that the new tokens touch: f32 [B, N, dim]. Rows of incomplete blocks are meaningless.

        Here the tail's leaves are the batch's rows of one layer, [B, ratio, dim]. ``phase`` is each request's length
        mod ratio.
        """
        return softmax_pool(*self.slots(streams, phase, num_new, ratio))

    def slots(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
        """Return the keys and gates that ``pool`` pools, f32 [B, N, 2 ratio, dim] each."""
        grid = _Grid.of(streams, phase, num_new, ratio)
        ka, za = grid.arranged(streams.ka, 0.0, self.ka), grid.arranged(streams.za, EMPTY_GATE, self.za)
        kb, zb = grid.arranged(streams.kb, 0.0, self.kb_next), grid.arranged(streams.zb, EMPTY_GATE, self.zb_next)
        kb = jnp.concatenate([self.kb.astype(jnp.float32)[:, None], kb[:, :-1]], axis=1)  # of the block before
        zb = jnp.concatenate([self.zb.astype(jnp.float32)[:, None], zb[:, :-1]], axis=1)
        return jnp.concatenate([kb, ka], axis=2), jnp.concatenate([zb, za], axis=2)

    def append(self, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> CSATail:
        """Write the new tokens' rows into one layer's tails, with the result of writing them one by one.

        If the last token completes its block, the rotation for that block is not done here but in ``end_block``.
        """
        num_tokens = streams.ka.shape[1]
        tokens = {"ka": streams.ka, "za": streams.za, "kb_next": streams.kb, "zb_next": streams.zb}
        previous: dict[str, jax.Array] = {}
        tail = self
        if num_tokens > 1:
            # The last token may be in a later block than the first. The previous block is then the one before the last
            # token's. Its rows are new tokens, or rows of kb_next if the request was already in that block before the
            # call.
            phase = remainder(batch.start, ratio)
            block = quotient(phase + batch.num_new - 1, ratio) - 1
            token = (block * ratio - phase)[:, None] + jnp.arange(ratio, dtype=jnp.int32)[None]
            moved = batch.storing & (block >= 0)
            at, is_new = jnp.clip(token, 0, num_tokens - 1), (token >= 0)[..., None]
            before = read_slots({"kb": self.kb_next, "zb": self.zb_next}, index, batch.slots)
            for name, old in before.items():
                new = take_tokens(tokens[f"{name}_next"], at)
                previous[name] = jnp.where(is_new, new, old.astype(jnp.float32))
            previous, tail = lax.optimization_barrier((previous, self))  # all reads come before the first write
            previous = put({"kb": tail.kb, "zb": tail.zb}, index, batch.slots, moved, previous)
        current = put_newest({name: getattr(tail, name) for name in tokens}, index, batch, tokens)
        return dataclasses.replace(tail, **current, **previous)

    def end_block(self, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> CSATail:
        """Copy the current b-stream over the previous one, for slots int32 [B] where ``complete`` bool [B] is True."""
        rows = read_slots({"kb": self.kb_next, "zb": self.zb_next}, index, slots)
        moved = complete & (slots >= 0)
        return dataclasses.replace(self, **put({"kb": self.kb, "zb": self.zb}, index, slots, moved, rows))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HCATail:
    """The ring form of an HCA compressor's tail: the rows of the current block. HCA has only one stream."""

    ka: jax.Array  # [layers, requests, m', head_dim]
    za: jax.Array  # [layers, requests, m', head_dim]

    CURRENT: ClassVar[tuple[str, ...]] = ("ka", "za")
    PREVIOUS: ClassVar[tuple[str, ...]] = ()
    RUNNING: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def spec(cls, ratio: int, dim: int, dtype: DTypeLike) -> HCATail:
        """Return the shapes of one request's tail, as ``jax.ShapeDtypeStruct`` leaves."""
        return cls(**_leaves(cls, jax.ShapeDtypeStruct((ratio, dim), dtype)))

    def pool(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
        """Pool every block that the new tokens touch, as ``CSATail.pool`` does, but from one stream."""
        return softmax_pool(*self.slots(streams, phase, num_new, ratio))

    def slots(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
        """Return the keys and gates that ``pool`` pools, f32 [B, N, ratio, dim] each."""
        grid = _Grid.of(streams, phase, num_new, ratio)
        return grid.arranged(streams.ka, 0.0, self.ka), grid.arranged(streams.za, EMPTY_GATE, self.za)

    def append(self, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> HCATail:
        """Write the new tokens' rows into one layer's tails."""
        del ratio  # the length of the ring is the ratio
        return put_newest(self, index, batch, HCATail(ka=streams.ka, za=streams.za))

    def end_block(self, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> HCATail:
        """Do nothing, because all rows of a block are overwritten before its entry reads them.

        Clearing 512 KiB would double the memory traffic of an entry.
        """
        del index, slots, complete
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HCAOnlineTail:
    """The online form of an HCA compressor's tail: a running softmax per channel over the current block.

    When the block is full, its entry is weighted / total.
    """

    peak: jax.Array  # [layers, requests, head_dim] largest gate logit so far
    total: jax.Array  # [layers, requests, head_dim] sum of exp(z - peak)
    weighted: jax.Array  # [layers, requests, head_dim] sum of exp(z - peak) * k

    CURRENT: ClassVar[tuple[str, ...]] = ()
    PREVIOUS: ClassVar[tuple[str, ...]] = ()
    RUNNING: ClassVar[tuple[str, ...]] = ("peak", "total", "weighted")

    @classmethod
    def spec(cls, ratio: int, dim: int, dtype: DTypeLike) -> HCAOnlineTail:
        """Return the shapes of one request's tail, as ``jax.ShapeDtypeStruct`` leaves.

        Always f32, whatever ``dtype`` is.
        """
        del ratio, dtype
        return cls(**_leaves(cls, jax.ShapeDtypeStruct((dim,), jnp.float32)))

    def pool(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
        """Pool every block that the new tokens touch, as ``CSATail.pool`` does. Here the tail's leaves are [B, dim]."""
        return self.continued(streams, phase, num_new, ratio)[0]

    def continued(
        self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int
    ) -> tuple[jax.Array, HCAOnlineTail]:
        """Return what ``pool`` returns, and the running softmax of the last token's block.

        If the last token completes its block, the running softmax covers the full block, and ``end_block`` resets it
        later.
        """
        k, z = self.slots(streams, phase, num_new, ratio)
        peak = jnp.max(z, axis=2)  # [B, N, dim]
        peak = peak.at[:, 0].max(self.peak)
        # Without this, an empty slot in a block with no token yet would get weight exp(0) = 1.
        weight = jnp.where(z == EMPTY_GATE, 0.0, jnp.exp(z - peak[:, :, None]))
        carried = jnp.exp(self.peak - peak[:, 0])
        total = jnp.sum(weight, axis=2).at[:, 0].add(carried * self.total)
        weighted = jnp.sum(weight * k, axis=2).at[:, 0].add(carried * self.weighted)
        blocks = HCAOnlineTail(peak=peak, total=total, weighted=weighted)
        return blocks.entry, blocks.of_last_token(phase, num_new, ratio)

    def slots(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
        """Return the keys and gates of the new tokens in every block that they touch, f32 [B, N, width, dim] each.

        A slot without a token has the gate ``EMPTY_GATE``.
        """
        grid = _Grid.of(streams, phase, num_new, ratio, width=min(ratio, streams.k.shape[1]))
        return grid.arranged(streams.ka, 0.0), grid.arranged(streams.za, EMPTY_GATE)

    @property
    def entry(self) -> jax.Array:
        """The entry of a block, f32 of the leaves' shape, if the running softmax covers all of it."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)

    def of_last_token(self, phase: jax.Array, num_new: jax.Array, ratio: int) -> HCAOnlineTail:
        """Return the running softmax of the last token's block, of those of all blocks that a call touches."""
        last = quotient(jnp.maximum(phase + num_new - 1, 0), ratio)
        return jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, last[:, None, None], axis=1)[:, 0], self)

    def append(self, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> HCAOnlineTail:
        """Add the new tokens to one layer's running softmaxes."""
        old = read_slots(self, index, batch.slots)
        _, new = old.continued(streams, remainder(batch.start, ratio), batch.num_new, ratio)
        return self.with_running(index, batch, new)

    def with_running(self, index: jax.Array | int, batch: Batch, new: HCAOnlineTail) -> HCAOnlineTail:
        """Set one layer's running softmaxes of a batch, leaves [B, dim]."""
        new, tail = lax.optimization_barrier((new, self))
        return put(tail, index, batch.slots, batch.storing, new)

    def end_block(self, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> HCAOnlineTail:
        """Reset the running softmax of slots int32 [B] where ``complete`` bool [B] is True."""
        return emptied(self, index, slots, complete)


Tail = CSATail | HCATail | HCAOnlineTail

HCA_TAILS: dict[str, type[HCATail | HCAOnlineTail]] = {"ring": HCATail, "online": HCAOnlineTail}


def tail_specs(
    cfg: DSV4Config, kind: AttentionType, dtype: DTypeLike, hca_tail: str
) -> tuple[Tail | None, CSATail | None]:
    """Return the shapes of one request's tails in a layer: the compressor's and its indexer's; None if it has none."""
    if not kind.compresses:
        return None, None
    ratio = cfg.ratio(kind)
    form = CSATail if kind.overlaps else HCA_TAILS[hca_tail]
    indexer = CSATail.spec(ratio, cfg.indexer_head_dim, dtype) if kind.is_indexed else None
    return form.spec(ratio, cfg.head_dim, dtype), indexer


_GATES = ("za", "zb_next", "zb", "peak")


def empty_tail[T: Tail | None](spec: T, lead: tuple[int, ...]) -> T:
    """Return the tail of requests that have seen no token, with leading axes ``lead`` before the axes of ``spec``.

    Every leaf gets a buffer of its own, because leaves that share a buffer cannot be donated.
    """

    def fill(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full((*lead, *leaf.shape), EMPTY_GATE if path[-1].name in _GATES else 0.0, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, spec)


def emptied[T: Tail](tail: T, index: jax.Array | int, slots: jax.Array, where: jax.Array) -> T:
    """Return the tail with slots int32 [B] of one layer reset to empty, where ``where`` bool [B] is True."""
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), tail)
    empty = empty_tail(spec, slots.shape)
    return put(tail, index, slots, where & (slots >= 0), empty)


def _leaves(form: type[Tail], spec: jax.ShapeDtypeStruct) -> Named:
    """Return the same spec for every leaf of a tail class."""
    return {field.name: spec for field in dataclasses.fields(form)}


def num_touched_blocks(num_tokens: int, ratio: int) -> int:
    """Return the largest number of blocks that T consecutive tokens can touch."""
    return (num_tokens + 2 * ratio - 2) // ratio


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Where the tokens of a call are in the blocks that they belong to. One grid serves all their streams."""

    token: jax.Array  # int32 [B, N, width] the token of each slot, in range
    inside: jax.Array  # bool [B, N, width] whether there is a token
    from_tail: jax.Array  # bool [B, width] whether a slot of block 0 is a row of the tail

    @classmethod
    def of(
        cls, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int, *, width: int | None = None
    ) -> _Grid:
        """Make the grid of T new tokens, of which ``num_new`` are real, of requests that begin at ``phase``.

        With ``width``, each block has room only for its first ``width`` new tokens, and none for rows of the tail. That
        is enough when T <= width and takes far less memory.
        """
        num_tokens = streams.k.shape[1]
        block = jnp.arange(num_touched_blocks(num_tokens, ratio), dtype=jnp.int32)
        begin = (block * ratio)[None] - phase[:, None]  # [B, N] token of a block's first slot; block 0's can be < 0
        if width is not None:
            token = jnp.maximum(begin, 0)[..., None] + jnp.arange(width, dtype=jnp.int32)[None, None]
            inside = token < (begin + ratio)[..., None]
        else:
            token = begin[..., None] + jnp.arange(ratio, dtype=jnp.int32)[None, None]
            inside = token >= 0
        return cls(
            token=jnp.clip(token, 0, num_tokens - 1),
            inside=inside & (token < num_new[:, None, None]),
            from_tail=jnp.arange(width or ratio, dtype=jnp.int32)[None] < phase[:, None],
        )

    def arranged(self, tokens: jax.Array, empty: float, tail: jax.Array | None = None) -> jax.Array:
        """Arrange tokens [B, T, dim] by the blocks that they belong to, f32 [B, N, width, dim].

        Block 0 begins with the first ``phase`` rows of the tail [B, ratio, dim]. Slots without a token hold ``empty``.
        This lets one code path serve decode, prefill and mixed batches.
        """
        rows = jnp.where(self.inside[..., None], take_tokens(tokens, self.token), empty)
        if tail is not None:
            first = jnp.where(self.from_tail[..., None], tail.astype(jnp.float32), rows[:, 0])
            rows = jnp.concatenate([first[:, None], rows[:, 1:]], axis=1)
        return rows


def softmax_pool(k: jax.Array, z: jax.Array) -> jax.Array:
    """Return sum softmax(z) * k over axis -2, per channel."""
    weight = jnp.exp(z - jnp.max(z, axis=-2, keepdims=True))
    return jnp.sum(weight * k, axis=-2) / jnp.sum(weight, axis=-2)
