"""What kernels are given: arrays by name, and the sizes that they are compiled for.

The named tuples hold arrays where a kernel is launched, and pointers inside it. None is None on both sides, but a
kernel can ask whether a pointer is None, not whether a tuple is. It reads the fields and properties of its constants
when it is compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from pallas_kernels.formats import KeyRows, KVRows

type Leaf = Any  # an array; its shape and dtype, of a result; or a pointer, inside a kernel
type Operand = Any  # what an argument of a kernel is: a leaf, None, or a named tuple of operands
type Constants = dict[str, Any]  # arguments of a kernel by name, hashable, for which it is compiled


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


class Rows(NamedTuple):
    """Stored key rows. The leading axes are those of the array they are in, such as [layers, num_blocks, per_block]."""

    nope: Leaf  # [..., nope_dim]
    rope: Leaf  # [..., rope_dim]
    scale: Leaf  # f32 [...], u8 [..., tiles], or None

    @classmethod
    def of(cls, rows: KVRows) -> Rows:
        """Return the leaves of a pytree ``nope rope scale``."""
        return cls(rows.nope, rows.rope, rows.scale)


class Keys(NamedTuple):
    """Indexer keys, stored or of queries."""

    codes: Leaf  # [..., key_dim], or [..., key_dim / 2] of 4-bit formats
    scale: Leaf  # u8 [..., groups], or None

    @classmethod
    def of(cls, keys: KeyRows) -> Keys:
        """Return the leaves of a pytree ``codes scale``."""
        return cls(keys.codes, keys.scale)


class Both(NamedTuple):
    """The same thing twice: of entries, and of indexer keys."""

    entry: Operand
    key: Operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formats:
    """What stored rows look like."""

    nope_dim: int
    rope_dim: int
    kv_format: str
    key_dim: int = 0
    key_format: str = ""

    @property
    def dim(self) -> int:
        """Channels of a key row."""
        return self.nope_dim + self.rope_dim

    @property
    def size(self) -> int:
        """Elements of the vector that holds a key row."""
        return next_power_of_2(self.dim)

    @property
    def key_bits(self) -> int:
        """The binary logarithm of ``key_dim``."""
        return self.key_dim.bit_length() - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paging:
    """The shapes of a pool and of the block table: which entries there are, and how many blocks a request can have."""

    requests: int
    max_blocks: int  # of a request
    num_blocks: int  # of a layer
    per_block: int  # entries of a block

    @classmethod
    def of(cls, leaf: jax.Array, block_table: jax.Array | None) -> Paging:
        """Return those of a leaf [layers, num_blocks, per_block, ...] and of a table [requests, max_blocks], if any."""
        requests, max_blocks = (0, 0) if block_table is None else block_table.shape
        return cls(requests=requests, max_blocks=max_blocks, num_blocks=leaf.shape[1], per_block=leaf.shape[2])


class Batch(NamedTuple):
    """The requests of a call."""

    layer: Leaf  # i32 [1]
    slots: Leaf  # i32 [B], -1 = none
    start: Leaf  # i32 [B] number of the first new token, or entry
    num_new: Leaf  # i32 [B] how many there are of them
    block_table: Leaf  # i32 [requests, max_blocks], -1 = none; or None


class Streams(NamedTuple):
    """What new tokens contribute to entries, or to indexer keys. CSA has its b-stream, then its a-stream."""

    k: Leaf  # f32 [B, T, dim], or [B, T, 2 dim] of CSA
    z: Leaf
    norm: Leaf  # [dim]


class Tokens(NamedTuple):
    """T new tokens of each of B requests."""

    batch: Batch
    kv: Leaf  # f32 [B, T, dim]; None to keep the window
    entry: Streams | None  # None for SWA
    key: Streams | None  # CSA only
    rope: Leaf  # f32 [B, max_groups, rope_dim] cosines, then sines; None for SWA


class Window(NamedTuple):
    """The rows of a window, position p in row p mod n_win."""

    rows: Rows  # [layers, requests, n_win, ...]
    pos: Leaf  # i32 [layers, requests, n_win]


class CSATail(NamedTuple):
    """Rows of the unfinished group, and the b-stream of the group before it; [layers, requests, ratio, dim]."""

    ka: Leaf
    za: Leaf
    kb_next: Leaf
    zb_next: Leaf
    kb: Leaf
    zb: Leaf


class RingTail(NamedTuple):
    """Rows of the unfinished group of HCA; [layers, requests, ratio, dim]."""

    ka: Leaf
    za: Leaf


class OnlineTail(NamedTuple):
    """The running softmax of the unfinished group of HCA; f32 [layers, requests, dim]."""

    peak: Leaf
    total: Leaf
    weighted: Leaf


class Pooled(NamedTuple):
    """What the first launch of a cache update gives the second, for HCA."""

    rows: Leaf  # f32 [B, groups, dim]
    running: Leaf  # f32 [B, 3, dim] an ``OnlineTail`` after the call; None for a ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSizes:
    """Sizes of a cache update."""

    tokens: int  # T
    requests: int  # that the cache has slots for
    n_win: int
    ratio: int = 1  # tokens of a group
    tail_units: int = 0  # blocks that write tails of a request
    eps: float = 0.0  # of the norms

    @property
    def window_rows(self) -> int:
        """The largest number of window rows that a request's tokens fill."""
        return min(self.tokens, self.n_win)

    @property
    def max_entries(self) -> int:
        """The largest number of groups that a request's tokens can complete."""
        return (self.tokens + self.ratio - 1) // self.ratio

    @property
    def max_groups(self) -> int:
        """The largest number of groups that they can touch."""
        return (self.tokens + 2 * self.ratio - 2) // self.ratio

    @property
    def padded_ratio(self) -> int:
        """The power of two that holds a group."""
        return next_power_of_2(self.ratio)
