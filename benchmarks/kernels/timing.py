"""How kernels are timed: with a cold L2, by CUPTI, reported as medians with their spread."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import VECTOR, Value

FLUSH_BYTES = 512 << 20  # read between two timed runs; far larger than the L2 of any card
FLUSH_NAME = "read_through_l2"
_UNROLL, _BLOCKS = 8, 1056


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Microseconds of one measurement."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    runs: int
    kernels: float = 0  # launches per run

    @classmethod
    def of(cls, samples: list[float], kernels: float = 0) -> Times:
        ordered = sorted(samples)
        at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.1, 0.9)]
        return cls(median=statistics.median(ordered), low=at[0], high=at[1], runs=len(ordered), kernels=kernels)


def flush_buffer() -> jax.Array:
    """Return the buffer that is read to make L2 cold.

    It is read and not written, because dirty lines would cost time in the next kernel.
    """
    return jnp.zeros(FLUSH_BYTES // 4, jnp.float32)


def read_all(buffer: jax.Array, ticket: jax.Array, after: Any) -> jax.Array:
    """Read a buffer once, in one kernel of a known name, which runs after ``after`` is computed.

    Returns ticket, an int32 [1], unchanged. What uses the result runs after the read.
    """
    per_trip = _UNROLL * VECTOR * WARPGROUP
    trips = buffer.size // (per_trip * _BLOCKS)

    def body(machine: Machine, inputs: Any, ticket: Any) -> None:
        block, lane = machine.block(0), machine.thread

        def add_up(i: Value, carry: list[Value]) -> list[Value]:
            first = (i * _BLOCKS + block) * per_trip + lane * VECTOR
            rows = [inputs[0].load_floats(first + j * VECTOR * WARPGROUP) for j in range(_UNROLL)]
            for row in rows:
                carry = [a + b for a, b in zip(carry, row, strict=True)]
            return carry

        total = machine.loop(trips, add_up, [machine.constant(0.0, "f32")] * VECTOR)
        odd = machine.bits(total[0] + total[1] + total[2] + total[3]) == 123456789
        ticket.store_int(block, 0, where=odd)  # never true, but the compiler cannot know

    return launch(body, name=FLUSH_NAME, grid=(_BLOCKS,), inputs=(buffer, after), state=ticket)


def kernel_times(
    update: Callable[[Any, Any, jax.Array], Any],
    state: Any,
    inputs: Any,
    *,
    runs: int = 8,
    repeats: int = 2,
    named: str = "",
) -> Times:
    """Time ``state = update(state, inputs, ticket)``: the sum of all its kernels per run, with L2 cold before each.

    The runs are unrolled in one program, so that the state stays in place, with a read of ``FLUSH_BYTES`` between them.
    ``ticket`` is an int32 [1] that holds 1. The update must use it, so that it waits for the read. Only kernels whose
    names match the regular expression ``named`` are counted.
    """

    def timed(state: Any, inputs: Any, buffer: jax.Array, ticket: jax.Array) -> Any:
        for _ in range(runs):
            ticket = read_all(buffer, ticket, min(jax.tree.leaves(state), key=lambda leaf: leaf.size))
            state = update(state, inputs, ticket)
        return state, read_all(buffer, ticket, min(jax.tree.leaves(state), key=lambda leaf: leaf.size))

    function, ticket = jax.jit(timed), jnp.ones(1, jnp.int32)
    buffer, samples, counts = flush_buffer(), [], []
    for _ in range(repeats):
        events = kernel_events(function, state, inputs, buffer, ticket)
        marks = [i for i, (name, _) in enumerate(events) if FLUSH_NAME in name]
        assert len(marks) == runs + 1, f"{len(marks)} reads of L2 where {runs + 1} were asked for"
        # The first run is left out, because it includes copies that protect the caller's arrays.
        for begin, end in itertools.pairwise(marks[1:]):
            counted = [ms for name, ms in events[begin + 1 : end] if re.search(named, name)]
            samples.append(sum(counted) * 1e3)
            counts.append(len(counted))
    return Times.of(samples, statistics.median(counts))


def kernel_events(function: Any, *args: Any) -> list[tuple[str, float]]:
    """Return (name, milliseconds) of every kernel of one call, after a warm-up."""
    from jax.experimental.mosaic.gpu import profiler

    _, events = profiler.measure(function, aggregate=False)(*args)
    assert events, "the profiler saw no kernel"
    return events


def ceilings() -> dict[str, float]:
    """Return the measured GB/s of this card for reading and for copying (read + write)."""
    buffer, ticket = flush_buffer(), jnp.ones(1, jnp.int32)
    read = jax.jit(lambda buffer, ticket: read_all(buffer, ticket, ticket))
    copy = jax.jit(lambda x: x + 1.0)
    source = jnp.ones(1 << 28, jnp.float32)
    reads = [ms for _ in range(5) for name, ms in kernel_events(read, buffer, ticket) if FLUSH_NAME in name]
    copies = [ms for _ in range(5) for _, ms in kernel_events(copy, source)]
    return {
        "read GB/s": round(FLUSH_BYTES / statistics.median(reads) / 1e6, 1),
        "copy GB/s": round(2 * source.nbytes / statistics.median(copies) / 1e6, 1),
    }


def library(backend: str) -> Any:
    """Return the module that has the kernels of a backend."""
    if backend == "triton":
        return importlib.import_module("pallas_kernels.triton_gpu")
    return importlib.import_module("pallas_kernels")


def beside(line: dict[str, Any]) -> str:
    """Return the other backends' times in a line of results, as text."""
    text = ""
    for backend in ("triton", "xla"):
        if times := line.get(backend):
            text += f"   {backend} {times['median']:9.2f} us in {times['kernels']:.0f} kernels"
    return text


def record(path: Path | None, **fields: Any) -> None:
    """Append one JSON line with the fields, the hardware and the versions."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    line = fields | {"device": device.device_kind, "platform_version": device.client.platform_version} | versions
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
