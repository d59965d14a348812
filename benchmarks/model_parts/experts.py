"""The routed experts of a layer of V4-Flash: python -m benchmarks.model_parts.experts

Random FP4 weights, and for each token random picks that differ. With --spread, experts are not picked alike: how often
each is picked has a logarithm with this standard deviation. With 0.65, experts have 7 to 364 of 4,096 tokens, much as
with random weights of V4-Flash. L2 is cold, and times are CUPTI's of each launch.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels as pk
from benchmarks.kernels.timing import FLUSH_NAME, Times, flush_buffer, kernel_events, read_all, record
from dsv4jax.weights.stored import ACTIVATIONS

HIDDEN, WIDTH, EXPERTS, PICKS, LIMIT = 4096, 2048, 256, 6, 10.0  # of V4-Flash
TOKENS = 1, 2, 8, 64, 256, 1024, 4096
GATE_UP = pk.ExpertsSpec(experts=EXPERTS, shape=(2 * WIDTH, HIDDEN), interleaved=True)
DOWN = pk.ExpertsSpec(experts=EXPERTS, shape=(HIDDEN, WIDTH), interleaved=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A number of tokens, and the tiles of their pairs."""

    tokens: int
    rows: int
    activations: str
    spread: float

    @classmethod
    def of(cls, tokens: int, activations: str = "bf16", spread: float = 0.0) -> Case:
        rows = pk.tile_rows(tokens, PICKS, EXPERTS)
        return cls(tokens=tokens, rows=rows, activations=activations, spread=spread)

    def picks(self) -> np.ndarray:
        """Return int32 [tokens, k], different and ascending."""
        rng = np.random.default_rng(self.tokens)
        waits = rng.exponential(size=(self.tokens, EXPERTS))  # the first ones to arrive are picked
        order = np.argsort(waits * np.exp(self.spread * rng.standard_normal(EXPERTS)), axis=1)
        return np.sort(order[:, :PICKS], axis=1).astype(np.int32)

    def inputs(self) -> tuple[jax.Array, ...]:
        """Return x, weights of picks, and the tiles."""
        x = jax.random.normal(jax.random.key(self.tokens), (self.tokens, HIDDEN), jnp.bfloat16)
        gains = jax.random.uniform(jax.random.key(1), (self.tokens * PICKS,), jnp.float32)
        routed = jax.jit(lambda picks: pk.routed_tiles(picks, EXPERTS, self.rows))(self.picks())
        return x, gains, routed.pairs, routed.tiles, routed.count

    def products(self, inputs: tuple[Any, ...], weights: Any) -> jax.Array:
        """Return the outputs of all picks, bf16 [tokens, picks, hidden]."""
        x, gains, *routed = inputs
        sizes = {"tokens": self.tokens, "picks": PICKS, "experts": EXPERTS}
        routing = pk.Routing(**sizes, rows=self.rows, activations=self.activations)
        gate_up, down = (dataclasses.replace(spec, activations=self.activations) for spec in (GATE_UP, DOWN))
        inner = _run(gate_up, pk.Gated(routing=routing, limit=LIMIT), x, weights[0], *routed, gains)
        return _run(down, pk.OfPicks(routing=routing), inner, weights[1], *routed)

    def megabytes(self) -> float:
        """Return the bytes of the weights that are read, in MB."""
        per_expert = sum(spec.shape[0] * spec.shape[1] for spec in (GATE_UP, DOWN)) * (1 / 2 + 1 / 32)
        return len(np.unique(self.picks())) * per_expert / 1e6


def _run(spec: pk.ExpertsSpec, epilogue: Any, x: Any, weight: Any, *extras: jax.Array) -> Any:
    rows = pk.RowsSpec(count=x.shape[0], width=spec.inputs)
    problem = pk.Problem(rows=rows, weights=(spec,), epilogues=(epilogue,))
    plan = pk.plan(dataclasses.replace(problem, rows=pk.rows_taken(problem)))
    assert isinstance(plan, pk.Plan), plan
    (made,) = pk.run(plan, x, [weight], *extras)
    return made


def random_weights() -> Any:
    """Return the weights of all experts of a layer, 3.4 GB."""

    @jax.jit
    def make(key: jax.Array) -> Any:
        def one(key: jax.Array, spec: pk.ExpertsSpec) -> Any:
            codes, scales = spec.arrays
            of_codes = jax.random.bits(key, codes.shape, jnp.uint8)
            of_scales = jax.random.randint(key, scales.shape, 117, 123, jnp.uint8)
            return of_codes, lax.bitcast_convert_type(of_scales, jnp.float8_e8m0fnu)

        return [one(key, spec) for key, spec in zip(jax.random.split(key), (GATE_UP, DOWN), strict=True)]

    return jax.block_until_ready(make(jax.random.key(0)))


def timed(case: Case, weights: Any, runs: int = 6) -> dict[str, Times]:
    """Time the launches of each product of a case, by its name."""

    products = jax.jit(case.products)  # is compiled once for all runs

    def program(inputs: Any, weights: Any, buffer: jax.Array, ticket: jax.Array) -> Any:
        made = None
        for _ in range(runs):
            ticket = read_all(buffer, ticket, inputs[-1] if made is None else made)
            # All inputs wait, so that nothing that is made of them is made once for all runs.
            made = products(lax.optimization_barrier((inputs, ticket))[0], weights)
        return read_all(buffer, ticket, made)

    inputs, ticket = case.inputs(), jnp.ones(1, jnp.int32)
    events = kernel_events(jax.jit(program), inputs, weights, flush_buffer(), ticket)
    found: dict[str, list[float]] = {}
    for name, milliseconds in events:
        launch = next((product for product in (pk.Gated.name, pk.OfPicks.name) if product in name), "others")
        if FLUSH_NAME not in name:
            found.setdefault(launch, []).append(milliseconds * 1e3)
    others = sum(found.pop("others", [])) / runs  # such as rows that are put in another order
    times = {name: Times.of(np.reshape(samples, (runs, -1)).sum(axis=1).tolist()) for name, samples in found.items()}
    return times | ({"others": Times.of([others])} if others else {})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=None, help="default both")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    options = parser.parse_args(arguments)
    weights = random_weights()
    kinds = [options.activations] if options.activations else ACTIVATIONS
    for case in (Case.of(int(tokens), kind, options.spread) for kind in kinds for tokens in options.tokens.split(",")):
        times = timed(case, weights)
        total, size = sum(one.median for one in times.values()), case.megabytes()
        each = "   ".join(f"{name} {one.median:8.1f} ({one.low:.1f}-{one.high:.1f})" for name, one in times.items())
        rate = f"{size / total:5.2f} TB/s"
        print(
            f"{case.activations} {case.tokens:5} tokens, tiles of {case.rows:3}: {total:8.1f} us, {rate}   {each}",
            flush=True,
        )
        record(options.out, case=f"experts {case.activations} {case.tokens} tokens", microseconds=total, megabytes=size)


if __name__ == "__main__":
    main()
