"""Does an invariant cache keep its promise on this device? python -m benchmarks.same_bits

Layers of V4-Flash's sizes, one of each kind, with weights as stored, and a model around three such layers run requests
one token after the other, each alone; and again in random batches of chunks, single tokens, drafts and padding, in
other slots and pages. Prints how many batches there were, and how many bits of outputs, logits and stored bytes differ:
0, but for the last line, which has a cache that is not invariant.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from dsv4jax.model import ModelConfig, random_model
from tests.support.same_bits import Run, different_bits, each_alone, feed, random_passes, run_layers, run_model

LENGTHS = 151, 60, 5, 130, 33  # tokens of each request
SHAPES = (5, 128), (64, 40), (256, 9)  # of batches: the most rows, and tokens of a row
CONTEXT = 512  # tokens, more than a request and a draft after it
OF_MODEL = (5, 128), (64, 40), (256, 3)  # whose logits take more memory
PARTS = "layers", "model"
FORMATS: dict[str, dict[str, Any]] = {
    "fp8_tile64, mxfp4, online": {"kv_format": "fp8_tile64", "indexer_format": "mxfp4", "hca_tail": "online"},
    "defaults": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes and options of a run."""

    rounds: int
    is_tiny: bool

    def plan(self, cfg: d4.DSV4Config, *, invariant: bool, **formats: Any) -> d4.CachePlan:
        return d4.plan_cache(cfg, len(LENGTHS) + 1, CONTEXT, invariant=invariant, **formats)

    def report(self, name: str, run: Run, plan: d4.CachePlan, inputs: list[np.ndarray], shapes: Any) -> None:
        """Compare requests in random batches with each alone, and print what differs."""
        began, batches, differing = time.perf_counter(), 0, 0
        single, rng = each_alone(run, plan, inputs), np.random.default_rng(0)
        for number in range(self.rounds):
            for rows, width in ((3, 6),) if self.is_tiny else shapes:
                passes = random_passes(rng, [len(one) for one in inputs], rows, width)
                batches += len(passes)
                for request, found in feed(run, plan, inputs, passes, 100 + number).items():
                    differing += sum(different_bits(found, single[request]).values())
        seconds = time.perf_counter() - began
        print(f"{name:44} {batches:5} batches, {differing} bits differ, in {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="times that all requests are fed in each size of batch")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default all")
    options = parser.parse_args()
    bench = Bench(rounds=options.rounds, is_tiny=options.tiny)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    whole = ModelConfig.tiny() if options.tiny else ModelConfig.flash()
    attention = dataclasses.replace(whole.attention, compress_ratios=(0, 4, 128))
    cfg = dataclasses.replace(whole, attention=attention, num_hash_layers=1)
    lengths, rng = [n // (8 if options.tiny else 1) or 1 for n in LENGTHS], np.random.default_rng(1)

    x = [np.asarray(jnp.asarray(rng.standard_normal((n, attention.hidden_size)), jnp.bfloat16)) for n in lengths]
    parts = options.part or PARTS
    if "layers" in parts:
        of_layers = [
            d4.init_attention_params(jax.random.key(layer), attention, layer, jnp.bfloat16, weights="stored")
            for layer in range(3)
        ]
        for name, formats in FORMATS.items():
            plan = bench.plan(attention, invariant=True, **formats)
            bench.report(f"three layers, {name}", run_layers(of_layers), plan, x, SHAPES)
    if "model" in parts:
        ids = [rng.integers(0, cfg.vocab_size, n, np.int32) for n in lengths]
        params = random_model(cfg, jax.random.key(0), drafts=0)
        for invariant in (True, False):
            plan = bench.plan(attention, invariant=invariant)
            name = "a model of three layers" + ("" if invariant else ", not invariant")
            bench.report(name, run_model(params), plan, ids, OF_MODEL)


if __name__ == "__main__":
    main()
