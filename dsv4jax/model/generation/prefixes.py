"""Prefixes in the loop that generates texts: looked up when a text gets a row, and kept while its prompt is stored.

Over a mesh, each shard of requests has prefixes of its own. Its prompts are stored one after the other, so that each
finds what those before it have left, and beside those of the other shards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.shards import OF_ROWS, on_host
from dsv4jax.model.generation.held import Shards
from dsv4jax.model.generation.loop import pending
from dsv4jax.model.generation.prefill import SHORT, Prefill
from dsv4jax.model.generation.seats import asked_blocks, fill, vacate
from dsv4jax.model.generation.state import Loop, loop_specs, of_each_shard
from dsv4jax.requests.prefixes import PrefixStore


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrival:
    """A row whose text lacks tokens. Row, slot and place are numbers among those of all shards."""

    row: int
    slot: int
    place: int  # of its text in the queue
    stored: int  # tokens
    most: int  # tokens that a pass can store: the last one of a text is never stored

    @classmethod
    def of(cls, loop: Loop, shards: Shards) -> list[list[_Arrival]]:
        """Return those of each shard, in the order of their texts."""
        lacking, lengths, slots, text = on_host((pending(loop), loop.caches.model.seq_lens, loop.slots, loop.text))
        shard = np.arange(slots.size) // shards.rows
        slots, places = (
            slots + shard * shards.plan.max_requests,
            text + shard * (loop.texts.lengths.size // shards.count),
        )
        found: list[list[_Arrival]] = [[] for _ in range(shards.count)]
        for row in np.argsort(places, kind="stable").tolist():
            if lacking[row]:
                slot, stored = int(slots[row]), int(lengths[slots[row]])
                most = stored + int(lacking[row]) - 1
                found[shard[row]].append(cls(row, slot, int(places[row]), stored, most))
        return found


@dataclasses.dataclass(slots=True)
class PrefixedPrompts:
    """The prompts of a call, by their places in the queues of texts, and the store that serves them."""

    store: PrefixStore
    prompts: dict[int, np.ndarray]
    cuts: dict[int, list[int]]  # lengths at which each is kept

    @classmethod
    def of(cls, store: PrefixStore, prompts: list[np.ndarray], places: list[int]) -> PrefixedPrompts:
        cuts = store.cuts(prompts)
        return cls(store, dict(zip(places, prompts, strict=True)), dict(zip(places, cuts, strict=True)))

    def seat(self, loop: Loop) -> Loop:
        """Do what ``seats.seat`` does. Prefixes give way before texts wait for blocks, and texts share their blocks."""
        return fill(self._with_room(vacate(self._with_room(loop))))

    def begin(self, loop: Loop, prefill: Prefill) -> Loop:
        """Give new texts what is kept of them, one after the other; store and keep prompts up to their last cuts.

        Of prompts that lack few tokens, which rows store together, nothing new is kept.

        Args:
          loop: after ``seat``. It is donated.
          prefill: stores the tokens between two cuts.
        """
        for side_by_side in itertools.zip_longest(*_Arrival.of(loop, prefill.shards)):
            loop = self._begin(loop, prefill, [one for one in side_by_side if one is not None])
        return loop

    def _begin(self, loop: Loop, prefill: Prefill, arrivals: Iterable[_Arrival]) -> Loop:
        """Do what ``begin`` does for texts of different shards."""
        stops: dict[_Arrival, list[int]] = {}
        for one in arrivals:
            stored = one.stored
            if not stored:
                self.store, caches, stored = self.store.start(loop.caches, one.slot, self.prompts[one.place])
                loop = dataclasses.replace(loop, caches=caches)
            if one.most - stored > SHORT:
                stops[one] = [stored, *(cut for cut in self.cuts[one.place] if cut > stored)]
        for turn in itertools.zip_longest(*map(itertools.pairwise, stops.values())):
            spans = {one: span for one, span in zip(stops, turn, strict=True) if span is not None}
            loop = prefill.store_rows(loop, {one.row: span for one, span in spans.items()})
            for one, (_, cut) in spans.items():
                self.store, caches, _ = self.store.keep(loop.caches, one.slot, self.prompts[one.place][:cut])
                loop = dataclasses.replace(loop, caches=caches)
        return loop

    def _with_room(self, loop: Loop) -> Loop:
        """Let prefixes give way for the texts at work, and for as many that wait as that helps."""
        plan = loop.caches.model.plan
        before = None
        while before is not self.store:  # what waiting texts share changes with the store
            before, shared = self.store, np.zeros(loop.texts.lengths.size, np.int32)
            for place, prompt in self.prompts.items():
                shard = place // (shared.size // before.shards)
                if plan.min_ratio and (found := before.find(prompt, shard)) is not None:
                    shared[place] = found.length // plan.cfg.block_tokens
            loop, wanted = _sharing(loop, shared)
            for shard, counts in enumerate(on_host(wanted).reshape(before.shards, -1).tolist()):
                for blocks in sorted(set(counts), reverse=True):
                    self.store, caches, ok = self.store.make_room(loop.caches, blocks, shard)
                    loop = dataclasses.replace(loop, caches=caches)
                    if ok:
                        break
        return loop


@functools.partial(jax.jit, donate_argnames="loop")
def _sharing(loop: Loop, shared: jax.Array | np.ndarray) -> tuple[Loop, jax.Array]:
    """Note how many blocks of a prefix each text will share, int32 [texts].

    Returns (loop, ``_wanted_blocks`` of each shard). The loop is donated.
    """

    def step(loop: Loop, shared: jax.Array) -> tuple[Loop, jax.Array]:
        loop = dataclasses.replace(loop, shared=shared)
        return loop, _wanted_blocks(loop)

    return of_each_shard(step, loop, (shared,), (OF_ROWS,), (loop_specs(loop), OF_ROWS))


def _wanted_blocks(loop: Loop) -> jax.Array:
    """Blocks that must be free for the next pass with 0, 1, .. more texts at work, int32 [B + 1].

    Texts count that could have a row if all complete ones leave.
    """
    needed, lacking = asked_blocks(loop)
    rows, turn = loop.slots.size, jnp.cumsum(loop.waiting, dtype=jnp.int32)
    counts = loop.waiting & (turn <= rows - jnp.sum(loop.at_work, dtype=jnp.int32))
    more = jnp.arange(rows + 1, dtype=jnp.int32)[:, None]
    asked = jnp.where(counts[None] & (turn[None] <= more), needed[None], 0)
    return jnp.sum(lacking) + jnp.sum(asked, axis=1, dtype=jnp.int32)
