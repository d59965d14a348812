"""Random batches of requests, each of which also runs alone, and how many bits differ.

A request runs alone as one token after the other, in a batch of one row. In batches it is fed in chunks of random
sizes, some of them drafts that are partly wrong, among neighbours and padding, in another slot and in other pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from dsv4jax.model import ModelParams, forward, stage_forward
from tests.support.driver import contents, garbage, poisoned

# Runs a pass over a cache: (inputs [B, T, ...], cache, slots, number of tokens fed, number that are kept or None if all
# are and it is no draft) -> (outputs [B, T, ...], cache).
Run = Callable[..., tuple[Any, d4.KVCache]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """What is fed at once."""

    rows: tuple[tuple[int, int] | None, ...]  # the request of each row, and how many of its tokens; None = padding
    width: int  # tokens of a row
    is_draft: bool = False  # tokens that are not the request's follow its own, up to the width


def alone(request: int, length: int) -> list[Pass]:
    return [Pass(rows=((request, 1),), width=1)] * length


def random_passes(
    rng: np.random.Generator, lengths: Sequence[int], rows: int, width: int, *, drafts: bool = True
) -> list[Pass]:
    """Feed all requests, in passes of at most ``rows`` of them; rows of a pass are chunks, single tokens or idle."""
    left, passes = list(lengths), []
    while any(left):
        is_draft = drafts and width > 1 and rng.random() < 0.3
        waiting = rng.permutation(np.flatnonzero(left))[: int(rng.integers(1, rows + 1))]
        fed: list[tuple[int, int] | None] = [None] * (rows - len(waiting))
        for request in map(int, waiting):
            count = min(left[request], 1 if rng.random() < 0.3 else int(rng.integers(1, width + 1)))
            fed.append((request, count))
            left[request] -= count
        passes.append(Pass(rows=tuple(fed[i] for i in rng.permutation(rows)), width=width, is_draft=is_draft))
    return passes


def feed(
    run: Run, plan: d4.CachePlan, inputs: Sequence[np.ndarray], passes: Sequence[Pass], seed: int
) -> dict[int, tuple[Any, Any]]:
    """Run passes. Return by request its outputs [tokens, ...] and what the cache holds of it in the end.

    What is in the cache before, and in padding, is drawn with the seed, as are the requests' slots.
    """
    rng = np.random.default_rng(seed)
    requests = sorted({row[0] for one in passes for row in one.rows if row is not None})
    cache, slots, ok = d4.admit(garbage(d4.init_cache(plan), seed), plan.max_requests)
    assert ok
    slot_of = dict(zip(requests, rng.permutation(np.asarray(slots)), strict=False))
    done, outputs = dict.fromkeys(requests, 0), {request: [] for request in requests}
    for one in passes:
        of_batch = [np.full(len(one.rows), fill, np.int32) for fill in (-1, 0, 0)]
        slots, fed, kept = of_batch
        x = _noise(rng, (len(one.rows), one.width), inputs[0])
        for row, request_and_count in enumerate(one.rows):
            if request_and_count is None:
                continue
            request, count = request_and_count
            begin = done[request]
            x[row, :count] = inputs[request][begin : begin + count]
            slots[row], kept[row] = slot_of[request], count
            fed[row] = count if not one.is_draft else rng.integers(count, one.width + 1)
        made, cache = run(x, cache, *map(jnp.asarray, (slots, fed)), jnp.asarray(kept) if one.is_draft else None)
        made = jax.tree.map(np.asarray, made)
        for row, request_and_count in enumerate(one.rows):
            if request_and_count is not None:
                request, count = request_and_count
                outputs[request].append(jax.tree.map(lambda leaf, row=row, n=count: leaf[row, :n], made))
                done[request] += count
    stored = np.asarray(cache.seq_lens)[[slot_of[request] for request in requests]]
    assert stored.tolist() == [done[request] for request in requests], "a pass was refused"
    cache = poisoned(cache)
    joined: dict[int, Any] = {
        one: jax.tree.map(lambda *parts: np.concatenate(parts), *parts) for one, parts in outputs.items()
    }
    return {request: (joined[request], contents(cache, int(slot_of[request]), used=True)) for request in requests}


def _noise(rng: np.random.Generator, lead: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    if like.dtype.kind == "i":
        return rng.integers(0, 1 + like.max(), (*lead, *like.shape[1:]), like.dtype)
    return rng.standard_normal((*lead, *like.shape[1:])).astype(like.dtype)


def different_bits(some: Any, others: Any) -> dict[str, int]:
    """Return by name how many bits of two trees differ; nothing of leaves that are equal."""
    found = {}
    for (path, one), other in zip(jax.tree.leaves_with_path(some), jax.tree.leaves(others), strict=True):
        one, other = (np.ascontiguousarray(leaf) for leaf in (one, other))
        assert (one.shape, one.dtype) == (other.shape, other.dtype), jax.tree_util.keystr(path)
        bits = np.bitwise_count(one.reshape(-1).view(np.uint8) ^ other.reshape(-1).view(np.uint8))
        if count := int(bits.sum(dtype=np.int64)):
            found[jax.tree_util.keystr(path)] = count
    return found


def each_alone(run: Run, plan: d4.CachePlan, inputs: Sequence[np.ndarray], seed: int = 0) -> dict[int, Any]:
    """``feed`` for each request alone, one token after the other."""
    found: dict[int, Any] = {}
    for request, given in enumerate(inputs):
        found |= feed(run, plan, inputs, alone(request, len(given)), seed + request)
    return found


def compare(
    run: Run,
    plan: d4.CachePlan,
    inputs: Sequence[np.ndarray],
    batches: Sequence[tuple[int, int]],
    *,
    drafts: bool = True,
    seed: int = 0,
) -> dict[str, int]:
    """Return by name how many bits differ between requests alone and in random batches of these (rows, width)."""
    lengths, differing = [len(one) for one in inputs], dict[str, int]()
    rng, single = np.random.default_rng(seed), each_alone(run, plan, inputs, seed)
    for rows, width in batches:
        together = feed(run, plan, inputs, random_passes(rng, lengths, rows, width, drafts=drafts), seed + 100)
        for request, found in together.items():
            for name, count in different_bits(found, single[request]).items():
                differing[f"{rows} x {width}: {name}"] = differing.get(f"{rows} x {width}: {name}", 0) + count
    return differing


def differ_from_alone(
    run: Run, plan: d4.CachePlan, inputs: Sequence[np.ndarray], passes: Sequence[Pass]
) -> dict[str, int]:
    """Return by name how many bits differ between requests in these passes and one token after the other alone."""
    found, differing = feed(run, plan, inputs, passes, 7), dict[str, int]()
    for request, single in each_alone(run, plan, inputs).items():
        differing |= different_bits(found[request], single)
    return differing


def run_layers(params: Sequence[Any], backend: Any = None) -> Run:
    """Run each layer on the same inputs."""
    return functools.partial(_layers, tuple(params), backend=backend)


@functools.partial(jax.jit, static_argnames="backend")
def _layers(params, x, cache, slots, fed, kept, *, backend):
    cache, _ = d4.prepare_forward(cache, slots, fed)
    outputs, staged = [], []
    for layer, weights in enumerate(params):
        if kept is None:
            y, cache = d4.attention_layer(weights, x, cache, layer, slots, fed, backend=backend)
        else:
            y, cache, one = d4.stage(weights, x, cache, layer, slots, fed, backend=backend)
            staged.append(one)
        outputs.append(y)
    if kept is None:
        return outputs, d4.advance(cache, slots, fed)
    return outputs, d4.commit(cache, staged, kept, backend=backend)[0]


def run_model(params: ModelParams, backend: Any = None) -> Run:
    """Run a whole model, for the logits of all tokens."""
    return functools.partial(_model, params, backend=backend)


@functools.partial(jax.jit, static_argnames="backend")
def _model(params, ids, cache, slots, fed, kept, *, backend):
    cache, _ = d4.prepare_forward(cache, slots, fed)
    if kept is None:
        logits, _, cache = forward(params, ids, cache, slots, fed, "all", backend=backend)
        return logits, d4.advance(cache, slots, fed)
    logits, _, cache, staged = stage_forward(params, ids, cache, slots, fed, backend=backend)
    return logits, d4.commit(cache, staged, kept, backend=backend)[0]
