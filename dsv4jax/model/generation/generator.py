"""Generating texts: prompts in, new tokens out. ``loop`` has the programs that do it.

The programs depend on the number of rows, of tokens of context and of texts that wait, all of which are rounded up to
powers of two; so a few programs serve all prompts. The loop is left only to read what was made, and to store prompts.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.shards import DATA, on_host, placed
from dsv4jax.checks import check_type, integer
from dsv4jax.model.caches import Caches, empty_caches
from dsv4jax.model.generation.drafting import JudgedDraft, of_places
from dsv4jax.model.generation.held import Held, Shards, going_on
from dsv4jax.model.generation.loop import look, run, store
from dsv4jax.model.generation.prefill import Prefill
from dsv4jax.model.generation.prefixes import PrefixedPrompts
from dsv4jax.model.generation.prompts import (
    CONTEXT,
    Asked,
    Prompt,
    Prompts,
    caches_for,
    caches_of,
    check_room,
    most_tokens,
    power_of_two,
    queued,
    read_counts,
    read_prompts,
    read_samplings,
    read_stop_tokens,
)
from dsv4jax.model.generation.sampling import Sampling
from dsv4jax.model.generation.seats import seat
from dsv4jax.model.generation.state import Loop, begin, spread
from dsv4jax.model.inside.choices import Choices, no_choices
from dsv4jax.model.inside.devices import check_meshes
from dsv4jax.model.inside.host_memory import bound_like
from dsv4jax.model.params import ModelParams
from dsv4jax.plan import shard_plan
from dsv4jax.requests.prefixes import Prefix, PrefixStore

# Passes of the loop from one look at what it made to the next: of a stream, for reports of progress, otherwise. To
# leave the loop and enter it again takes as long as a pass or two of a single text.
STREAMED, REPORTED, UNSEEN = 4, 8, 64

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
    log_probs: list[list[float]]  # of each new token by the model: at temperature 1, and of the whole vocabulary
    sampled_log_probs: list[list[float]]  # with which each was drawn, after temperature and top-p; 0 at temperature 0
    # Of each new token, the draft that was judged in its place, or None; None of all if no drafts are made.
    drafts: list[list[JudgedDraft | None]] | None = None
    choices: list[Choices] | None = None  # of each text but for its last token [.., 1, tokens - 1, ..], if asked for


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

    Over a mesh, each shard of requests has its share of the rows and of the blocks, and prefixes of its own. A prompt
    goes to the shard that holds its beginning; or to the one that keeps the longest prefix of it, while that has a row
    for each such prompt; or to the one that has most blocks left beside the texts that it holds and the prompts before
    this one. Of several such, the one with the fewest tokens to store takes it.

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
            distribution; at temperature 0 not even the tokens, if caches are invariant.
          caches: caches to use, which are donated, in place of some of these sizes. They are empty, but for the
            prefixes of a store that is given.
          prefixes: the most beginnings of prompts to keep on each shard of requests, each in a slot beside those of
            the rows; or the store of what the caches hold.
          formats: as for ``init_caches``, which makes caches if none are given.

        Raises:
          ValueError: a size is not positive, the model or the caches cannot make so many drafts, the caches are not
            empty, or as ``init_caches``.
        """
        check_type("params", params, ModelParams)
        self._params, self.drafts = params, integer("drafts", drafts, 0)
        if self.drafts and params.drafts is None:
            raise ValueError("this model cannot make drafts: its checkpoint holds no block for them")
        kept = prefixes if isinstance(prefixes, PrefixStore) else None
        most = kept.capacity if kept is not None else integer("prefixes", prefixes, 0)
        if caches is None:
            sizes = integer("rows", rows, 1), integer("context", context, 1), drafts, most
            caches = caches_of(params.cfg, *sizes, mesh=params.mesh, **formats)
        elif formats:
            raise ValueError(f"caches are given, and have formats: leave out {list(formats)}")
        _check_caches(caches, self.drafts, params, () if kept is None else kept.prefixes)
        mesh, plan = params.mesh, caches.model.plan
        count = 1 if mesh is None else mesh.shape[DATA]
        if kept is not None and (kept.plan, kept.shards) != (plan, count):
            found = f"the caches of {plan!r} with shards={count}"
            raise ValueError(f"prefixes are of {kept.plan!r} with shards={kept.shards}, {found}")
        self.prefixes = PrefixStore(plan, most, shards=count) if kept is None and most else kept
        self._caches: Caches | None = caches
        self._plans = plan, caches.drafts and caches.drafts.plan
        of_shard = plan if mesh is None else shard_plan(plan, mesh, DATA)
        self._shards = Shards(count=count, plan=of_shard, rows=self.rows // count)
        self._held: Held = ()
        # Chunks of ``store``, and None for ``run``; with whether they record choices.
        self._compiled: set[tuple[int | None, bool]] = set()
        self._is_busy = False
        self.result = Generated(
            tokens=[], passes=0, stored=0, drafted=0, accepted=0, seconds=0.0, log_probs=[], sampled_log_probs=[]
        )

    @property
    def rows(self) -> int:
        return self._plans[0].max_requests - (self.prefixes.capacity * self.prefixes.shards if self.prefixes else 0)

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
        caches = self._shards.released(caches, self._held)
        self._forget()
        return caches

    def _forget(self) -> None:
        """Note that the caches are gone."""
        self._held = ()
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
        """Continue a prompt, and yield tokens as they are made: the first one at once, then those of a few passes.

        A stream that is left early, by ``break`` or ``close``, keeps what it has stored.

        Args:
          prompt: int [n], token ids.
          max_new: the most tokens to add; as many as fit if None.
          sampling, stop_tokens: as for ``generate``.

        Raises:
          ValueError, FloatingPointError: as ``generate``.
          RuntimeError: an earlier stream is not over when the first token is asked for.
        """
        texts = read_prompts([prompt], self._params.cfg.vocab_size)
        if max_new is None:
            max_new = max(1, most_tokens(self._shards.plan) - texts[0].size)
        rounds = self._rounds(texts, max_new, sampling, stop_tokens, STREAMED)
        return _first_texts(rounds)

    def generate(
        self,
        prompts: Prompts,
        max_new: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_tokens: Sequence[int] | None = None,
        on_progress: Callable[[list[list[int]]], None] | None = None,
        *,
        choices: bool = False,
    ) -> Generated:
        """Continue prompts, of which there may be more than rows. The arguments are those of the function ``generate``.

        With ``choices``, the result has the experts and entries that the passes used for each text, but for its last
        token, which is never stored. All prompts are then stored from their beginnings, whatever the caches hold.

        Raises:
          ValueError, FloatingPointError: as the function.
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
        max_new: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        stop_tokens: Sequence[int] | None,
        passes: int,
        records: bool = False,
    ) -> Rounds:
        """Check the arguments of a call; then, so many passes at a time, yield the new tokens of each prompt."""
        asked = Asked(prompts, read_counts(max_new, prompts), read_samplings(sampling, prompts))
        check_room(asked, self._shards.plan)
        stops = placed(read_stop_tokens(stop_tokens, self._params.cfg), self._params.mesh)
        return self._run(asked, stops, passes, records)

    def _run(self, asked: Asked, stops: jax.Array, passes: int, records: bool) -> Rounds:
        self._check_idle()
        prompts = asked.prompts
        made: list[list[int]] = [[] for _ in prompts]
        (loop, places), seconds = self._begin(asked, records), 0.0
        self._is_busy = True
        try:
            lengths, goes_on, needs_seats = loop.texts.lengths + 0, True, True
            prefill = Prefill(self._params, self._shards, stops)
            turns = placed(np.int32(passes), self._params.mesh)
            self._compile(loop, [prompt.size for prompt in prompts], prefill, turns)
            prefixed = PrefixedPrompts.of(self.prefixes, prompts, places) if self.prefixes and not records else None
            jax.block_until_ready(loop)
            while goes_on:
                began, draws = time.perf_counter(), False
                if needs_seats:
                    loop = seat(loop) if prefixed is None else prefixed.begin(prefixed.seat(loop), prefill)
                    self.prefixes = self.prefixes if prefixed is None else prefixed.store
                    loop, has_stored = prefill.store_all(loop)
                    draws = has_stored and loop.drafts is None
                if not draws:  # else those tokens are looked at first: a stream has them at once
                    loop = run(self._params, loop, stops, turns)
                tokens, after, *flags = look(loop, lengths, passes * (self.drafts + 1))
                tokens, counts, *flags = on_host((tokens, after - lengths, *flags))
                goes_on, needs_seats = map(np.any, flags)
                lengths = after
                seconds += time.perf_counter() - began
                new = [tokens[place, : counts[place]].tolist() for place in places]
                _check_drawn(made, new)
                for one, more in zip(made, new, strict=True):
                    one += more
                yield new
            if not np.all(on_host(loop.ok)):
                raise RuntimeError("no text can go on, although each has room when it is alone: an error of dsv4jax")
        finally:
            self._is_busy = False
            self._end(loop, prompts, made, places, seconds)

    def _compile(self, loop: Loop, sizes: Iterable[int], prefill: Prefill, turns: jax.Array) -> None:
        """Compile, at once, the programs that prompts of so many tokens need; without it, their first calls do."""
        lacking = [[size - 1 for size in sizes], *[[]] * (self._shards.count - 1)]
        chunks = {chunk: rows for rows, chunk in prefill.passes(lacking)}
        records = loop.choices is not None
        lowered = [
            store.lower(self._params, loop, *prefill.given(rows), chunk=chunk)
            for chunk, rows in chunks.items()
            if (chunk, records) not in self._compiled
        ]
        if (None, records) not in self._compiled:
            lowered.append(run.lower(self._params, loop, prefill.stop_tokens, turns))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda program: program.compile(), lowered))
        self._compiled |= {(program, records) for program in (None, *chunks)}

    def _begin(self, asked: Asked, records: bool) -> tuple[Loop, list[int]]:
        """Return the state of the loop in which prompts wait, or go on from what the cache holds of them.

        The second result is the place of each prompt in its queue. If the loop records choices none go on, because
        those of what the cache holds are not known.
        """
        caches, self._caches = self._caches or empty_caches(*self._plans, self._params.mesh), None  # the loop's now
        held, self._held = self._held, ()
        prompts, lengths = asked.prompts, asked.lengths
        shards, known = self._shards, {} if records else going_on(held, prompts)
        store = None if records else self.prefixes
        queues = shards.queues(prompts, known, caches, lengths, store)
        others = tuple(one for one in held if one not in known.values())
        staying = shards.staying(others, caches, queues, lengths)
        caches = shards.released(caches, set(others) - set(staying))
        texts, places = queued(asked, queues, self.context)
        cfg, room = self._params.cfg, None
        if records:
            longest = power_of_two(max(map(len, queues)))
            room = no_choices(longest * shards.count, self.context, shards.plan, cfg)
        loop = begin(caches, texts, cfg.vocab_size, self.drafts, room, self.rows)
        if store is not None:
            loop = dataclasses.replace(loop, shared=jnp.zeros_like(texts.lengths))
        # The last text of a queue is empty, hence complete: the place of rows that no prompt goes on from.
        seats = [(one, places[i]) for i, one in known.items()] + [(one, -1) for one in staying]
        self._held = staying
        loop = shards.seated(loop, seats)
        return bound_like(self._params, loop) if self._params.mesh is None else spread(loop), places

    def _end(
        self, loop: Loop, prompts: list[np.ndarray], made: list[list[int]], places: list[int], seconds: float
    ) -> None:
        """Take the caches back, and note what they hold."""
        if loop.ok.is_deleted():  # a pass was interrupted: its caches are lost, and the next call makes new ones
            self._forget()
            return
        self._caches = loop.caches
        # The tokens are read again: what an interrupted call made may not all have been seen.
        self._held = self._shards.held_after(loop, self._held, places)
        first, counts = [prompt.size for prompt in prompts], list(map(len, made))
        log_probs = of_places(loop.texts.log_probs, places, first, max(counts))
        numbers = loop.passes, loop.stored, loop.drafted, loop.accepted
        (passes, stored, drafted, accepted), log_probs = on_host((numbers, log_probs))
        of_model, sampled = ([row[:n].tolist() for row, n in zip(leaf, counts, strict=True)] for leaf in log_probs)
        self.result = Generated(
            tokens=made,
            passes=int(np.max(passes)),
            stored=int(np.sum(stored)),
            drafted=int(np.sum(drafted)),
            accepted=int(np.sum(accepted)),
            seconds=seconds,
            log_probs=of_model,
            sampled_log_probs=sampled,
            drafts=loop.judged and loop.judged.of(places, first, counts),
            choices=None if loop.choices is None else _choices(loop, places, self._shards.count),
        )


def generate(
    params: ModelParams,
    prompts: Prompts,
    max_new: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling] | None = None,
    drafts: int = 0,
    stop_tokens: Sequence[int] | None = None,
    caches: Caches | None = None,
    on_progress: Callable[[list[list[int]]], None] | None = None,
) -> Generated:
    """Continue prompts once; a ``Generator`` does it again and again, and yields tokens as they come.

    Args:
      params: the model's weights.
      prompts: token ids, at least one per prompt; or int [prompts, n].
      max_new: the most tokens to add to each, or to all.
      sampling: how tokens are drawn, one for each prompt or for all; the likeliest if None. With one for all, what a
        prompt draws depends on its number in the call; with its own, it draws what it would alone.
      drafts: tokens to guess per pass with the model's own draft block, fewer than ``max_new``. They change the speed,
        not the distribution; at temperature 0 not even the tokens, if caches are invariant. Otherwise logits of several
        tokens at once are rounded in another way, and tokens that are nearly as likely may change places.
      stop_tokens: tokens that complete a text; the model's if None.
      caches: empty caches to use, which are donated; of a row for each prompt, up to ``ROWS``, if None.
      on_progress: called with the new tokens of each prompt so far, every few passes.

    Raises:
      ValueError: a prompt is empty or holds an id outside the vocabulary, the caches are not empty or could not hold
        one of the texts alone, or drafts are asked for that the model or the caches cannot make.
      FloatingPointError: logits have NaN, so that there is no next token.
    """
    check_type("params", params, ModelParams)
    texts, drafts = read_prompts(prompts, params.cfg.vocab_size), integer("drafts", drafts, 0)
    most = max(read_counts(max_new, texts))
    if drafts >= most:
        raise ValueError(f"drafts={drafts} are more than can be used: of max_new={most} tokens, {most - 1}")
    if caches is None:
        caches = caches_for(params.cfg, texts, most, drafts, mesh=params.mesh)
    generator = Generator(params, drafts=drafts, caches=caches)
    return generator.generate(texts, max_new, sampling, stop_tokens, on_progress)


def _first_texts(rounds: Rounds) -> collections.abc.Generator[int]:
    with contextlib.closing(rounds):  # at once, when the stream is closed
        for new in rounds:
            yield from new[0]


def _check_drawn(made: list[list[int]], new: list[list[int]]) -> None:
    """Refuse tokens that were drawn from NaN."""
    for i, (before, tokens) in enumerate(zip(made, new, strict=True)):
        if -1 in tokens:
            number = len(before) + tokens.index(-1)
            raise FloatingPointError(f"the logits for new token {number} of prompts[{i}] have NaN: look at the weights")


def _choices(loop: Loop, places: list[int], shards: int) -> list[Choices]:
    """Return the choices for the stored tokens of the texts at these places, on the host."""
    choices, lengths = on_host((loop.choices, loop.texts.lengths))
    assert choices is not None
    size, room = lengths.size // shards, jax.tree.leaves(choices)[0].shape[1] // shards

    def of_text(place: int) -> Choices:
        at = place // size * room + place % size
        return jax.tree.map(lambda leaf: leaf[:, at : at + 1, : lengths[place] - 1], choices)

    return [of_text(place) for place in places]


def _check_caches(caches: Caches, drafts: int, params: ModelParams, prefixes: Sequence[Prefix]) -> None:
    if not isinstance(caches, Caches):
        hint = ": make both by init_caches" if isinstance(caches, KVCache) else ""
        raise ValueError(f"caches must be Caches, of a model and its drafts, got {type(caches).__name__}{hint}")
    plan = caches.model.plan
    check_meshes(params.mesh, caches.model)
    taken, kept = set(np.flatnonzero(on_host(caches.model.tables.admitted))), {prefix.slot for prefix in prefixes}
    if taken - kept:
        raise ValueError("caches must be empty: some of their slots are taken")
    if kept - taken:
        raise ValueError("prefixes must be those of the caches: some of their slots are free")
    if drafts and (caches.drafts is None or caches.drafts.plan.max_context < plan.max_context + drafts):
        raise ValueError(f"caches cannot hold drafts={drafts} tokens: make them by init_caches(..., drafts={drafts})")
