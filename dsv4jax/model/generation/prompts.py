"""What a call is given: prompts, stop tokens, and room for the texts in caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.shards import DATA, on_host
from dsv4jax.checks import check_array, integer, integers
from dsv4jax.model.caches import Caches, init_caches
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.generation.sampling import Sampling, check_keys, of_texts
from dsv4jax.model.generation.state import Texts
from dsv4jax.plan import CachePlan

# The least sizes, so that most calls share a compiled program.
CONTEXT = 1024  # tokens of context
TEXTS = 32  # in the queue
STOPS = 16  # stop tokens, in multiples of it
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


def read_stop_tokens(tokens: Sequence[int] | None, cfg: ModelConfig) -> np.ndarray:
    """Return stop tokens, None for the model's own, as int32 [any].

    The last ones are -1, which is drawn from NaN: such a text ends there.

    Raises:
      ValueError: they are no tokens of the vocabulary. The model's own may be of a larger one.
    """
    stops = cfg.stop_tokens if tokens is None else integers("stop_tokens", tokens, "token ids", 0)
    if tokens is not None and (too_large := [stop for stop in stops if stop >= cfg.vocab_size]):
        raise ValueError(f"stop_tokens must be token ids in [0, {cfg.vocab_size}), got {too_large}")
    return np.asarray(stops + (-1,) * (STOPS - len(stops) % STOPS), np.int32)


def most_tokens(plan: CachePlan) -> int:
    """Tokens of the longest text for which a cache of a plan has room when it is alone."""
    return min(plan.max_context, plan.num_blocks * plan.cfg.block_tokens) if plan.min_ratio else plan.max_context


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks for."""

    prompts: list[np.ndarray]  # int64 [n] each
    counts: list[int]  # the most tokens to add to each
    samplings: list[Sampling]  # how each draws, or one for all

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text when it is complete, if no stop token completes it."""
        return [prompt.size + count for prompt, count in zip(self.prompts, self.counts, strict=True)]


def check_room(asked: Asked, plan: CachePlan) -> None:
    """Refuse what could never be completed, however long it waits."""
    lengths = asked.lengths
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    size, count, most = lengths[longest], asked.counts[longest], most_tokens(plan)
    if size > most:
        what = f"prompts[{longest}] of {size - count} tokens and max_new={count} are a text of {size} tokens"
        sizes = f"max_context={plan.max_context}, num_blocks={plan.num_blocks} of {plan.cfg.block_tokens} tokens"
        raise ValueError(f"{what}, and the caches have room for {most} ({sizes})")


def read_counts(max_new: int | Sequence[int], prompts: list[np.ndarray]) -> list[int]:
    """Return the most tokens to add to each prompt, for one number or one for each."""
    if not np.ndim(max_new):
        return [integer("max_new", max_new, 1)] * len(prompts)
    counts = list(integers("max_new", max_new, "a number of tokens, or one for each prompt", 1))
    _check_one_each("max_new", counts, prompts)
    return counts


def read_samplings(given: Sampling | Sequence[Sampling] | None, prompts: list[np.ndarray]) -> list[Sampling]:
    """Return how all prompts draw, or how each does: one, or as many as prompts."""
    if given is None:
        return [Sampling.of()]
    samplings = list(given) if isinstance(given, Sequence) else [given]
    if isinstance(given, Sequence):
        _check_one_each("sampling", samplings, prompts)
    for i, one in enumerate(samplings):
        name = f"sampling[{i}]" if isinstance(given, Sequence) else "sampling"
        if not isinstance(one, Sampling):
            raise ValueError(f"{name} must be a Sampling, such as Sampling.of(temperature=0.7), got {one!r}")
        for field in ("temperature", "top_p", "least_confidence"):
            check_array(f"{name}.{field}", getattr(one, field), {}, jnp.float32)
        check_keys(f"{name}.key", one.key, ())
        if one.key.dtype != samplings[0].key.dtype:
            raise ValueError(
                f"{name}.key is of {one.key.dtype.name}, and that of the first of {samplings[0].key.dtype.name}"
            )
    return samplings


def _check_one_each(name: str, given: Sequence[object], prompts: list[np.ndarray]) -> None:
    if len(given) != len(prompts):
        raise ValueError(f"{name} must be one for all prompts, or one for each of {len(prompts)}, got {len(given)}")


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


def queued(asked: Asked, queues: list[list[int]], longest: int) -> tuple[Texts, list[int]]:
    """The prompts as texts, in a queue for each shard, and at least one of each that is empty.

    Returns (the texts, the place of each prompt among all of them).
    """
    size = power_of_two(max(*map(len, queues), TEXTS)) + 1
    texts = size * len(queues)
    places = {i: shard * size + turn for shard, queue in enumerate(queues) for turn, i in enumerate(queue)}
    tokens, (lengths, limits, numbers) = np.zeros((texts, longest), np.int32), np.zeros((3, texts), np.int32)
    for i, (prompt, limit) in enumerate(zip(asked.prompts, asked.lengths, strict=True)):
        lengths[places[i]], limits[places[i]], numbers[places[i]] = prompt.size, limit, i
        tokens[places[i], : prompt.size] = prompt
    sampling = _sampling_of_texts(asked.samplings, numbers)
    return _texts_of(tokens, lengths, limits, sampling), [places[i] for i in range(len(places))]


_texts_of = jax.jit(Texts.of)  # one program, since a few small ones take longer to launch


def _sampling_of_texts(samplings: list[Sampling], numbers: np.ndarray) -> Sampling:
    """How texts draw, by numbers of their prompts: as all do, or as the prompt would that is the only one of a call."""
    if len(samplings) == 1:
        return of_texts(samplings[0], numbers)
    kind = jax.random.key_impl(samplings[0].key)
    plain = [dataclasses.replace(one, key=jax.random.key_data(one.key)) for one in samplings]
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)[numbers]), *on_host(plain))
    keys = jax.random.wrap_key_data(stacked.key, impl=kind)
    return of_texts(dataclasses.replace(stacked, key=keys), jnp.zeros_like(numbers))
