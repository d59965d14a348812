"""Generating texts: prompts in, new tokens out. ``loop`` has the programs that do it.

The programs depend on the number of rows, of tokens of context and of texts that wait, all of which are rounded up to
powers of two; so a few programs serve all prompts. The loop is left only to read what was made, and to store prompts.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.shards import DATA, OF_ROWS
from dsv4jax.cache.tables import blocks_for
from dsv4jax.checks import check_type, integer
from dsv4jax.model.caches import Caches, empty_caches, init_caches
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.drafting import JudgedDraft
from dsv4jax.model.inside.choices import Choices, no_choices
from dsv4jax.model.inside.devices import check_meshes
from dsv4jax.model.loop import EVERYTHING, Loop, Texts, begin, of_each_shard, run, seat, store
from dsv4jax.model.params import ModelParams
from dsv4jax.model.prefixes import Prompts as KeptPrompts
from dsv4jax.model.sampling import Sampling
from dsv4jax.plan import CachePlan, shard_plan
from dsv4jax.requests.prefixes import Prefix, PrefixStore

# Passes of the loop from one look at what it made to the next: of a stream, for reports of progress, otherwise.
STREAMED, REPORTED, UNSEEN = 1, 8, 64
# Tokens of prompts that a pass stores: of each row, or of a row alone that has more than those.
SHORT, LONG, LONGEST = 128, 1024, 4096
# The least sizes, so that most calls share a compiled program.
CONTEXT = 1024  # tokens of context
TEXTS = 32  # in the queue
STOPS = 4  # stop tokens, in multiples of it
ROWS = 16  # texts that ``generate`` works on at a time, unless caches are given

type Prompt = Sequence[int] | jax.Array | np.ndarray
type Prompts = Sequence[Prompt] | jax.Array | np.ndarray
type Rounds = collections.abc.Generator[list[list[int]]]  # new tokens of each prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was made of prompts."""

    tokens: list[list[int]]  # new tokens of each prompt, a stop token included
    passes: int  # that sampled
    stored: int  # tokens that were stored before those passes: of prompts, but for what a cache still held
    drafted: int  # drafts that the model judged
    accepted: int  # drafts that became part of a text
    seconds: float  # without compilation
    # Of each new token, the draft that was judged in its place, or None; None of all if no drafts are made.
    drafts: list[list[JudgedDraft | None]] | None = None
    choices: list[Choices] | None = None  # of each text but for its last token [.., 1, tokens - 1, ..], if asked for


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A text that a slot of the cache still holds."""

    slot: int  # among those of all shards
    tokens: np.ndarray  # int [stored]

    def is_begin_of(self, prompt: np.ndarray) -> bool:
        count = self.tokens.size
        return count < prompt.size and np.array_equal(self.tokens, prompt[:count])


class Generator:
    """Caches of a model that take prompts again and again, and the compiled loop that continues them.

    The texts of the last calls stay in the cache, each until its row or its blocks are needed, those first that have
    not been used for longest. When a prompt begins with such a text, but for its last token, which is never stored,
    only the rest of the prompt is stored: a chat that grows is not computed again.

    With ``prefixes``, beginnings of prompts are kept as well, and prompts that begin alike are computed once: see
    ``d4.requests.PrefixStore``. Prefixes give way before a text has to wait for blocks.

    Texts wait until there is a row and blocks for what they have. If blocks run out later on, the last texts of those
    at work wait again, and are stored anew when there is room. What is drawn does not depend on it, but with drafts at
    a temperature above 0, where only its distribution does not.

    Over a mesh, each shard of requests has its share of the rows and of the blocks. A prompt goes to the shard that
    holds its beginning, or to one that has the fewest tokens to store.

    Generators of equal sizes share their compiled programs. Calls follow each other: one is over before the next.

    Attributes:
      rows: texts that are worked on at a time.
      context: the most tokens of a text.
      drafts: tokens that are guessed per pass.
      prefixes: the store of prefixes, as of the last call that is over; None if none are kept.
      result: what the last call made; of a stream, as far as it got.
    """

    def __init__(
        self,
        params: ModelParams,
        rows: int = 1,
        context: int = CONTEXT,
        drafts: int = 0,
        *,
        caches: Caches | None = None,
        prefixes: int | PrefixStore = 0,
        **formats: Any,
    ) -> None:
        """Make empty caches. Nothing is compiled before the first prompt.

        Args:
          params: the model's weights.
          rows: texts to work on at a time, rounded up to a power of two on each shard of requests.
          context: tokens that each of them can hold, rounded up to a power of two of at least ``CONTEXT``.
          drafts: tokens to guess per pass with the model's own draft block. They change the speed, not the
            distribution; at temperature 0 not even the tokens.
          caches: caches to use, which are donated, in place of some of these sizes. They are empty, but for the
            prefixes of a store that is given.
          prefixes: the most beginnings of prompts to keep, each in a slot beside those of the rows; or the store of
            what the caches hold. On one device.
          formats: as for ``init_caches``, which makes caches if none are given.

        Raises:
          ValueError: a size is not positive, the model or the caches cannot make so many drafts, the caches are not
            empty, or as ``init_caches``.
        """
        check_type("params", params, ModelParams)
        self._params, self.drafts = params, integer("drafts", drafts, 0)
        if self.drafts and params.drafts is None:
            raise ValueError("this model cannot make drafts: its checkpoint holds no block for them")
        most = prefixes.capacity if isinstance(prefixes, PrefixStore) else integer("prefixes", prefixes, 0)
        if most and params.mesh is not None:
            raise ValueError(f"prefixes={most} are kept on one device, and the model is on several")
        if caches is None:
            sizes = integer("rows", rows, 1), integer("context", context, 1), drafts, most
            caches = caches_of(params.cfg, *sizes, mesh=params.mesh, **formats)
        elif formats:
            raise ValueError(f"caches are given, and have formats: leave out {list(formats)}")
        _check_caches(caches, self.drafts, params, prefixes.prefixes if isinstance(prefixes, PrefixStore) else ())
        self.prefixes = prefixes if isinstance(prefixes, PrefixStore) else None
        if self.prefixes is None and most:
            self.prefixes = PrefixStore(caches.model.plan, most)
        if self.prefixes is not None and self.prefixes.plan != caches.model.plan:
            raise ValueError(f"prefixes are of {self.prefixes.plan!r}, the caches of {caches.model.plan!r}")
        self._caches: Caches | None = caches
        self._plans = caches.model.plan, caches.drafts and caches.drafts.plan
        self._shards = 1 if params.mesh is None else params.mesh.shape[DATA]
        self._of_shard = self._plans[0] if params.mesh is None else shard_plan(self._plans[0], params.mesh, DATA)
        self._kept: list[_Kept] = []  # in the order of their last use
        # Chunks of ``store``, and None for ``run``; with whether they record choices.
        self._compiled: set[tuple[int | None, bool]] = set()
        self._is_busy = False
        self.result = Generated(tokens=[], passes=0, stored=0, drafted=0, accepted=0, seconds=0.0)

    @property
    def rows(self) -> int:
        return self._plans[0].max_requests - (self.prefixes.capacity if self.prefixes else 0)

    @property
    def context(self) -> int:
        return self._plans[0].max_context

    def take_caches(self) -> Caches:
        """Return the caches, which hold the prefixes of ``prefixes`` and nothing else, to be saved or used anew.

        The next call makes empty ones, and begins with an empty store.

        Raises:
          RuntimeError: a stream is not over.
        """
        self._check_idle()
        caches, self._caches = self._caches or empty_caches(*self._plans, self._params.mesh), None
        slots, per_shard = np.full(self._plans[0].max_requests, -1, np.int32), self._of_shard.max_requests
        for one in self._kept:
            slots[one.slot] = one.slot % per_shard
        self._forget()
        return caches.release(jnp.asarray(slots))

    def _forget(self) -> None:
        """Note that the caches are gone."""
        self._kept = []
        if self.prefixes is not None:
            self.prefixes = self.prefixes.without(*self.prefixes.prefixes)

    def _check_idle(self) -> None:
        if self._is_busy:
            raise RuntimeError("this generator's last stream is not over: exhaust it, or call its close()")

    def stream(
        self,
        prompt: Prompt,
        max_new: int | None = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> collections.abc.Generator[int]:
        """Continue a prompt, and yield each token once the pass that made it is over.

        A stream that is left early, by ``break`` or ``close``, keeps what it has stored.

        Args:
          prompt: int [n], token ids.
          max_new: the most tokens to add; as many as fit if None.
          sampling, stop_tokens: as for ``generate``.

        Raises:
          ValueError: as ``generate``.
          RuntimeError: an earlier stream is not over when the first token is asked for.
        """
        texts = read_prompts([prompt], self._params.cfg.vocab_size)
        if max_new is None:
            max_new = max(1, _most_tokens(self._of_shard) - texts[0].size)
        rounds = self._rounds(texts, max_new, sampling, stop_tokens, STREAMED)
        return _first_texts(rounds)

    def generate(
        self,
        prompts: Prompts,
        max_new: int,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        on_progress: Callable[[list[list[int]]], None] | None = None,
        *,
        choices: bool = False,
    ) -> Generated:
        """Continue prompts, of which there may be more than rows. The arguments are those of the function ``generate``.

        With ``choices``, the result has the experts and entries that the passes used for each text, but for its last
        token, which is never stored. All prompts are then stored from their beginnings, whatever the caches hold.

        Raises:
          ValueError: as the function.
          RuntimeError: a stream is not over.
        """
        texts = read_prompts(prompts, self._params.cfg.vocab_size)
        tokens: list[list[int]] = [[] for _ in texts]
        passes = REPORTED if on_progress else UNSEEN
        with contextlib.closing(self._rounds(texts, max_new, sampling, stop_tokens, passes, choices)) as rounds:
            for new in rounds:
                for one, more in zip(tokens, new, strict=True):
                    one += more
                if on_progress is not None:
                    on_progress([list(one) for one in tokens])
        return self.result

    def _rounds(
        self,
        prompts: list[np.ndarray],
        max_new: int,
        sampling: Sampling | None,
        stop_tokens: Sequence[int] | None,
        passes: int,
        records: bool = False,
    ) -> Rounds:
        """Check the arguments of a call; then, so many passes at a time, yield the new tokens of each prompt."""
        max_new = integer("max_new", max_new, 1)
        _check_room(prompts, max_new, self._of_shard)
        if sampling is None:
            sampling = Sampling.of()
        elif not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, such as Sampling.of(temperature=0.7), got {sampling!r}")
        stops = _stops(self._params.cfg.stop_tokens if stop_tokens is None else stop_tokens)
        go_on = functools.partial(run, sampling=sampling, stop_tokens=stops)
        return self._run(prompts, max_new, go_on, passes, records)

    def _run(
        self, prompts: list[np.ndarray], max_new: int, go_on: functools.partial[Loop], passes: int, records: bool
    ) -> Rounds:
        self._check_idle()
        made: list[list[int]] = [[] for _ in prompts]
        (loop, places), seconds = self._begin(prompts, max_new, records), 0.0
        self._is_busy = True
        try:
            lengths, goes_on, needs_seats = loop.texts.lengths + 0, True, True
            self._compile(loop, [prompt.size for prompt in prompts], go_on)
            kept = KeptPrompts.of(self.prefixes, prompts) if self.prefixes and not records else None
            jax.block_until_ready(loop)
            while goes_on:
                began = time.perf_counter()
                if needs_seats:
                    loop = seat(loop) if kept is None else kept.begin(kept.seat(loop), SHORT, self._feed)
                    self.prefixes = self.prefixes if kept is None else kept.store
                    for rows, chunk in self._chunks(jax.device_get(_pending(loop)).reshape(self._shards, -1)):
                        loop = store(self._params, loop, jnp.asarray(rows, jnp.int32), EVERYTHING, chunk=chunk)
                loop = go_on(self._params, loop, passes=jnp.int32(passes))
                tokens, after, *flags = _look(loop, lengths, passes * (self.drafts + 1))
                tokens, counts, *flags = jax.device_get((tokens, after - lengths, *flags))
                goes_on, needs_seats = map(np.any, flags)
                lengths = after
                seconds += time.perf_counter() - began
                new = [tokens[place, : counts[place]].tolist() for place in places]
                for one, more in zip(made, new, strict=True):
                    one += more
                yield new
            if not np.all(jax.device_get(loop.ok)):
                raise RuntimeError("no text can go on, although each has room when it is alone: an error of dsv4jax")
        finally:
            self._is_busy = False
            self._end(loop, prompts, made, places, seconds)

    def _feed(self, loop: Loop, row: int, length: int, until: int) -> Loop:
        """Store a text's tokens from ``length`` to ``until``, of a row alone."""
        chunk = self._chunk(until - length)
        for _ in range(length, until, chunk):
            loop = store(self._params, loop, jnp.asarray([row], jnp.int32), np.int32(until), chunk=chunk)
        return loop

    def _chunk(self, most: int) -> int:
        """Tokens of a pass of a row alone, if rows lack up to so many."""
        return min(LONG if most <= LONG else LONGEST, self.context)

    def _chunks(self, pending: Sequence[Iterable[int]]) -> list[tuple[list[int], int]]:
        """Return the passes that store what rows of each shard lack, but for their last tokens.

        Each is (rows, as many of each shard and -1 for none; tokens of each).
        """
        lacking = [[int(count) - 1 for count in of_shard] for of_shard in pending]
        chunk = self._chunk(max(itertools.chain(*lacking)))
        turns = [
            [row for row, count in enumerate(of_shard) if count > SHORT for _ in range(0, count, chunk)]
            for of_shard in lacking
        ]
        long = [(list(rows), chunk) for rows in itertools.zip_longest(*turns, fillvalue=-1)]
        is_short = any(0 < count <= SHORT for count in itertools.chain(*lacking))
        all_rows = list(range(self.rows // self._shards)) * self._shards
        return long + [(all_rows, min(SHORT, self.context))] * is_short

    def _compile(self, loop: Loop, sizes: Iterable[int], go_on: functools.partial[Loop]) -> None:
        """Compile, at once, the programs that prompts of so many tokens need; without it, their first calls do."""
        chunks = {
            chunk: jnp.asarray(rows, jnp.int32) for rows, chunk in self._chunks([[*sizes], *[[]] * (self._shards - 1)])
        }
        records = loop.choices is not None
        lowered = [
            store.lower(self._params, loop, rows, EVERYTHING, chunk=chunk)
            for chunk, rows in chunks.items()
            if (chunk, records) not in self._compiled
        ]
        if (None, records) not in self._compiled:
            lowered.append(run.lower(self._params, loop, passes=jnp.int32(1), **go_on.keywords))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda program: program.compile(), lowered))
        self._compiled |= {(program, records) for program in (None, *chunks)}

    def _begin(self, prompts: list[np.ndarray], max_new: int, records: bool) -> tuple[Loop, list[int]]:
        """Return the state of the loop in which prompts wait, or go on from what the cache holds of them.

        The second result is the place of each prompt in its queue. If the loop records choices none go on, because
        those of what the cache holds are not known.
        """
        caches, self._caches = self._caches or empty_caches(*self._plans, self._params.mesh), None  # the loop's now
        others, self._kept = self._kept, []
        going_on: dict[int, _Kept] = {}
        for i, prompt in enumerate(prompts):
            if found := [one for one in others if not records and one.is_begin_of(prompt)]:
                going_on[i] = max(found, key=lambda one: one.tokens.size)
                others.remove(going_on[i])
        plan, rows, per_shard = self._of_shard, self.rows // self._shards, self._of_shard.max_requests
        held = jax.device_get(caches.model.tables.block_lens)
        queues = self._assigned(prompts, {i: one.slot // per_shard for i, one in going_on.items()})
        released = np.full(self._plans[0].max_requests, -1, np.int32)
        for shard, queue in enumerate(queues):
            kept = [one for one in others if one.slot // per_shard == shard]
            blocks = sum(int(blocks_for(plan, prompts[i].size + max_new - 1)) for i in queue)
            while kept and (
                len(queue) + len(kept) > rows or blocks + sum(int(held[one.slot]) for one in kept) > plan.num_blocks
            ):
                others.remove(gone := kept.pop(0))
                released[gone.slot] = gone.slot % per_shard
        if (released >= 0).any():
            caches = caches.release(jnp.asarray(released))
        self._kept = others
        texts, places = _queue(prompts, queues, max_new, self.context)
        cfg, room, longest = self._params.cfg, None, max(map(len, queues))
        if records:
            room = no_choices(_power_of_two(longest) * self._shards, self.context, plan, cfg)
        loop = begin(caches, texts, cfg.vocab_size, self.drafts, room, self.rows)
        slots, text = np.full(self.rows, -1, np.int32), np.zeros(self.rows, np.int32)
        size = texts.lengths.size // self._shards
        # The last text of a queue is empty, hence complete.
        seats = [(one, places[i] % size) for i, one in going_on.items()] + [(one, size - 1) for one in others]
        free = [iter(range(shard * rows, (shard + 1) * rows)) for shard in range(self._shards)]
        for one, which in seats:
            row = next(free[one.slot // per_shard])
            slots[row], text[row] = one.slot % per_shard, which
        return dataclasses.replace(loop, slots=jnp.asarray(slots), text=jnp.asarray(text)), places

    def _assigned(self, prompts: list[np.ndarray], known: dict[int, int]) -> list[list[int]]:
        """Return the numbers of the prompts of each shard. ``known`` are the shards of some."""
        loads = [0] * self._shards  # tokens
        shards = []
        for i, prompt in enumerate(prompts):
            shards.append(known.get(i, loads.index(min(loads))))
            loads[shards[-1]] += prompt.size
        return [[i for i, of_prompt in enumerate(shards) if of_prompt == shard] for shard in range(self._shards)]

    def _end(
        self, loop: Loop, prompts: list[np.ndarray], made: list[list[int]], places: list[int], seconds: float
    ) -> None:
        """Take the caches back, and note what they hold."""
        if loop.ok.is_deleted():  # a pass was interrupted: its caches are lost, and the next call makes new ones
            self._forget()
            return
        self._caches = loop.caches
        # The tokens are read again: what an interrupted call made may not all have been seen.
        shard = np.arange(self.rows, dtype=np.int32) // (self.rows // self._shards)  # of each row
        text = loop.text + shard * (loop.texts.lengths.size // self._shards)
        tokens = jnp.take(loop.texts.tokens, text, axis=0)
        slots, text, tokens, lengths = jax.device_get((loop.slots, text, tokens, loop.caches.model.seq_lens))
        at = shard * self._of_shard.max_requests + slots  # of each row the slot among those of all shards
        held = {
            int(at[row]): (int(text[row]), tokens[row, : lengths[at[row]]])
            for row in range(self.rows)
            if slots[row] >= 0
        }
        self._kept = [one for one in self._kept if one.slot in held and held[one.slot][0] not in places]
        self._kept += [_Kept(slot, stored) for slot, (place, stored) in held.items() if place in places]
        passes, stored, drafted, accepted = jax.device_get((loop.passes, loop.stored, loop.drafted, loop.accepted))
        self.result = Generated(
            tokens=made,
            passes=int(np.max(passes)),
            stored=int(np.sum(stored)),
            drafted=int(np.sum(drafted)),
            accepted=int(np.sum(accepted)),
            seconds=seconds,
            drafts=loop.judged and loop.judged.of(places, [prompt.size for prompt in prompts], list(map(len, made))),
            choices=None if loop.choices is None else _choices(loop, places, self._shards),
        )


def generate(
    params: ModelParams,
    prompts: Prompts,
    max_new: int,
    sampling: Sampling | None = None,
    drafts: int = 0,
    stop_tokens: Sequence[int] | None = None,
    caches: Caches | None = None,
    on_progress: Callable[[list[list[int]]], None] | None = None,
) -> Generated:
    """Continue prompts once; a ``Generator`` does it again and again, and yields tokens as they come.

    Args:
      params: the model's weights.
      prompts: token ids, at least one per prompt; or int [prompts, n].
      max_new: the most tokens to add to each.
      sampling: how tokens are drawn; the likeliest if None.
      drafts: tokens to guess per pass with the model's own draft block, fewer than ``max_new``. They change the speed,
        not the distribution; at temperature 0 not even the tokens.
      stop_tokens: tokens that complete a text; the model's if None.
      caches: empty caches to use, which are donated; of a row for each prompt, up to ``ROWS``, if None.
      on_progress: called with the new tokens of each prompt so far, every few passes.

    Raises:
      ValueError: a prompt is empty or holds an id outside the vocabulary, the caches are not empty or could not hold
        one of the texts alone, or drafts are asked for that the model or the caches cannot make.
    """
    check_type("params", params, ModelParams)
    max_new, drafts = integer("max_new", max_new, 1), integer("drafts", drafts, 0)
    texts = read_prompts(prompts, params.cfg.vocab_size)
    if drafts >= max_new:
        raise ValueError(f"drafts={drafts} are more than can be used: of max_new={max_new} tokens, {max_new - 1}")
    if caches is None:
        caches = caches_for(params.cfg, texts, max_new, drafts, mesh=params.mesh)
    generator = Generator(params, drafts=drafts, caches=caches)
    return generator.generate(texts, max_new, sampling, stop_tokens, on_progress)


def caches_for(
    cfg: ModelConfig, prompts: Sequence[np.ndarray], max_new: int, drafts: int = 0, **formats: Any
) -> Caches:
    """Return empty caches for prompts from ``read_prompts``; ``formats`` as for ``init_caches``."""
    longest = max(prompt.size for prompt in prompts) + max_new
    return caches_of(cfg, min(len(prompts), ROWS), longest, drafts, **formats)


def caches_of(cfg: ModelConfig, rows: int, context: int, drafts: int, prefixes: int = 0, **formats: Any) -> Caches:
    """Return empty caches of at least these sizes, with slots for prefixes beside those of the rows."""
    shards = 1 if formats.get("mesh") is None else formats["mesh"].shape[DATA]
    rows = _power_of_two(-(-rows // shards)) * shards
    return init_caches(cfg, rows + prefixes, _power_of_two(max(context, CONTEXT)), drafts, **formats)


def read_prompts(prompts: Prompts, vocab_size: int) -> list[np.ndarray]:
    """Return prompts as arrays int64 [n]. ValueError for those that cannot be continued, naming the first of them."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be sequences of token ids, got {prompts!r}")
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)  # at once, and not each of its rows
    read = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, int | np.integer):
            raise ValueError(f"prompts[{i}] is the number {prompt}, not a prompt: one prompt alone is [[5, 17, 3]]")
        try:
            ids = np.asarray(prompt)
        except ValueError:  # rows of several lengths
            ids = np.asarray(None)
        if ids.ndim == 1 and not ids.size:
            raise ValueError(f"prompts[{i}] is empty: give at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"prompts[{i}] must be token ids in [0, {vocab_size}), got {prompt!r}")
        read.append(ids.astype(np.int64))
    if not read:
        raise ValueError("prompts is empty: give at least one")
    return read


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def _queue(prompts: list[np.ndarray], queues: list[list[int]], max_new: int, longest: int) -> tuple[Texts, list[int]]:
    """The prompts as texts, in a queue for each shard, and at least one of each that is empty.

    Returns (the texts, the place of each prompt among all of them).
    """
    size = _power_of_two(max(*map(len, queues), TEXTS - 1) + 1)
    texts = size * len(queues)
    places = {i: shard * size + turn for shard, queue in enumerate(queues) for turn, i in enumerate(queue)}
    tokens, (lengths, numbers) = np.zeros((texts, longest), np.int32), np.zeros((2, texts), np.int32)
    for i, place in places.items():
        lengths[place], numbers[place] = prompts[i].size, i
        tokens[place, : prompts[i].size] = prompts[i]
    limits = np.where(lengths > 0, lengths + max_new, 0)
    arrays = {"tokens": tokens, "lengths": lengths, "limits": limits, "numbers": numbers}
    queue = Texts(**{name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()})
    return queue, [places[i] for i in range(len(prompts))]


def _first_texts(rounds: Rounds) -> collections.abc.Generator[int]:
    with contextlib.closing(rounds):  # at once, when the stream is closed
        for new in rounds:
            yield from new[0]


@jax.jit
def _pending(loop: Loop) -> jax.Array:
    return of_each_shard(lambda loop: loop.pending, loop, made=OF_ROWS)


@functools.partial(jax.jit, static_argnames="most")
def _look(loop: Loop, lengths: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return what was made.

    It is (up to ``most`` tokens of each text after so many int32 [texts, most], lengths int32 [texts], whether there is
    more to do, whether texts need seats).
    """

    def step(loop: Loop, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        places = lengths[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        texts = loop.texts
        tokens = jnp.take_along_axis(texts.tokens, jnp.minimum(places, texts.tokens.shape[1] - 1), axis=1)
        return tokens, texts.lengths, loop.unfinished, loop.needs_seats

    return of_each_shard(step, loop, (lengths,), (OF_ROWS,), OF_ROWS)


def _choices(loop: Loop, places: list[int], shards: int) -> list[Choices]:
    """Return the choices for the stored tokens of the texts at these places, on the host."""
    choices, lengths = jax.device_get((loop.choices, loop.texts.lengths))
    assert choices is not None
    size, room = lengths.size // shards, jax.tree.leaves(choices)[0].shape[1] // shards

    def of_text(place: int) -> Choices:
        at = place // size * room + place % size
        return jax.tree.map(lambda leaf: leaf[:, at : at + 1, : lengths[place] - 1], choices)

    return [of_text(place) for place in places]


def _stops(tokens: Sequence[int]) -> jax.Array:
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ValueError(f"stop_tokens must be token ids, got {tokens!r}")
    stops = [integer(f"stop_tokens[{i}]", token, 0) for i, token in enumerate(tokens)]
    return jnp.asarray(stops + [-1] * (STOPS - len(stops) % STOPS), jnp.int32)  # -1 is no token


def _most_tokens(plan: CachePlan) -> int:
    """The longest text that has room when it is alone."""
    return min(plan.max_context, plan.num_blocks * plan.cfg.block_tokens) if plan.min_ratio else plan.max_context


def _check_room(prompts: list[np.ndarray], max_new: int, plan: CachePlan) -> None:
    """Refuse what could never be completed, however long it waits."""
    longest = max(range(len(prompts)), key=lambda i: prompts[i].size)
    size, most = prompts[longest].size + max_new, _most_tokens(plan)
    if size > most:
        what = f"prompts[{longest}] of {size - max_new} tokens and max_new={max_new} are a text of {size} tokens"
        sizes = f"max_context={plan.max_context}, num_blocks={plan.num_blocks} of {plan.cfg.block_tokens} tokens"
        raise ValueError(f"{what}, and the caches have room for {most} ({sizes})")


def _check_caches(caches: Caches, drafts: int, params: ModelParams, prefixes: Sequence[Prefix]) -> None:
    if not isinstance(caches, Caches):
        hint = ": make both by init_caches" if isinstance(caches, KVCache) else ""
        raise ValueError(f"caches must be Caches, of a model and its drafts, got {type(caches).__name__}{hint}")
    plan = caches.model.plan
    check_meshes(params.mesh, caches.model)
    taken, kept = set(np.flatnonzero(caches.model.tables.admitted)), {prefix.slot for prefix in prefixes}
    if taken - kept:
        raise ValueError("caches must be empty: some of their slots are taken")
    if kept - taken:
        raise ValueError("prefixes must be those of the caches: some of their slots are free")
    if drafts and (caches.drafts is None or caches.drafts.plan.max_context < plan.max_context + drafts):
        raise ValueError(f"caches cannot hold drafts={drafts} tokens: make them by init_caches(..., drafts={drafts})")
