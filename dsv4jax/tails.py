"""What compressors keep between steps, and how entries come of it (paper eq. 9 to 12 for CSA, 9 to 10 for HCA).

A token contributes a key row k and a gate logit z per channel. An entry is the gate-weighted mean over its tokens,
channel by channel:

    CSA  entry i = sum softmax(Z) * K over 2m slots: the b-stream of block i - 1, then the a-stream of block i
    HCA  entry i = sum softmax(Z) * K over the m' tokens of block i

A forward pass brings T tokens of each request, anywhere in their blocks. A tail holds what earlier passes brought of
the unfinished block. There is a class for each form of tail, and each knows its shapes, how entries are pooled from it
and from new tokens, how new tokens are appended to it, and what the end of a block does to it. Position p of a request
sits in tail row p mod ratio. Nothing is cleared on the way: a row is overwritten by the next token that maps to it, and
is never read between the end of its block and that write.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.config import DSV4Config
from dsv4jax.indexing import Batch, put, put_newest, read_slots
from dsv4jax.kinds import AttentionType

EMPTY_GATE = -1e9  # a gate logit that vanishes in the softmax; finite, so that an all-empty softmax is no NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What T new tokens contribute, as the projections give it: CSA's a- and b-stream, HCA's a-stream alone.

    Checkpoint columns [0:dim] are CSA's b-stream and [dim:2 dim] its a-stream.
    """

    k: jax.Array  # f32 [B, T, dim], CSA: [B, T, 2 dim]
    z: jax.Array  # f32, as k
    overlap: bool = dataclasses.field(metadata={"static": True})  # CSA's two streams

    def _part(self, both: jax.Array, number: int) -> jax.Array:
        dim = both.shape[-1] // 2
        return both[..., number * dim : (number + 1) * dim] if self.overlap else both

    @property
    def ka(self) -> jax.Array:
        """K of the a-stream, which enters the entry of a token's own block; HCA's only one. f32 [B, T, dim]."""
        return self._part(self.k, 1)

    @property
    def za(self) -> jax.Array:
        """Gate logits of the a-stream."""
        return self._part(self.z, 1)

    @property
    def kb(self) -> jax.Array:
        """K of CSA's b-stream, which enters the entry of the next block."""
        return self._part(self.k, 0)

    @property
    def zb(self) -> jax.Array:
        """Gate logits of the b-stream."""
        return self._part(self.z, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CSATail:
    """Streams a CSA compressor keeps between steps. A token has TWO learned streams of key rows k and gate logits z:

    its a-stream enters the entry of its own block, its b-stream the NEXT block's entry, as the overlap half.
    """

    ka: jax.Array  # [layers, requests, m, dim] a-stream of the current block
    za: jax.Array  # [layers, requests, m, dim]
    kb_next: jax.Array  # [layers, requests, m, dim] b-stream of the current block
    zb_next: jax.Array  # [layers, requests, m, dim]
    kb: jax.Array  # [layers, requests, m, dim] b-stream of the previous block
    zb: jax.Array  # [layers, requests, m, dim]

    CURRENT: ClassVar[tuple[str, ...]] = ("ka", "za", "kb_next", "zb_next")  # leaves: rows of the unfinished block
    PREVIOUS: ClassVar[tuple[str, ...]] = ("kb", "zb")  # rows of the block before it
    RUNNING: ClassVar[tuple[str, ...]] = ()  # sums over the unfinished block, without an axis of rows

    @classmethod
    def spec(cls, ratio: int, dim: int, dtype: Any) -> CSATail:
        """One request's part, as ``jax.ShapeDtypeStruct`` leaves."""
        return cls(**_leaves(cls, jax.ShapeDtypeStruct((ratio, dim), dtype)))

    def pool(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
        """Pooled rows f32 [B, N, dim] of every block that new tokens touch; those of incomplete blocks mean nothing.

        The tail's leaves are one layer's rows of the batch, [B, ratio, dim]; phase is a request's length mod ratio.
        """
        ka = _on_grid(streams.ka, self.ka, phase, num_new, ratio, 0.0)
        za = _on_grid(streams.za, self.za, phase, num_new, ratio, EMPTY_GATE)
        kb = _on_grid(streams.kb, self.kb_next, phase, num_new, ratio, 0.0)
        zb = _on_grid(streams.zb, self.zb_next, phase, num_new, ratio, EMPTY_GATE)
        kb = jnp.concatenate([self.kb.astype(jnp.float32)[:, None], kb[:, :-1]], axis=1)  # of the block before
        zb = jnp.concatenate([self.zb.astype(jnp.float32)[:, None], zb[:, :-1]], axis=1)
        return _softmax_pool(jnp.concatenate([kb, ka], axis=2), jnp.concatenate([zb, za], axis=2))

    def append(self, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> CSATail:
        """Write new tokens' rows into one layer, as if one by one; the last one's own rotation is ``end_block``'s."""
        num_tokens = streams.ka.shape[1]
        tokens = {"ka": streams.ka, "za": streams.za, "kb_next": streams.kb, "zb_next": streams.zb}
        previous: dict[str, jax.Array] = {}
        tail = self
        if num_tokens > 1:
            # The last token may lie in a later block than the first one: the block before the last token's is then the
            # previous one. Its rows are new tokens, or still those of kb_next where the request was in that block.
            phase = batch.start % ratio
            block = (phase + batch.num_new - 1) // ratio - 1
            token = (block * ratio - phase)[:, None] + jnp.arange(ratio, dtype=jnp.int32)[None]
            moved = batch.storing & (block >= 0)
            for name, source in (("kb", "kb_next"), ("zb", "zb_next")):
                old = read_slots(getattr(self, source), index, batch.slots).astype(jnp.float32)
                new = jnp.take_along_axis(tokens[source], jnp.clip(token, 0, num_tokens - 1)[..., None], axis=1)
                previous[name] = jnp.where((token >= 0)[..., None], new, old)
            previous, tail = lax.optimization_barrier((previous, self))  # every read before the first write
            previous = {
                name: put(getattr(tail, name), index, batch.slots, moved, rows) for name, rows in previous.items()
            }
        current = {name: put_newest(getattr(tail, name), index, batch, rows) for name, rows in tokens.items()}
        return dataclasses.replace(tail, **current, **previous)

    def end_block(self, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> CSATail:
        """Rotate: the previous b-stream becomes the current one, for slots [B] where ``complete`` [B]."""
        rows = read_slots({"kb": self.kb_next, "zb": self.zb_next}, index, slots)
        moved = complete & (slots >= 0)
        rotated = {name: put(getattr(self, name), index, slots, moved, value) for name, value in rows.items()}
        return dataclasses.replace(self, **rotated)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HCATail:
    """The ring tail of an HCA compressor: the rows of the current block, of its one stream."""

    ka: jax.Array  # [layers, requests, m', head_dim]
    za: jax.Array  # [layers, requests, m', head_dim]

    CURRENT: ClassVar[tuple[str, ...]] = ("ka", "za")
    PREVIOUS: ClassVar[tuple[str, ...]] = ()
    RUNNING: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def spec(cls, ratio: int, dim: int, dtype: Any) -> HCATail:
        """One request's part, as ``jax.ShapeDtypeStruct`` leaves."""
        return cls(**_leaves(cls, jax.ShapeDtypeStruct((ratio, dim), dtype)))

    def pool(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
        """As ``CSATail.pool``, of one stream."""
        return _softmax_pool(
            _on_grid(streams.ka, self.ka, phase, num_new, ratio, 0.0),
            _on_grid(streams.za, self.za, phase, num_new, ratio, EMPTY_GATE),
        )

    def append(self, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> HCATail:
        """Write new tokens' rows into one layer."""
        del ratio  # the ring is that long
        return HCATail(
            ka=put_newest(self.ka, index, batch, streams.ka), za=put_newest(self.za, index, batch, streams.za)
        )

    def end_block(self, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> HCATail:
        """Nothing: a block's rows are all overwritten before its entry reads them.

        To clear 512 KiB would double the traffic of an entry.
        """
        del index, slots, complete
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HCAOnlineTail:
    """The current HCA block as a running softmax per channel: entry = weighted / total once the block is full."""

    peak: jax.Array  # [layers, requests, head_dim] largest gate logit so far
    total: jax.Array  # [layers, requests, head_dim] sum of exp(z - peak)
    weighted: jax.Array  # [layers, requests, head_dim] sum of exp(z - peak) * k

    CURRENT: ClassVar[tuple[str, ...]] = ()
    PREVIOUS: ClassVar[tuple[str, ...]] = ()
    RUNNING: ClassVar[tuple[str, ...]] = ("peak", "total", "weighted")

    @classmethod
    def spec(cls, ratio: int, dim: int, dtype: Any) -> HCAOnlineTail:
        """One request's part, as ``jax.ShapeDtypeStruct`` leaves: f32, whatever the dtype of other tails."""
        del ratio, dtype
        return cls(**_leaves(cls, jax.ShapeDtypeStruct((dim,), jnp.float32)))

    def pool(self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
        """As ``CSATail.pool``, from the running softmax; the tail's leaves are one layer's of the batch, [B, dim]."""
        return self.continued(streams, phase, num_new, ratio)[0]

    def continued(
        self, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int
    ) -> tuple[jax.Array, HCAOnlineTail]:
        """What ``pool`` gives, and the running softmax of the block of the last token.

        The latter is that of a full block where the last token completes one: ``end_block`` then starts it again.
        """
        width = min(ratio, streams.ka.shape[1])
        k = _on_grid(streams.ka, None, phase, num_new, ratio, 0.0, width)
        z = _on_grid(streams.za, None, phase, num_new, ratio, EMPTY_GATE, width)
        peak = jnp.max(z, axis=2)  # [B, N, dim]
        peak = peak.at[:, 0].max(self.peak)
        # An empty slot under an empty peak would weigh exp(0) = 1.
        weight = jnp.where(z == EMPTY_GATE, 0.0, jnp.exp(z - peak[:, :, None]))
        carried = jnp.exp(self.peak - peak[:, 0])
        total = jnp.sum(weight, axis=2).at[:, 0].add(carried * self.total)
        weighted = jnp.sum(weight * k, axis=2).at[:, 0].add(carried * self.weighted)
        last = jnp.maximum(phase + num_new - 1, 0) // ratio
        at_last = jax.tree.map(
            lambda leaf: jnp.take_along_axis(leaf, last[:, None, None], axis=1)[:, 0],
            HCAOnlineTail(peak=peak, total=total, weighted=weighted),
        )
        return weighted / jnp.where(total > 0, total, 1.0), at_last

    def append(self, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> HCAOnlineTail:
        """Fold new tokens into one layer's running softmaxes."""
        old = read_slots(self, index, batch.slots)
        _, new = old.continued(streams, batch.start % ratio, batch.num_new, ratio)
        new, tail = lax.optimization_barrier((new, self))
        return jax.tree.map(lambda leaf, value: put(leaf, index, batch.slots, batch.storing, value), tail, new)

    def end_block(self, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> HCAOnlineTail:
        """Start again, for slots [B] where ``complete`` [B]."""
        return emptied(self, index, slots, complete)


Tail = CSATail | HCATail | HCAOnlineTail

HCA_TAILS: dict[str, type[HCATail | HCAOnlineTail]] = {"ring": HCATail, "online": HCAOnlineTail}


def tail_specs(cfg: DSV4Config, kind: AttentionType, dtype: Any, hca_tail: str) -> tuple[Tail | None, CSATail | None]:
    """One request's tails in one layer of a kind: the compressor's, and its indexer's. None where there is none."""
    if not kind.compresses:
        return None, None
    ratio = cfg.ratio(kind)
    form = CSATail if kind.overlaps else HCA_TAILS[hca_tail]
    indexer = CSATail.spec(ratio, cfg.indexer_head_dim, dtype) if kind.is_indexed else None
    return form.spec(ratio, cfg.head_dim, dtype), indexer


_GATES = ("za", "zb_next", "zb", "peak")


def empty_tail[T: Tail | None](spec: T, lead: tuple[int, ...]) -> T:
    """The tail of requests that have seen no token, from its spec, with leading axes ``lead``.

    Each leaf is an array of its own: leaves that share a buffer cannot be donated.
    """

    def fill(path: Any, leaf: Any) -> jax.Array:
        return jnp.full((*lead, *leaf.shape), EMPTY_GATE if path[-1].name in _GATES else 0.0, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, spec)


def emptied[T: Tail](tail: T, index: jax.Array | int, slots: jax.Array, where: jax.Array) -> T:
    """A stacked tail with one layer's part of slots [B] made empty, where bool [B]."""
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), tail)
    empty = empty_tail(spec, slots.shape)
    return jax.tree.map(lambda leaf, value: put(leaf, index, slots, where & (slots >= 0), value), tail, empty)


def _leaves(form: type[Tail], spec: Any) -> dict[str, Any]:
    """The same spec for every leaf of a form."""
    return {field.name: spec for field in dataclasses.fields(form)}


def num_touched_blocks(num_tokens: int, ratio: int) -> int:
    """Most blocks that T consecutive tokens can touch."""
    return (num_tokens + 2 * ratio - 2) // ratio


def _on_grid(
    tokens: jax.Array,
    tail: jax.Array | None,
    phase: jax.Array,
    num_new: jax.Array,
    ratio: int,
    empty: float,
    width: int | None = None,
) -> jax.Array:
    """Lay tokens [B, T, dim] on their blocks: [B, N, ratio, dim]; block 0 begins with the tail's first ``phase`` rows.

    So one code path serves decode, prefill and mixed batches. Slots without a token hold ``empty``. With ``width`` and
    no tail, a block's row holds only its first ``width`` new tokens: enough when T <= width, and far smaller.
    """
    num_tokens = tokens.shape[1]
    block = jnp.arange(num_touched_blocks(num_tokens, ratio), dtype=jnp.int32)
    begin = (block * ratio)[None] - phase[:, None]  # [B, N] token index of a block's first slot, negative in block 0
    if width is not None:
        token = jnp.maximum(begin, 0)[..., None] + jnp.arange(width, dtype=jnp.int32)[None, None]
        inside = token < (begin + ratio)[..., None]
    else:
        token = begin[..., None] + jnp.arange(ratio, dtype=jnp.int32)[None, None]
        inside = token >= 0
    inside &= token < num_new[:, None, None]
    flat = jnp.clip(token, 0, num_tokens - 1).reshape(token.shape[0], -1, 1)
    rows = jnp.take_along_axis(tokens, flat, axis=1).reshape(*token.shape, -1)
    rows = jnp.where(inside[..., None], rows, empty)
    if tail is not None:
        from_tail = jnp.arange(ratio, dtype=jnp.int32)[None] < phase[:, None]
        first = jnp.where(from_tail[..., None], tail.astype(jnp.float32), rows[:, 0])
        rows = jnp.concatenate([first[:, None], rows[:, 1:]], axis=1)
    return rows


def _softmax_pool(k: jax.Array, z: jax.Array) -> jax.Array:
    """sum softmax(z) * k over axis -2, per channel."""
    weight = jnp.exp(z - jnp.max(z, axis=-2, keepdims=True))
    return jnp.sum(weight * k, axis=-2) / jnp.sum(weight, axis=-2)
