"""Continuous batching with the cache: requests arrive, are prefilled in chunks, decode token by token, and leave.

The schedule is computed on the host before anything runs. The batch has one row per slot. When the request of a row has
ended, its slot and blocks are released, and the next waiting request takes its place while the other rows continue to
decode.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: int  # tokens that are fed in chunks
    total: int  # total number of tokens; those past the prompt are fed one at a time


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass; each tuple has one element per row of the batch."""

    width: int  # tokens per row, padding included
    request: tuple[int, ...]  # -1 = the row is empty
    start: tuple[int, ...]  # tokens that the request has stored before this pass
    num_new: tuple[int, ...]
    leaving: tuple[bool, ...]  # the row's last request has ended: release it before this pass
    arriving: tuple[bool, ...]  # admit a request for this row before this pass


def schedule(requests: Sequence[Request], rows: int, chunk: int) -> list[Pass]:
    """Return all passes until every request is served.

    A pass is ``chunk`` tokens wide while any row still has part of its prompt to feed, and one token wide otherwise.
    """
    waiting = list(range(len(requests)))
    resident, done = [-1] * rows, [0] * rows
    passes = []
    while True:
        leaving = [r >= 0 and n == requests[r].total for r, n in zip(resident, done, strict=True)]
        arriving = [False] * rows
        for b in range(rows):
            if leaving[b]:
                resident[b], done[b] = -1, 0
            if resident[b] < 0 and waiting:
                resident[b], arriving[b] = waiting.pop(0), True
        if all(r < 0 for r in resident):
            return passes
        prompt_left = [requests[r].prompt - n if r >= 0 else 0 for r, n in zip(resident, done, strict=True)]
        num_new = [min(chunk, left) if left > 0 else int(r >= 0) for r, left in zip(resident, prompt_left, strict=True)]
        width = chunk if max(prompt_left) > 0 else 1
        passes.append(
            Pass(width, tuple(resident), tuple(done), tuple(num_new), tuple(leaving), tuple(arriving)),
        )
        done = [n + new for n, new in zip(done, num_new, strict=True)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Occupancy:
    """What each row of the batch holds after a pass. Empty rows hold nothing."""

    window: jax.Array  # int32 [B] rows of the sliding window
    tail: dict[str, jax.Array]  # layer kind -> int32 [B] tokens of the unfinished block
    blocks: jax.Array  # int32 [B, max_blocks] block ids, -1 = none


def occupancy(cache: d4.KVCache, slots: jax.Array) -> Occupancy:
    """Read what each row holds from the tables and the first layer's window.

    This is some hundred bytes, so a step can afford to return it.
    """
    kind, index = cache.locate(0)
    there = slots >= 0
    kinds = [k for k in (d4.AttentionType.CSA, d4.AttentionType.HCA) if cache.plan.layers(k)]
    return Occupancy(
        window=jnp.where(there, jnp.sum(cache.stack(kind).state.pos[index, slots] >= 0, axis=-1, dtype=jnp.int32), 0),
        tail={k.value: jnp.where(there, cache.tail_len(k)[slots], 0) for k in kinds},
        blocks=jnp.where(there[:, None], cache.tables.block_table[slots], -1),
    )


# The cache is donated. Every buffer is updated in place, and the caller's old cache is invalid.
@functools.partial(jax.jit, donate_argnames="cache")
def step(
    params: tuple[d4.AttentionParams, ...], x: jax.Array, cache: d4.KVCache, slots: jax.Array, num_new: jax.Array
) -> tuple[list[jax.Array], d4.KVCache, jax.Array, Occupancy]:
    """Run one forward pass of every layer, all on the same input x [B, T, hidden]. A real model would chain them."""
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    outputs = []
    for layer, layer_params in enumerate(params):
        y, cache = d4.attention_layer(layer_params, x, cache, layer, slots, num_new)
        outputs.append(y)
    cache = d4.advance(cache, slots, num_new)
    return outputs, cache, ok, occupancy(cache, slots)


@functools.partial(jax.jit, donate_argnames="cache")
def turn_over(
    cache: d4.KVCache, slots: jax.Array, leaving: jax.Array, arriving: jax.Array
) -> tuple[d4.KVCache, jax.Array, jax.Array]:
    """Release the slots of rows that end, and admit requests for rows that begin. Returns (cache, slots, ok)."""
    cache = d4.release(cache, jnp.where(leaving, slots, -1))
    cache, admitted, ok = d4.admit(cache, slots.shape[0], arriving)
    return cache, jnp.where(arriving, admitted, jnp.where(leaving, -1, slots)), ok


@functools.partial(jax.jit, static_argnames="width")
def take_tokens(x: jax.Array, request: jax.Array, start: jax.Array, *, width: int) -> jax.Array:
    """Take each row's next tokens from x [requests, T, hidden]: [B, width, hidden].

    What is past its end is ignored later.
    """
    position = jnp.minimum(start[:, None] + jnp.arange(width, dtype=jnp.int32)[None], x.shape[1] - 1)
    return x[request[:, None], position]


@dataclasses.dataclass(frozen=True)
class Served:
    """The results of a schedule."""

    passes: list[Pass]
    outputs: list[list[jax.Array]]  # [pass][layer] [B, width, hidden]
    history: Occupancy  # numpy leaves [passes, ...]
    seconds: dict[str, float]  # "prefill" (the wide passes) or "decode"; without compilation

    def tokens(self, phase: str) -> int:
        return sum(sum(p.num_new) for p in self.passes if (p.width > 1) == (phase == "prefill"))

    def speed(self, phase: str) -> float:
        """Return the tokens per second over all rows."""
        return self.tokens(phase) / self.seconds[phase]

    def output(self, layer: int, request: int) -> np.ndarray:
        """Return the output of one request, f32 [total, hidden], collected from its passes."""
        parts = []
        for p, outputs in zip(self.passes, self.outputs, strict=True):
            if request in p.request:
                row = p.request.index(request)
                parts.append(np.asarray(outputs[layer])[row, : p.num_new[row]].astype(np.float32))
        return np.concatenate(parts)


def serve(
    plan: d4.CachePlan,
    params: tuple[d4.AttentionParams, ...],
    x: jax.Array,
    requests: Sequence[Request],
    chunk: int,
    on_pass: Callable[[], None] = lambda: None,
    on_compiled: Callable[[], object] = lambda: None,
) -> Served:
    """Serve requests with inputs x [requests, T, hidden] from an empty cache.

    ``on_pass`` is called at each pass, and ``on_compiled`` before the first one, outside of what is timed.

    Raises:
      RuntimeError: the cache refused a request or a pass because there are too few slots or blocks.
    """

    def ids(values: Sequence[int]) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    passes = schedule(requests, plan.max_requests, chunk)
    inputs = [(take_tokens(x, ids(p.request), ids(p.start), width=p.width), ids(p.num_new)) for p in passes]
    changes = [(jnp.asarray(p.leaving), jnp.asarray(p.arriving)) for p in passes]
    cache, slots = d4.init_cache(plan), jnp.full(plan.max_requests, -1, jnp.int32)

    # Compile ahead, so that the times below do not include it. In threads, because it takes seconds.
    example = {p.width: tokens for p, tokens in zip(passes, inputs, strict=True)}
    lowered = [turn_over.lower(cache, slots, *changes[0])]
    lowered += [step.lower(params, tokens, cache, slots, num_new) for tokens, num_new in example.values()]
    with ThreadPoolExecutor() as threads:
        change_rows, *compiled = threads.map(lambda program: program.compile(), lowered)
    steps = dict(zip(example, compiled, strict=True))
    jax.block_until_ready((cache, inputs, changes))
    on_compiled()

    outputs, granted, history = [], [], []
    seconds = {"prefill": 0.0, "decode": 0.0}
    # Nothing in this loop waits for the device until all passes of one width have run.
    for width, group in itertools.groupby(range(len(passes)), lambda i: passes[i].width):
        begin = time.perf_counter()
        for i in group:
            if any(passes[i].leaving) or any(passes[i].arriving):
                cache, slots, ok = change_rows(cache, slots, *changes[i])
                granted.append(ok)
            ys, cache, ok, held = steps[width](params, inputs[i][0], cache, slots, inputs[i][1])
            outputs.append(ys)
            granted.append(ok)
            history.append(held)
            on_pass()
        jax.block_until_ready(cache)
        seconds["decode" if width == 1 else "prefill"] += time.perf_counter() - begin
    if not all(bool(ok) for ok in granted):
        raise RuntimeError("the cache refused a request or a pass: it has too few slots or blocks for this schedule")
    return Served(passes, outputs, jax.tree.map(lambda *leaves: np.stack(leaves), *history), seconds)
