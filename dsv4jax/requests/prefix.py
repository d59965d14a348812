"""A prefix, the hashes by which it is found, and a report of the prefixes of a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

type Tokens = Sequence[int] | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt, and the slot of the request that holds it."""

    slot: int  # among those of all shards
    tokens: np.ndarray = dataclasses.field(repr=False)  # int32 [length], whole blocks; cannot be written to
    hashes: tuple[int, ...] = dataclasses.field(repr=False)  # of each beginning in whole blocks, the whole one last

    @property
    def length(self) -> int:
        return self.tokens.size

    def is_begin_of(self, tokens: np.ndarray) -> bool:
        return np.array_equal(self.tokens, tokens[: self.length])


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixReport:
    """What the prefixes of a store hold, the least recently used one first. ``print`` shows it as a table."""

    prefixes: tuple[Prefix, ...]
    is_used: tuple[bool, ...]  # whether a request outside of the store reads the prefix's last block
    capacity: int  # of all shards
    state_bytes: int  # of their slots
    blocks: int  # that prefixes read, each counted once
    own_blocks: int  # of these, that nothing else reads: so many come free if all prefixes go
    block_bytes: int  # of a block

    def __str__(self) -> str:
        lines = [
            f"prefixes: {len(self.prefixes)} of {self.capacity}, {self.state_bytes:,} B of state, "
            f"{self.blocks:,} blocks of {self.block_bytes:,} B, {self.own_blocks:,} of them read by nothing else",
            "",
            f"{'slot':>4}{'length':>12}{'in use':>10}",
        ]
        for prefix, used in zip(self.prefixes, self.is_used, strict=True):
            lines.append(f"{prefix.slot:>4}{prefix.length:>12,}{'yes' if used else 'no':>10}")
        return "\n".join(lines)


def read_tokens(name: str, tokens: Tokens) -> np.ndarray:
    """Return tokens as a new array int32 [n]. ValueError for what is none, naming the call."""
    try:
        read = np.asarray(tokens)
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"{name}: tokens must be integers [n], got {tokens!r}") from error
    if read.ndim != 1 or (read.size and read.dtype.kind not in "iu"):
        raise ValueError(f"{name}: tokens must be integers [n], got {read.dtype.name}{list(read.shape)}")
    for token in (read.min(), read.max()) if read.size else ():
        if not 0 <= token < 1 << 31:
            raise ValueError(f"{name}: tokens must be in [0, {1 << 31}), got {token}")
    return np.array(read, np.int32)


def hashes_of(tokens: np.ndarray, block: int) -> tuple[int, ...]:
    """Return the hash of each beginning of tokens in whole blocks: of the one before it, and of the block."""

    def chained() -> Iterator[int]:
        last = 0
        for first in range(0, tokens.size - block + 1, block):
            last = hash((last, tokens[first : first + block].tobytes()))
            yield last

    return tuple(chained())
