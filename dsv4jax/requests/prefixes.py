"""A store of prefixes: prompts that begin alike are computed once.

A prefix is the beginning of a prompt, in whole blocks, and a request that holds it: in a slot of the same cache, made
by ``fork``. It therefore has the windows and the compressors' state of its last token, and shares its blocks by their
reference counts. Whatever works on requests works on prefixes: ``verify``, ``describe``, ``extract``, ``save``.
What the store itself has is an index on the host, from tokens to slots.

A prefix of whole blocks is filling no block. So keeping one and going on from one copies a slot's state and takes no
block, whatever its length. It costs ``plan.bytes_per_request``: at V4-Flash's sizes 4.5 MiB with online tails, as much
as ten blocks. A form beside the cache could leave out what is empty at the end of a block, and would take 3.5 MiB. It
would be a second kind of request in every function that knows the first.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.inspection import verify
from dsv4jax.cache.tables import Tables
from dsv4jax.checks import Tree, check_concrete, check_one_shard, check_type, integer
from dsv4jax.plan import CachePlan
from dsv4jax.requests.prefix_slots import Seen, blocks_of, exchange, first_cache, go_on, look, released

type Tokens = Sequence[int] | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt, and the slot of the request that holds it."""

    slot: int
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
    capacity: int
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


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PrefixStore:
    """Which prefixes a cache holds: a value on the host, which goes with the cache of which it was returned.

    Methods that change the cache take it donated and return it. A cache may also be a pytree of caches whose slots
    belong together, such as ``model.Caches``; blocks are then those of the first one, and the others may have none.

    A prefix is in use while a request outside of the store reads its last block. When room is lacking, prefixes that
    are not in use give way, the least recently used first.

    Attributes:
      plan: of the cache, or of a shard's cache: one store per shard serves a mesh.
      capacity: the most prefixes to keep. Each takes one of the plan's ``max_requests`` slots.
      every: ``cuts`` says to keep a prompt after every so many blocks; None = at its end and where prompts part.
    """

    plan: CachePlan
    capacity: int
    every: int | None = None
    # By hash, the least recently used first.
    index: Mapping[int, Prefix] = dataclasses.field(default=MappingProxyType({}), kw_only=True)

    def __post_init__(self) -> None:
        check_type("plan", self.plan, CachePlan)
        if not 1 <= integer("capacity", self.capacity) < self.plan.max_requests:
            slots = self.plan.max_requests
            raise ValueError(
                f"capacity must be in [1, {slots - 1}], got {self.capacity}: each prefix takes one of the plan's "
                f"{slots} slots, and a request needs one too"
            )
        if self.every is not None and integer("every", self.every) < 1:
            raise ValueError(f"every must be at least 1 block, got {self.every}")

    def __repr__(self) -> str:
        return f"PrefixStore({len(self.index)} of {self.capacity} prefixes, {self.plan!r})"

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """The prefixes, the least recently used one first."""
        return tuple(self.index.values())

    # ---- the index, on the host alone --------------------------------------------------------------------------------

    def find(self, tokens: Tokens) -> Prefix | None:
        """Return the longest prefix that tokens int [n] begin with, shorter than they are; None if there is none.

        It is shorter, because the last token of a prompt must run to say what follows it. Hashes find it, and its
        tokens are compared.
        """
        read = _read("find", tokens)
        for key in reversed(_hashes(read[:-1], self.plan.cfg.block_tokens)):
            found = self.index.get(key)
            if found is not None and found.is_begin_of(read):
                return found
        return None

    def cuts(self, prompts: Sequence[Tokens]) -> list[list[int]]:
        """Return the lengths at which it is worth to keep each prompt, in order: stop there, and call ``keep``.

        They are the last whole block before its last token, every ``every`` blocks, and where it parts from another of
        these prompts or from a prefix of the store.
        """
        block = self.plan.cfg.block_tokens
        read = [_read(f"cuts: prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        chains = [_hashes(tokens, block) for tokens in read]
        known = [prefix.hashes for prefix in self.prefixes]
        shared = collections.Counter(key for chain in (*chains, *known) for key in chain)
        found = []
        for tokens, chain in zip(read, chains, strict=True):
            most = (tokens.size - 1) // block
            numbers = [shared[key] for key in chain] + [0]
            places = {i + 1 for i in range(len(chain)) if numbers[i] > max(numbers[i + 1], 1)} | {most}
            if self.every is not None:
                places |= set(range(self.every, most + 1, self.every))
            found.append(sorted(block * place for place in places if 0 < place <= most))
        return found

    def noting(self, slot: int, tokens: Tokens) -> PrefixStore:
        """Return the store with a prefix more, whose request is in ``slot``. The cache is not looked at.

        ``keep`` and ``adopt`` do this after they have. On a mesh, call it with what a step in ``jax.shard_map`` has
        kept: the store of a shard cannot look at the shard's tables.

        Raises:
          ValueError: tokens are no whole blocks, the slot has a prefix or is none of the plan, or the store is full.
        """
        prefix, slot = self._prefix("noting", slot, tokens), integer("slot", slot)
        if not 0 <= slot < self.plan.max_requests:
            raise ValueError(f"noting: slot {slot} is out of range, the plan has {self.plan.max_requests}")
        self._check_unkept("noting", slot)
        if prefix.hashes[-1] in self.index or len(self.index) >= self.capacity:
            raise ValueError(f"noting: no place for a prefix of {prefix.length} tokens: drop one of {self!r}")
        return self._with(prefix)

    def without(self, *prefixes: Prefix) -> PrefixStore:
        """Return the store without prefixes, whose requests stay in the cache: the caller releases or keeps them.

        Raises:
          ValueError: one of them is not in the store.
        """
        for prefix in prefixes:
            self._check_held("without", prefix)
        gone = {prefix.hashes[-1] for prefix in prefixes}
        return self._of({key: prefix for key, prefix in self.index.items() if key not in gone})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens and slots of the prefixes to a new file; save the cache that holds them beside it.

        Raises:
          FileExistsError: there is something at ``path``.
        """
        sizes = np.array([[prefix.slot, prefix.length] for prefix in self.prefixes], np.int64).reshape(-1, 2)
        tokens = np.concatenate([np.zeros(0, np.int32), *(prefix.tokens for prefix in self.prefixes)])
        with Path(path).open("xb") as file:
            np.savez_compressed(file, sizes=sizes, tokens=tokens, policy=np.array([self.capacity, self.every or 0]))

    @classmethod
    def restore(cls, path: str | os.PathLike[str], plan: CachePlan) -> PrefixStore:
        """Read what ``save`` wrote. ``verify`` says whether a cache holds these prefixes.

        Raises:
          FileNotFoundError: ``path`` does not exist.
          ValueError: it is no such file, is damaged, or does not fit the plan.
        """
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                sizes, tokens, (capacity, every) = file["sizes"], file["tokens"], file["policy"].tolist()
        except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is no file of a PrefixStore, or a damaged one: {error}") from error
        store = cls(plan, capacity, every or None)
        for (slot, _), read in zip(sizes.tolist(), np.split(tokens, np.cumsum(sizes[:, 1])), strict=False):
            store = store.noting(slot, read)
        return store

    # ---- with the cache ----------------------------------------------------------------------------------------------

    def start[Cache](self, cache: Cache, slot: int, tokens: Tokens) -> tuple[PrefixStore, Cache, int]:
        """Give a new request what the store has of its prompt, by one fork.

        Args:
          cache: donated.
          slot: from ``admit``, without tokens or grants.
          tokens: int [n], the prompt.

        Returns:
          (store, cache, tokens of the prompt that the request now holds; 0 if the store has none of them).

        Raises:
          ValueError: the slot holds no request or one with tokens, or a prefix was released by another than this
            store. The cache is then unchanged, and not donated.
        """
        seen, slot = self._look("start", cache, slot), int(slot)
        if not seen.is_admitted or seen.prepared or seen.held:
            holds = f"{seen.length} tokens, {seen.held} blocks" if seen.is_admitted else "no request"
            raise ValueError(f"start: slot {slot} must be from admit, without tokens or grants; it holds {holds}")
        prefix = self.find(tokens)
        if prefix is None:
            return self, cache, 0
        cache = go_on(cache, np.int32(prefix.slot), np.asarray([slot], np.int32))
        return self._with(prefix), cache, prefix.length

    def keep[Cache](self, cache: Cache, slot: int, tokens: Tokens) -> tuple[PrefixStore, Cache, bool]:
        """Keep what a request holds as a prefix, by a fork into another slot. The request goes on unchanged.

        If there is no free slot or the store is full, the prefix that was least recently used gives way.

        Args:
          cache: donated.
          slot: of the request, which holds whole blocks.
          tokens: int [n], all that it holds.

        Returns:
          (store, cache, ok). If each prefix that could give way is in use, then ok is False and both are unchanged.

        Raises:
          ValueError: the slot holds no request, or another number of tokens, or no whole blocks, or is a prefix's; or
            it reads blocks of a prefix of other tokens; or a prefix was released by another than this store. The cache
            is then unchanged, and not donated.
        """
        seen, prefix, known = self._check_request("keep", cache, slot, tokens)
        if known is not None and known.is_begin_of(prefix.tokens):
            return self._with(known), cache, True
        leaving: list[Prefix] = []
        if known is not None:  # another prefix of the same hash
            leaving = [known]
        elif len(self.index) >= self.capacity or not seen.free_slots:
            leaving = [one for one, used in zip(self.prefixes, seen.is_used, strict=True) if not used][:1]
            if not leaving:
                return self, cache, False
        if any(seen.is_used[self.prefixes.index(one)] for one in leaving):
            return self, cache, False
        gone = np.asarray([one.slot for one in leaving] or [-1], np.int32)
        cache, place = exchange(cache, gone, np.int32(slot))
        return self.without(*leaving)._with(dataclasses.replace(prefix, slot=int(place))), cache, True

    def adopt(self, cache: Tree, slot: int, tokens: Tokens) -> PrefixStore:
        """Make a request a prefix without copying it, such as one that ``insert`` brought back from host memory.

        The arguments and errors are those of ``keep``. The slot is the store's from then on, and the cache as it was.

        Raises:
          ValueError: as ``keep``; or the store is full, or has this prefix.
        """
        self._check_request("adopt", cache, slot, tokens)
        return self.noting(slot, tokens)

    def drop[Cache](self, cache: Cache, *prefixes: Prefix) -> tuple[PrefixStore, Cache]:
        """Release prefixes. Requests that went on from them keep what they share. The cache is donated.

        Raises:
          ValueError: one of them is not in the store. The cache is then unchanged, and not donated.
        """
        after = self.without(*prefixes)
        return after, released(cache, self._slots_of(prefixes))

    def make_room[Cache](self, cache: Cache, blocks: int) -> tuple[PrefixStore, Cache, bool]:
        """Let prefixes give way until so many blocks are free: before ``prepare_forward``, which takes them.

        Only prefixes go whose blocks come free by that, and none if this is not enough. The cache is donated.

        Returns:
          (store, cache, ok). If ok is False, then both are unchanged.
        """
        seen = self._look("make_room", cache, None)
        if seen.free_blocks >= integer("blocks", blocks, 0):
            return self, cache, True
        table, readers = jax.device_get(
            (blocks_of(first_cache(cache).tables, self._slots_of(self.prefixes)), first_cache(cache).tables.block_refs)
        )
        held = [row[row >= 0] for row in table]
        able = [i for i, used in enumerate(seen.is_used) if not used]
        leaving, free, readers = [], int(seen.free_blocks), np.array(readers)
        while free < blocks:
            # One of which longer prefixes read everything frees nothing, until they go.
            i = next((i for i in able if np.any(readers[held[i]] == 1)), None)
            if i is None:
                return self, cache, False
            able.remove(i)
            leaving.append(self.prefixes[i])
            readers[held[i]] -= 1
            free += int(np.sum(readers[held[i]] == 0))
        store, cache = self.drop(cache, *leaving)
        return store, cache, True

    def verify(self, cache: KVCache) -> list[str]:
        """Check a cache as ``d4.verify`` does, and that it has each prefix: a sentence for each fault."""
        found = verify(cache)
        tables: Tables = jax.device_get(cache.tables)
        slots = collections.Counter(prefix.slot for prefix in self.prefixes)
        found += [f"slot {slot}: {times} prefixes are in it" for slot, times in slots.items() if times > 1]
        for key, prefix in self.index.items():
            where = f"slot {prefix.slot}: the store has a prefix of {prefix.length} tokens in it"
            if not tables.admitted[prefix.slot]:
                found.append(f"{where}, but it holds no request")
            elif tables.seq_lens[prefix.slot] != prefix.length:
                found.append(f"{where}, but it holds {tables.seq_lens[prefix.slot]} tokens")
            if key != prefix.hashes[-1] or prefix.hashes != _hashes(prefix.tokens, self.plan.cfg.block_tokens):
                found.append(f"{where}, under a hash that is not that of its tokens")
        return found

    def describe(self, cache: Tree) -> PrefixReport:
        """Report what the prefixes hold. ``d4.describe`` counts them among the requests."""
        seen = self._look("describe", cache, None)
        table, readers = jax.device_get(
            (blocks_of(first_cache(cache).tables, self._slots_of(self.prefixes)), first_cache(cache).tables.block_refs)
        )
        blocks, times = np.unique(table[: len(self.index)], return_counts=True)
        is_block = blocks >= 0
        return PrefixReport(
            prefixes=self.prefixes,
            is_used=seen.is_used,
            capacity=self.capacity,
            state_bytes=len(self.index) * self.plan.bytes_per_request,
            blocks=int(np.sum(is_block)),
            own_blocks=int(np.sum(times[is_block] == readers[blocks[is_block]])),
            block_bytes=self.plan.bytes_per_block,
        )

    # ---- within ------------------------------------------------------------------------------------------------------

    def _of(self, index: dict[int, Prefix]) -> PrefixStore:
        return dataclasses.replace(self, index=MappingProxyType(index))

    def _with(self, prefix: Prefix) -> PrefixStore:
        """The store in which a prefix, new or not, is the last one used."""
        key = prefix.hashes[-1]
        return self._of({k: v for k, v in self.index.items() if k != key} | {key: prefix})

    def _prefix(self, name: str, slot: int, tokens: Tokens) -> Prefix:
        read, block = _read(name, tokens), self.plan.cfg.block_tokens
        if not read.size or read.size % block:
            raise ValueError(f"{name}: a prefix is whole blocks of {block} tokens, got {read.size} tokens")
        read.flags.writeable = False
        return Prefix(slot=slot, tokens=read, hashes=_hashes(read, block))

    def _slots_of(self, prefixes: Sequence[Prefix]) -> np.ndarray:
        """The slots of some prefixes, int32 [capacity]; -1 = none."""
        slots = [prefix.slot for prefix in prefixes]
        return np.asarray(slots + [-1] * (self.capacity - len(slots)), np.int32)

    def _check_held(self, name: str, prefix: Prefix) -> None:
        if self.index.get(prefix.hashes[-1]) is not prefix:
            raise ValueError(
                f"{name}: {prefix} of {prefix.length} tokens is not in the store: it gave way or was dropped"
            )

    def _check_unkept(self, name: str, slot: int) -> None:
        if any(prefix.slot == slot for prefix in self.prefixes):
            raise ValueError(f"{name}: slot {slot} is a prefix's")

    def _check_request(self, name: str, cache: Tree, slot: int, tokens: Tokens) -> tuple[Seen, Prefix, Prefix | None]:
        """Check that a request can become a prefix. Returns (what was seen, the prefix, that of the same hash)."""
        seen, prefix = self._look(name, cache, slot), self._prefix(name, slot, tokens)
        self._check_unkept(name, slot)
        if not seen.is_admitted:
            raise ValueError(f"{name}: slot {slot} holds no request")
        if seen.length != prefix.length:
            raise ValueError(f"{name}: slot {slot} holds {seen.length} tokens, got {prefix.length}")
        for one, shares in zip(self.prefixes, seen.shares, strict=True):
            if shares and not np.array_equal(one.tokens[: prefix.length], prefix.tokens[: one.length]):
                raise ValueError(
                    f"{name}: slot {slot} goes on from the prefix in slot {one.slot}, whose {one.length} tokens are "
                    "others than these"
                )
        return seen, prefix, self.index.get(prefix.hashes[-1])

    def _look(self, name: str, cache: Tree, slot: int | None) -> Seen:
        """Read what the host must know of the tables. ValueError if they are not those that the store belongs to."""
        first = first_cache(cache)
        check_cache(name, first)
        check_concrete(name, first, "the index is on the host, so call it on a cache that has come back")
        check_one_shard(first.tables.num_free, name, on_host=True)
        if first.plan != self.plan:
            raise ValueError(f"{name}: the store is of {self.plan!r}, the cache of {first.plan!r}")
        if slot is not None and not 0 <= integer("slot", slot) < self.plan.max_requests:
            raise ValueError(f"{name}: slot {slot} is out of range, the cache has {self.plan.max_requests}")
        prefixes, block = self.prefixes, self.plan.cfg.block_tokens
        last = [prefix.length // block - 1 for prefix in prefixes] + [0] * (self.capacity - len(prefixes))
        where = np.int32(-1 if slot is None else slot)  # -1: no slot is apart from the others
        found: Seen = jax.device_get(look(first.tables, self._slots_of(prefixes), np.asarray(last, np.int32), where))
        for i, prefix in enumerate(prefixes):
            if found.lengths[i] != prefix.length:
                raise ValueError(
                    f"{name}: slot {prefix.slot} no longer holds the prefix of {prefix.length} tokens: it was released "
                    "or used by another than this store"
                )
        count = len(prefixes)
        used, shares = (tuple(map(bool, flags[:count])) for flags in (found.is_used, found.shares))
        return dataclasses.replace(found, is_used=used, shares=shares)


def _read(name: str, tokens: Tokens) -> np.ndarray:
    """Return tokens as a new array int32 [n]."""
    read = np.asarray(tokens)
    if read.ndim != 1 or (read.size and read.dtype.kind not in "iu"):
        raise ValueError(f"{name}: tokens must be integers [n], got {read.dtype.name}{list(read.shape)}")
    return np.array(read, np.int32)


def _hashes(tokens: np.ndarray, block: int) -> tuple[int, ...]:
    """Return the hash of each beginning of tokens in whole blocks: of the one before it, and of the block."""

    def chained() -> Iterator[int]:
        last = 0
        for first in range(0, tokens.size - block + 1, block):
            last = hash((last, tokens[first : first + block].tobytes()))
            yield last

    return tuple(chained())
