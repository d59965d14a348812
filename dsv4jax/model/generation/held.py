"""From one call of a generator to the next: texts that the caches still hold, and prompts that go on from them.

A prompt that begins with such a text goes on from it at its shard. Of the others, each waits at the shard that keeps
the longest prefix of it, while that has a row for it, or else at the one that has most blocks left. Texts that have not
been used for longest give way to them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.shards import on_host
from dsv4jax.cache.tables import blocks_for
from dsv4jax.model.caches import Caches
from dsv4jax.model.generation.state import Loop
from dsv4jax.plan import CachePlan
from dsv4jax.requests.prefixes import PrefixStore


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldText:
    """A text that a slot of the caches still holds."""

    slot: int  # among those of all shards
    tokens: np.ndarray  # int [stored]

    def is_begin_of(self, prompt: np.ndarray) -> bool:
        count = self.tokens.size
        return count < prompt.size and np.array_equal(self.tokens, prompt[:count])


type Held = tuple[HeldText, ...]  # in the order of their last use


def going_on(held: Held, prompts: Sequence[np.ndarray]) -> dict[int, HeldText]:
    """Return, by number of the prompt, the longest text that each begins with. No text is for two of them."""
    found: dict[int, HeldText] = {}
    for i, prompt in enumerate(prompts):
        begins = [one for one in held if one not in found.values() and one.is_begin_of(prompt)]
        if begins:
            found[i] = max(begins, key=lambda one: one.tokens.size)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The shards of requests that caches are divided into, all of the same size. On one device there is one."""

    count: int
    plan: CachePlan  # of the cache of each
    rows: int  # of each

    def of(self, text: HeldText) -> int:
        return text.slot // self.plan.max_requests

    def queues(
        self,
        prompts: Sequence[np.ndarray],
        known: dict[int, HeldText],
        caches: Caches,
        lengths: Sequence[int],
        store: PrefixStore | None,
    ) -> list[list[int]]:
        """Return the numbers of the prompts that wait at each shard. Those that go on from a text wait at its shard.

        The others wait, in turn, where the store has the longest prefix of theirs and a row is left; of such shards,
        where most blocks are left; of such, where prompts have the fewest tokens.
        """
        if self.count == 1:
            return [list(range(len(prompts)))]
        left, tokens = on_host(caches.model.tables.num_free).tolist(), [0] * self.count
        shards = {i: self.of(one) for i, one in known.items()}

        def key(i: int, shard: int) -> tuple[int, int, int]:
            # Else one shard would compute all prompts with a popular prefix, one after the other.
            has_row = list(shards.values()).count(shard) < self.rows
            found = store.find(prompts[i], shard) if store is not None and has_row else None
            return 0 if found is None else found.length, left[shard], -tokens[shard]

        for i in sorted(range(len(prompts)), key=lambda i: i not in known):
            if i not in known:
                shards[i] = max(range(self.count), key=functools.partial(key, i))
            left[shards[i]] -= self._blocks(lengths[i])
            tokens[shards[i]] += prompts[i].size
        return [[i for i in range(len(prompts)) if shards[i] == shard] for shard in range(self.count)]

    def _blocks(self, length: int) -> int:
        """Blocks of a text that reaches so many tokens, of which the last one is never stored."""
        return int(blocks_for(self.plan, length - 1))

    def staying(self, held: Held, caches: Caches, queues: list[list[int]], lengths: Sequence[int]) -> Held:
        """Return the texts beside which prompts of each shard have room; ``lengths`` are the tokens they may reach."""
        if not held:
            return held
        blocks_of = on_host(caches.model.tables.block_lens)
        staying: list[HeldText] = list(held)
        for shard, queue in enumerate(queues):
            stay = [one for one in held if self.of(one) == shard]
            blocks = sum(self._blocks(lengths[i]) for i in queue)
            while stay and (
                len(queue) + len(stay) > self.rows
                or blocks + sum(int(blocks_of[one.slot]) for one in stay) > self.plan.num_blocks
            ):
                staying.remove(stay.pop(0))
        return tuple(staying)

    def released(self, caches: Caches, texts: Iterable[HeldText]) -> Caches:
        """Return caches without some texts. They are donated if there are any."""
        slots = np.full(self.count * self.plan.max_requests, -1, np.int32)
        for one in texts:
            slots[one.slot] = one.slot % self.plan.max_requests
        return caches.release(jax.device_put(slots)) if (slots >= 0).any() else caches

    def seated(self, loop: Loop, places: Iterable[tuple[HeldText, int]]) -> Loop:
        """Give a row to each of some texts that caches hold, where it goes on as the text at a place of the queue.

        Places are numbers among those of all shards, or -1 for the last one of the text's own.
        """
        slots, text = np.full(loop.slots.size, -1, np.int32), np.zeros(loop.slots.size, np.int32)
        free = [iter(range(shard * self.rows, (shard + 1) * self.rows)) for shard in range(self.count)]
        for one, place in places:
            row = next(free[self.of(one)])
            slots[row], text[row] = one.slot % self.plan.max_requests, place % (loop.texts.lengths.size // self.count)
        slots, text = jax.device_put((slots, text))
        return dataclasses.replace(loop, slots=slots, text=text)

    def held_after(self, loop: Loop, before: Held, places: Sequence[int]) -> Held:
        """Return what caches hold after a call: of ``before`` what is left, then the texts of the call's places."""
        shard = np.arange(loop.slots.size, dtype=np.int32) // self.rows  # of each row
        given = loop.text, shard * (loop.texts.lengths.size // self.count), loop.texts.tokens
        text, tokens, slots, lengths = on_host((*_texts_of_rows(*given), loop.slots, loop.caches.model.seq_lens))
        rows = np.flatnonzero(slots >= 0)
        at = shard * self.plan.max_requests + slots  # of each row the slot among those of all shards
        is_new = np.isin(text, places)
        old = set(at[rows[~is_new[rows]]].tolist())
        new = [HeldText(int(at[row]), tokens[row, : lengths[at[row]]]) for row in rows if is_new[row]]
        return (*(one for one in before if one.slot in old), *new)


@jax.jit
def _texts_of_rows(text: jax.Array, first: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the place of each row's text among those of all shards int32 [B], its tokens int32 [B, longest]).

    ``text`` are places within a shard, and ``first`` the first one of each row's shard, int32 [B].
    """
    text = text + first
    return text, jnp.take(tokens, text, axis=0)
