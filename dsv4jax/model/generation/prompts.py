"""What a call is given: prompts, stop tokens, and room for the texts in caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.shards import DATA
from dsv4jax.checks import integers
from dsv4jax.model.caches import Caches, init_caches
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.generation.state import Texts
from dsv4jax.plan import CachePlan

# The least sizes, so that most calls share a compiled program.
CONTEXT = 1024  # tokens of context
TEXTS = 32  # in the queue
STOPS = 4  # stop tokens, in multiples of it
ROWS = 16  # texts that ``generate`` works on at a time, unless caches are given

type Prompt = Sequence[int] | jax.Array | np.ndarray
type Prompts = Sequence[Prompt] | jax.Array | np.ndarray


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


def read_stop_tokens(tokens: Sequence[int] | None, cfg: ModelConfig) -> jax.Array:
    """Return stop tokens, None for the model's own, as int32 [any].

    The last ones are -1, which is drawn from NaN: such a text ends there.

    Raises:
      ValueError: they are no tokens of the vocabulary. The model's own may be of a larger one.
    """
    stops = cfg.stop_tokens if tokens is None else integers("stop_tokens", tokens, "token ids", 0)
    if tokens is not None and (too_large := [stop for stop in stops if stop >= cfg.vocab_size]):
        raise ValueError(f"stop_tokens must be token ids in [0, {cfg.vocab_size}), got {too_large}")
    return jnp.asarray(stops + (-1,) * (STOPS - len(stops) % STOPS), jnp.int32)


def most_tokens(plan: CachePlan) -> int:
    """Tokens of the longest text for which a cache of a plan has room when it is alone."""
    return min(plan.max_context, plan.num_blocks * plan.cfg.block_tokens) if plan.min_ratio else plan.max_context


def check_room(prompts: list[np.ndarray], max_new: int, plan: CachePlan) -> None:
    """Refuse what could never be completed, however long it waits."""
    longest = max(range(len(prompts)), key=lambda i: prompts[i].size)
    size, most = prompts[longest].size + max_new, most_tokens(plan)
    if size > most:
        what = f"prompts[{longest}] of {size - max_new} tokens and max_new={max_new} are a text of {size} tokens"
        sizes = f"max_context={plan.max_context}, num_blocks={plan.num_blocks} of {plan.cfg.block_tokens} tokens"
        raise ValueError(f"{what}, and the caches have room for {most} ({sizes})")


def caches_for(
    cfg: ModelConfig, prompts: Sequence[np.ndarray], max_new: int, drafts: int = 0, **formats: Any
) -> Caches:
    """Return empty caches for prompts from ``read_prompts``; ``formats`` as for ``init_caches``."""
    longest = max(prompt.size for prompt in prompts) + max_new
    return caches_of(cfg, min(len(prompts), ROWS), longest, drafts, **formats)


def caches_of(cfg: ModelConfig, rows: int, context: int, drafts: int, prefixes: int = 0, **formats: Any) -> Caches:
    """Return empty caches of at least these sizes, with slots for prefixes of each shard beside those of the rows."""
    shards = 1 if formats.get("mesh") is None else formats["mesh"].shape[DATA]
    rows = power_of_two(-(-rows // shards)) * shards
    return init_caches(cfg, rows + prefixes * shards, power_of_two(max(context, CONTEXT)), drafts, **formats)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def queued(prompts: list[np.ndarray], queues: list[list[int]], max_new: int, longest: int) -> tuple[Texts, list[int]]:
    """The prompts as texts, in a queue for each shard, and at least one of each that is empty.

    Returns (the texts, the place of each prompt among all of them).
    """
    size = power_of_two(max(*map(len, queues), TEXTS - 1) + 1)
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
