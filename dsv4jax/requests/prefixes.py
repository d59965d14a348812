"""A store of prefixes: prompts that begin alike are computed once.

A prefix is the beginning of a prompt, in whole blocks, and a request that holds it: in a slot of the same cache, made
by ``fork``. It therefore has the windows and the compressors' state of its last token, and shares its blocks by their
reference counts. Whatever works on requests works on prefixes: ``verify``, ``describe``, ``extract``, ``save``.
What the store itself has is an index on the host, from tokens to slots, of all shards of requests.

A prefix of whole blocks is filling no block. So keeping one and going on from one copies a slot's state and takes no
block, whatever its length. It costs ``plan.bytes_per_request``: at V4-Flash's sizes 4.5 MiB with online tails, as much
as ten blocks. A form beside the cache could leave out what is empty at the end of a block, and would take 3.5 MiB. It
would be a second kind of request in every function that knows the first.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.inspection import verify
from dsv4jax.cache.shards import on_host
from dsv4jax.cache.tables import Tables
from dsv4jax.checks import Tree, check_concrete, check_type, integer
from dsv4jax.plan import CachePlan
from dsv4jax.requests.prefix import Prefix, PrefixReport, Tokens, hashes_of, read_tokens
from dsv4jax.requests.prefix_files import SavedPrefixes
from dsv4jax.requests.prefix_slots import Seen, blocks_of, exchange, first_cache, go_on, look, released


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PrefixStore:
    """Which prefixes a cache holds: a value on the host, which goes with the cache of which it was returned.

    Methods that change the cache take it donated and return it. A cache may also be a pytree of caches whose slots
    belong together, such as ``model.Caches``; blocks are then those of the first one, and the others may have none.

    A prefix is in use while a request outside of the store reads its last block. When room is lacking, prefixes that
    are not in use give way, the least recently used first.

    Over a mesh, a prefix serves the requests of its shard, and a beginning that several shards need is kept on each.
    Slots are numbers among those of all shards: slot i of shard s is ``s * (plan.max_requests // shards) + i``.

    Attributes:
      plan: of the cache, of all its shards.
      capacity: the most prefixes to keep on each shard. Each takes one of the plan's ``max_requests`` slots.
      every: ``cuts`` says to keep a prompt after every so many blocks; None = at its end and where prompts part.
      shards: shards of requests that the cache is divided into, the size of its mesh's axis "data".
    """

    plan: CachePlan
    capacity: int
    every: int | None = None
    shards: int = dataclasses.field(default=1, kw_only=True)
    # By shard and hash, the least recently used first.
    index: Mapping[tuple[int, int], Prefix] = dataclasses.field(default=MappingProxyType({}), kw_only=True)

    def __post_init__(self) -> None:
        check_type("plan", self.plan, CachePlan)
        sizes = self.plan.max_requests, self.plan.num_blocks
        if any(size % integer("shards", self.shards, 1) for size in sizes):
            raise ValueError(f"max_requests and num_blocks, {sizes}, must be divisible by shards={self.shards}")
        slots = self._slots
        if not 1 <= integer("capacity", self.capacity) < slots:
            raise ValueError(
                f"capacity must be in [1, {slots - 1}], got {self.capacity}: each prefix takes one of {slots} slots"
                f"{' of its shard' * (self.shards > 1)}, and a request needs one too"
            )
        if self.every is not None and integer("every", self.every) < 1:
            raise ValueError(f"every must be at least 1 block, got {self.every}")

    def __repr__(self) -> str:
        return f"PrefixStore({len(self.index)} of {self.capacity * self.shards} prefixes, {self.plan!r})"

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """The prefixes, the least recently used one first."""
        return tuple(self.index.values())

    # ---- the index, on the host alone --------------------------------------------------------------------------------

    def find(self, tokens: Tokens, shard: int | None = None) -> Prefix | None:
        """Return the longest prefix that tokens int [n] begin with, shorter than they are; None if there is none.

        It is shorter, because the last token of a prompt must run to say what follows it. Hashes find it, and its
        tokens are compared. It is one of ``shard``, or of any.

        Raises:
          ValueError: tokens are none, or there is no such shard.
        """
        read, shards = read_tokens("find", tokens), self._shards_of("find", shard)
        for key in reversed(hashes_of(read[:-1], self.plan.cfg.block_tokens)):
            for one in shards:
                found = self.index.get((one, key))
                if found is not None and found.is_begin_of(read):
                    return found
        return None

    def cuts(self, prompts: Sequence[Tokens]) -> list[list[int]]:
        """Return the lengths at which it is worth to keep each prompt, in order: stop there, and call ``keep``.

        They are the last whole block before its last token, every ``every`` blocks, and where it parts from another of
        these prompts or from a prefix of the store.
        """
        block = self.plan.cfg.block_tokens
        read = [read_tokens(f"cuts: prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        chains = [hashes_of(tokens, block) for tokens in read]
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

        ``keep`` and ``adopt`` do this after they have. Call it with what a step in a ``jax.shard_map`` of your own has
        kept: the store cannot look into a cache that does not know its mesh.

        Raises:
          ValueError: tokens are no whole blocks, the slot has a prefix or is none of the plan, or the store has this
            prefix on the slot's shard or is full there.
        """
        prefix = self._prefix("noting", slot, tokens)
        if not 0 <= prefix.slot < self.plan.max_requests:
            raise ValueError(f"noting: slot {prefix.slot} is out of range, the plan has {self.plan.max_requests}")
        self._check_unkept("noting", prefix.slot)
        if self._key(prefix) in self.index or self._is_full(self._shard(prefix.slot)):
            raise ValueError(f"noting: no place for a prefix of {prefix.length} tokens: drop one of {self!r}")
        return self._with(prefix)

    def without(self, *prefixes: Prefix) -> PrefixStore:
        """Return the store without prefixes, whose requests stay in the cache: the caller releases or keeps them.

        Raises:
          ValueError: one of them is not in the store.
        """
        for prefix in prefixes:
            if self.index.get(self._key(prefix)) is not prefix:
                held = f"{prefix} of {prefix.length} tokens is not in the store: it gave way or was dropped"
                raise ValueError(f"without: {held}")
        gone = {self._key(prefix) for prefix in prefixes}
        return self._of({key: prefix for key, prefix in self.index.items() if key not in gone})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens and slots of the prefixes to a new file; save the cache that holds them beside it.

        Raises:
          FileExistsError: there is something at ``path``.
        """
        prefixes = tuple((prefix.slot, prefix.tokens) for prefix in self.prefixes)
        SavedPrefixes(capacity=self.capacity, every=self.every, shards=self.shards, prefixes=prefixes).write(path)

    @classmethod
    def restore(cls, path: str | os.PathLike[str], plan: CachePlan) -> PrefixStore:
        """Read what ``save`` wrote. ``verify`` says whether a cache holds these prefixes.

        Raises:
          FileNotFoundError: ``path`` does not exist.
          ValueError: it is no such file, is damaged, or does not fit the plan.
        """
        saved = SavedPrefixes.read(path)
        check_type("plan", plan, CachePlan)
        try:
            store = cls(plan, saved.capacity, saved.every, shards=saved.shards)
            for slot, tokens in saved.prefixes:
                store = store.noting(slot, tokens)
        except ValueError as error:
            raise ValueError(f"restore: {path} does not fit the plan: {error}") from error
        return store

    @classmethod
    def restore_beside[Cache](cls, path: str | os.PathLike[str], cache: Cache) -> tuple[PrefixStore, Cache]:
        """Read what ``save`` wrote, for the cache that was saved with it and may have other shards now.

        A prefix is its slot's, and so belongs to the shard that has the slot now. A shard keeps its share of all that
        could be kept, or as many as it gets. Of those that it gets twice the one that was used last stays, and the
        others are released. The cache is donated.

        Raises:
          FileNotFoundError: ``path`` does not exist.
          ValueError: as ``restore``; a shard gets so many prefixes that no slot is left for requests, or the cache does
            not hold one of them. The cache is then unchanged, and not donated.
        """
        saved, first = SavedPrefixes.read(path), first_cache(cache)
        check_cache("restore_beside", first)
        check_concrete("restore_beside", first, "the index is on the host, so call it on a cache that has come back")
        tables: Tables = on_host(first.tables)
        for slot, tokens in saved.prefixes:
            exists = 0 <= slot < tables.admitted.size
            if not exists or not tables.admitted[slot] or tables.seq_lens[slot] != tokens.size:
                raise ValueError(
                    f"restore_beside: slot {slot} of this cache does not hold the {tokens.size} tokens of {path}"
                )
        shards = tables.num_free.size
        of_shard = collections.Counter(slot // (tables.admitted.size // shards) for slot, _ in saved.prefixes)
        capacity = max([-(-saved.capacity * saved.shards // shards), *of_shard.values()])
        store, leaving = cls(first.plan, capacity, saved.every, shards=shards), list[Prefix]()
        for slot, tokens in saved.prefixes:  # the least recently used one first
            prefix = store._prefix("restore_beside", slot, tokens)
            if (twin := store.index.get(store._key(prefix))) is not None:
                leaving.append(twin)
            store = store._with(prefix)
        store._look("restore_beside", cache, None)
        return store, released(cache, store._slots_of(leaving))

    # ---- with the cache ----------------------------------------------------------------------------------------------

    def start[Cache](self, cache: Cache, slot: int, tokens: Tokens) -> tuple[PrefixStore, Cache, int]:
        """Give a new request what the store has of its prompt, by one fork.

        Args:
          cache: donated.
          slot: from ``admit``, without tokens or grants; over a mesh, its number among those of all shards.
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
        prefix = self.find(tokens, self._shard(slot))
        if prefix is None:
            return self, cache, 0
        cache = go_on(cache, np.int32(prefix.slot), np.int32(slot))
        return self._with(prefix), cache, prefix.length

    def keep[Cache](self, cache: Cache, slot: int, tokens: Tokens) -> tuple[PrefixStore, Cache, bool]:
        """Keep what a request holds as a prefix, by a fork into another slot. The request goes on unchanged.

        If there is no free slot or the store is full, the prefix that was least recently used gives way. Over a mesh
        all of this is within the request's shard.

        Args:
          cache: donated.
          slot: of the request, which holds whole blocks; over a mesh, its number among those of all shards.
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
        shard = self._shard(prefix.slot)
        is_lacking = known is not None or self._is_full(shard) or not seen.free_slots[shard]
        # One of the same hash, which is another prefix, must go itself.
        able = [one for one in self._unused(seen, shard) if known is None or one is known]
        if is_lacking and not able:
            return self, cache, False
        leaving = able[:1] if is_lacking else []
        gone = [one.slot for one in leaving] or [-1]
        cache, place = exchange(cache, np.int32(*gone), np.int32(slot))
        return self.without(*leaving)._with(dataclasses.replace(prefix, slot=int(on_host(place)))), cache, True

    def adopt(self, cache: Tree, slot: int, tokens: Tokens) -> PrefixStore:
        """Make a request a prefix without copying it, such as one that ``insert`` brought back from host memory.

        The arguments and errors are those of ``keep``. The slot is the store's from then on, and the cache as it was.

        Raises:
          ValueError: as ``keep``; or, on the request's shard, the store is full or has this prefix.
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

    def make_room[Cache](self, cache: Cache, blocks: int, shard: int | None = None) -> tuple[PrefixStore, Cache, bool]:
        """Let prefixes give way until so many blocks are free: before ``prepare_forward``, which takes them.

        They are to be free on ``shard``, or on each if it is None. Only prefixes go whose blocks come free by that, and
        none if this is not enough. The cache is donated.

        Returns:
          (store, cache, ok). If ok is False, then both are unchanged.

        Raises:
          ValueError: there is no such shard, or a prefix was released by another than this store.
        """
        blocks, shards = integer("blocks", blocks, 0), self._shards_of("make_room", shard)
        seen = self._look("make_room", cache, None)
        lacking = [one for one in shards if seen.free_blocks[one] < blocks]
        if not lacking:
            return self, cache, True
        (held, readers), leaving = self._blocks(cache), []
        for one in lacking:
            able, free = self._unused(seen, one), int(seen.free_blocks[one])
            while free < blocks:
                # One of which longer prefixes read everything frees nothing, until they go.
                first = next((prefix for prefix in able if np.any(readers[held[prefix]] == 1)), None)
                if first is None:
                    return self, cache, False
                able.remove(first)
                leaving.append(first)
                readers[held[first]] -= 1
                free += int(np.sum(readers[held[first]] == 0))
        store, cache = self.drop(cache, *leaving)
        return store, cache, True

    def verify(self, cache: KVCache) -> list[str]:
        """Check a cache as ``d4.verify`` does, and that it has each prefix: a sentence for each fault."""
        found = verify(cache)
        tables: Tables = on_host(cache.tables)
        slots = collections.Counter(prefix.slot for prefix in self.prefixes)
        found += [f"slot {slot}: {times} prefixes are in it" for slot, times in slots.items() if times > 1]
        for key, prefix in self.index.items():
            where = f"slot {prefix.slot}: the store has a prefix of {prefix.length} tokens in it"
            if not tables.admitted[prefix.slot]:
                found.append(f"{where}, but it holds no request")
            elif tables.seq_lens[prefix.slot] != prefix.length:
                found.append(f"{where}, but it holds {tables.seq_lens[prefix.slot]} tokens")
            if key != self._key(prefix) or prefix.hashes != hashes_of(prefix.tokens, self.plan.cfg.block_tokens):
                found.append(f"{where}, under a hash that is not that of its tokens")
        return found

    def describe(self, cache: Tree) -> PrefixReport:
        """Report what the prefixes hold. ``d4.describe`` counts them among the requests."""
        seen = self._look("describe", cache, None)
        held, readers = self._blocks(cache)
        blocks, times = np.unique(np.concatenate([np.zeros(0, np.int32), *held.values()]), return_counts=True)
        return PrefixReport(
            prefixes=self.prefixes,
            is_used=seen.is_used,
            capacity=self.capacity * self.shards,
            state_bytes=len(self.index) * self.plan.bytes_per_request,
            blocks=blocks.size,
            own_blocks=int(np.sum(times == readers[blocks])),
            block_bytes=self.plan.bytes_per_block,
        )

    # ---- within ------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> int:
        """Slots of a shard."""
        return self.plan.max_requests // self.shards

    def _shard(self, slot: int) -> int:
        return slot // self._slots

    def _shards_of(self, name: str, shard: int | None) -> Sequence[int]:
        """The shard that a call names, or all of them."""
        if shard is not None and integer("shard", shard, 0) >= self.shards:
            raise ValueError(f"{name}: shard must be in [0, {self.shards}), got {shard}")
        return range(self.shards) if shard is None else [shard]

    def _is_full(self, shard: int) -> bool:
        return sum(one == shard for one, _ in self.index) >= self.capacity

    def _unused(self, seen: Seen, shard: int) -> list[Prefix]:
        """The prefixes of a shard that could give way."""
        used = zip(self.prefixes, seen.is_used, strict=True)
        return [one for one, is_used in used if not is_used and self._shard(one.slot) == shard]

    def _blocks(self, cache: Tree) -> tuple[dict[Prefix, np.ndarray], np.ndarray]:
        """The blocks of each prefix, as numbers among those of all shards, and how many requests read each block."""
        tables: Tables = first_cache(cache).tables
        rows, readers = on_host((blocks_of(tables, self._slots_of(self.prefixes)), tables.block_refs))
        return {one: row[row >= 0] for one, row in zip(self.prefixes, rows, strict=False)}, np.array(readers)

    def _key(self, prefix: Prefix) -> tuple[int, int]:
        return self._shard(prefix.slot), prefix.hashes[-1]

    def _of(self, index: dict[tuple[int, int], Prefix]) -> PrefixStore:
        return dataclasses.replace(self, index=MappingProxyType(index))

    def _with(self, prefix: Prefix) -> PrefixStore:
        """The store in which a prefix, new or not, is the last one used."""
        key = self._key(prefix)
        return self._of({k: v for k, v in self.index.items() if k != key} | {key: prefix})

    def _prefix(self, name: str, slot: int, tokens: Tokens) -> Prefix:
        read, block = read_tokens(name, tokens), self.plan.cfg.block_tokens
        if not read.size or read.size % block:
            raise ValueError(f"{name}: a prefix is whole blocks of {block} tokens, got {read.size} tokens")
        read.flags.writeable = False
        return Prefix(slot=integer("slot", slot), tokens=read, hashes=hashes_of(read, block))

    def _slots_of(self, prefixes: Sequence[Prefix]) -> np.ndarray:
        """The slots of some prefixes, int32 [capacity of all shards]; -1 = none."""
        slots = [prefix.slot for prefix in prefixes]
        return np.asarray(slots + [-1] * (self.capacity * self.shards - len(slots)), np.int32)

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
        return seen, prefix, self.index.get(self._key(prefix))

    def _look(self, name: str, cache: Tree, slot: int | None) -> Seen:
        """Read what the host must know of the tables. ValueError if they are not those that the store belongs to."""
        first = first_cache(cache)
        check_cache(name, first)
        check_concrete(name, first, "the index is on the host, so call it on a cache that has come back")
        shards = first.tables.num_free.size
        if (first.plan, shards) != (self.plan, self.shards):
            given = f"the cache of {first.plan!r} with {shards=}"
            raise ValueError(f"{name}: the store is of {self.plan!r} with shards={self.shards}, {given}")
        if shards > 1 and first.mesh is None:
            raise ValueError(
                f"{name}: this cache of {shards} shards does not know its mesh, as those of model.init_caches do: fork "
                "in your jax.shard_map, and note what that kept by noting"
            )
        if slot is not None and not 0 <= integer("slot", slot) < self.plan.max_requests:
            raise ValueError(f"{name}: slot {slot} is out of range, the cache has {self.plan.max_requests}")
        prefixes, block = self.prefixes, self.plan.cfg.block_tokens
        slots, last = self._slots_of(prefixes), np.zeros(self.capacity * self.shards, np.int32)
        last[: len(prefixes)] = [prefix.length // block - 1 for prefix in prefixes]
        where = np.int32(-1 if slot is None else slot)  # -1: no slot is apart from the others
        found: Seen = on_host(look(first.tables, slots, last, where))
        for i, prefix in enumerate(prefixes):
            if found.lengths[i] != prefix.length:
                raise ValueError(
                    f"{name}: slot {prefix.slot} no longer holds the prefix of {prefix.length} tokens: it was released "
                    "or used by another than this store"
                )
        count = len(prefixes)
        used, shares = (tuple(map(bool, flags[:count])) for flags in (found.is_used, found.shares))
        return dataclasses.replace(found, is_used=used, shares=shares)
