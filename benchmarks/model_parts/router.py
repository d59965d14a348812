"""The router of a layer of V4-Flash, with the tiles that experts multiply: python -m benchmarks.model_parts.router

L2 is cold, and times are CUPTI's, of all launches together. Where XLA multiplies, its launches are counted too.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from benchmarks.kernels.timing import Times, kernel_times, record

HIDDEN, EXPERTS, PICKS, SCALE, VOCABULARY = 4096, 256, 6, 1.5, 129280  # of V4-Flash
TOKENS = 1, 8, 64, 128, 256, 1024, 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A number of tokens, and how they pick."""

    tokens: int
    by_id: bool = False  # whether a table says it

    def inputs(self) -> tuple[Any, ...]:
        """Return x, the gate and what decides beside them."""
        keys = jax.random.split(jax.random.key(self.tokens), 5)
        x = jax.random.normal(keys[0], (self.tokens, HIDDEN), jnp.bfloat16)
        gate = jax.random.normal(keys[1], (EXPERTS, HIDDEN), jnp.bfloat16) * HIDDEN**-0.5
        real, bias, table, ids = jnp.ones(self.tokens, bool), None, None, None
        if self.by_id:
            table = jax.random.randint(keys[2], (VOCABULARY, PICKS), 0, EXPERTS)
            ids = jax.random.randint(keys[3], (self.tokens,), 0, VOCABULARY)
        else:
            bias = jax.random.normal(keys[4], (EXPERTS,)) * 0.1
        return x, gate, pk.PickInputs(real=real, bias=bias, table=table, ids=ids)

    def timed(self) -> Times:
        def update(before: Any, inputs: Any, ticket: jax.Array) -> Any:
            # All inputs wait, so that XLA does not multiply once for all runs.
            x, gate, picks = lax.optimization_barrier((inputs, ticket))[0]
            routed = pk.route(x, gate, picks, picks=PICKS, scale=SCALE)
            return routed.experts, routed.weights, routed.tiles.pairs, routed.tiles.tiles, routed.tiles.count

        return kernel_times(update, jnp.zeros(1), self.inputs(), runs=12)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    options = parser.parse_args(arguments)
    for tokens in map(int, options.tokens.split(",")):
        for by_id in (False, True):
            times = Case(tokens=tokens, by_id=by_id).timed()
            how = "table" if by_id else "bias"
            spread = f"({times.low:.2f}-{times.high:.2f}) in {times.kernels:.0f} launches"
            print(f"{tokens:5} tokens, {how:5}: {times.median:8.2f} us {spread}", flush=True)
            record(options.out, case=f"router {tokens} tokens, {how}", **dataclasses.asdict(times))


if __name__ == "__main__":
    main()
