"""Prefixes in the loop that generates texts: looked up when a text gets a row, and kept while its prompt is stored."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.model.generation.prefill import SHORT, Prefill
from dsv4jax.model.generation.seats import asked_blocks, fill, vacate
from dsv4jax.model.generation.state import Loop
from dsv4jax.requests.prefixes import PrefixStore


@dataclasses.dataclass(slots=True)
class PrefixedPrompts:
    """The prompts of a call, and the store that serves them. Text i of the loop begins with prompt i."""

    store: PrefixStore
    prompts: list[np.ndarray]
    cuts: list[list[int]]  # lengths at which each is kept

    @classmethod
    def of(cls, store: PrefixStore, prompts: list[np.ndarray]) -> PrefixedPrompts:
        return cls(store, prompts, store.cuts(prompts))

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
        pending, lengths = jax.device_get((loop.pending, loop.caches.model.seq_lens))
        slots, text = jax.device_get((loop.slots, loop.text))
        for row in np.argsort(text, kind="stable").tolist():
            if not pending[row]:
                continue
            slot, prompt, length = int(slots[row]), self.prompts[text[row]], int(lengths[slots[row]])
            whole = length + int(pending[row]) - 1  # the last token of a text is never stored
            if not length:
                self.store, caches, length = self.store.start(loop.caches, slot, prompt)
                loop = dataclasses.replace(loop, caches=caches)
            if whole - length <= SHORT:
                continue
            for cut in [cut for cut in self.cuts[text[row]] if cut > length]:
                loop = prefill.store_row(loop, row, length, cut)
                self.store, caches, _ = self.store.keep(loop.caches, slot, prompt[:cut])
                loop, length = dataclasses.replace(loop, caches=caches), cut
        return loop

    def _with_room(self, loop: Loop) -> Loop:
        """Let prefixes give way for the texts at work, and for as many that wait as that helps."""
        plan = loop.caches.model.plan
        before = None
        while before is not self.store:  # what waiting texts share changes with the store
            before, shared = self.store, np.zeros(loop.texts.lengths.size, np.int32)
            for i, prompt in enumerate(self.prompts):
                if plan.min_ratio and (found := before.find(prompt)) is not None:
                    shared[i] = found.length // plan.cfg.block_tokens
            loop = dataclasses.replace(loop, shared=jnp.asarray(shared))
            for blocks in sorted(set(jax.device_get(_wanted_blocks(loop)).tolist()), reverse=True):
                self.store, caches, ok = self.store.make_room(loop.caches, blocks)
                loop = dataclasses.replace(loop, caches=caches)
                if ok:
                    break
        return loop


@jax.jit
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
