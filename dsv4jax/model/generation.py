"""Generating texts: prompts in, new tokens out. ``loop`` has the program that does it.

The loop is left now and then only to show what was made.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.checks import integer
from dsv4jax.model.caches import Caches, init_caches
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.loop import CHUNK, Texts, begin, run
from dsv4jax.model.params import ModelParams
from dsv4jax.model.sampling import Sampling

PASSES = 8  # between two reports of progress
# Sizes come in multiples of these, so that most calls share a compiled program.
WIDTH = 256  # tokens of context, unless caches are given
TEXTS = 16
STOPS = 4  # stop tokens
ROWS = 16  # texts that are worked on at a time, unless caches are given


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What ``generate`` made."""

    tokens: list[list[int]]  # new tokens of each prompt, a stop token included
    passes: int  # that sampled
    drafted: int  # drafts that the model judged
    accepted: int  # drafts that it accepted
    seconds: float  # without compilation


def generate(
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    sampling: Sampling | None = None,
    drafts: int = 0,
    stop_tokens: Sequence[int] | None = None,
    caches: Caches | None = None,
    on_progress: Callable[[list[list[int]]], None] | None = None,
) -> Generated:
    """Continue prompts.

    Args:
      params: the model's weights.
      prompts: token ids, at least one per prompt.
      max_new: the most tokens to add to each.
      sampling: how tokens are drawn; the likeliest if None.
      drafts: tokens to guess per pass with the model's own draft block. They change the speed, not the distribution; at
        temperature 0 not even the tokens.
      stop_tokens: tokens that complete a text; the model's if None.
      caches: empty caches to use, which are donated; of as many rows as there are prompts, up to ``ROWS``, if None.
      on_progress: called with the new tokens of each prompt so far, every few passes.

    Raises:
      ValueError: a prompt is empty or holds an id outside the vocabulary, the caches are too small or not empty, or
        drafts are asked for that the model or the caches cannot make.
      RuntimeError: the caches' blocks ran out.
    """
    max_new, drafts = integer("max_new", max_new, 1), integer("drafts", drafts, 0)
    check_prompts(prompts, params.cfg.vocab_size)
    if drafts and params.drafts is None:
        raise ValueError("this model cannot make drafts: its checkpoint holds no MTP weights")
    if caches is None:
        caches = caches_for(params.cfg, prompts, max_new, drafts)
    _check_caches(caches, max(len(prompt) for prompt in prompts) + max_new, drafts)
    plan = caches.model.plan
    texts = _queue(prompts, max_new, plan.max_context)
    loop = begin(caches, texts, params.cfg.vocab_size, drafts)
    stops = list(params.cfg.stop_tokens if stop_tokens is None else stop_tokens)
    stops = jnp.asarray(stops + [-1] * (STOPS - len(stops) % STOPS), jnp.int32)  # -1 is no token
    step = functools.partial(run, chunk=min(CHUNK, plan.max_context))
    sampling = sampling or Sampling.of()
    passes = jnp.int32(PASSES if on_progress else np.iinfo(np.int32).max // 2)
    loop = step(params, loop, sampling, stops, jnp.int32(0))  # compiles, and does nothing
    jax.block_until_ready(loop)

    def new_tokens() -> list[list[int]]:
        rows, ends = jax.device_get((loop.texts.tokens, loop.texts.lengths))
        return [rows[i, len(prompt) : ends[i]].tolist() for i, prompt in enumerate(prompts)]

    began = time.perf_counter()
    while bool(loop.unfinished):
        loop = step(params, loop, sampling, stops, passes)
        if on_progress is not None:
            on_progress(new_tokens())
    seconds = time.perf_counter() - began
    if not bool(loop.ok):
        raise RuntimeError("the caches ran out of blocks: give caches with more of them, or fewer prompts at a time")
    return Generated(
        tokens=new_tokens(),
        passes=int(loop.passes),
        drafted=int(loop.drafted),
        accepted=int(loop.accepted),
        seconds=seconds,
    )


def caches_for(cfg: ModelConfig, prompts: Sequence[Sequence[int]], max_new: int, drafts: int, **formats: Any) -> Caches:
    """Return empty caches in which prompts can be continued; ``formats`` as for ``init_caches``."""
    longest = max(len(prompt) for prompt in prompts) + max_new
    return init_caches(cfg, min(len(prompts), ROWS), -(-longest // WIDTH) * WIDTH, drafts, **formats)


def _queue(prompts: Sequence[Sequence[int]], max_new: int, longest: int) -> Texts:
    """The prompts as texts, in sizes that do not change with each prompt, so that neither does the program."""
    texts = -(-len(prompts) // TEXTS) * TEXTS
    tokens, lengths = np.zeros((texts, longest), np.int32), np.zeros(texts, np.int32)
    for i, prompt in enumerate(prompts):
        lengths[i] = len(prompt)
        tokens[i, : len(prompt)] = prompt
    limits = np.where(lengths > 0, lengths + max_new, 0).astype(np.int32)
    return Texts(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths), limits=jnp.asarray(limits))


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError for prompts that cannot be continued, naming the first of them."""
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{i}] is empty: give at least one token")
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"prompts[{i}] must be token ids in [0, {vocab_size}), got {list(prompt)}")


def _check_caches(caches: Caches, longest: int, drafts: int) -> None:
    plan = caches.model.plan
    if plan.max_context < longest:
        raise ValueError(f"texts of {longest} tokens need caches with max_context >= {longest}, got {plan.max_context}")
    if bool(jnp.any(caches.model.tables.admitted)):
        raise ValueError("caches must be empty: some of their slots are taken")
    if drafts and (caches.drafts is None or caches.drafts.plan.max_context < longest + drafts):
        raise ValueError(f"caches cannot hold drafts={drafts} tokens: make them by init_caches(..., drafts={drafts})")
