"""How fast does a whole model generate? python -m benchmarks.model

A random model with the first layers of V4-Flash continues random prompts, without and with drafts. All 43 layers take
149 GiB, more than one GPU has. Times exclude compilation and include the prompts. Random drafts are rarely accepted, so
passes with drafts show their price and not what they save.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np

import dsv4jax as d4
from benchmarks.kernels.timing import record
from dsv4jax.model import ModelConfig, Sampling, generate, random_model
from dsv4jax.weights.stored import LAYER_ACTIVATIONS


def config(layers: int, *, is_tiny: bool) -> ModelConfig:
    """The first layers of V4-Flash, or a model for a CPU."""
    whole = ModelConfig.tiny() if is_tiny else ModelConfig.flash()
    ratios = whole.attention.compress_ratios[:layers]
    return dataclasses.replace(
        whole,
        attention=dataclasses.replace(whole.attention, compress_ratios=ratios),
        num_hash_layers=min(whole.num_hash_layers, len(ratios)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", default="1,16", help="prompts at a time")
    parser.add_argument("--drafts", default="0,2", help="per pass")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--max-new", type=int, default=64, help="tokens to add to each")
    parser.add_argument("--activations", choices=LAYER_ACTIVATIONS, default="bf16", help="inputs of stored weights")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    options = parser.parse_args()
    cfg = config(options.layers, is_tiny=options.tiny)
    params = jax.block_until_ready(random_model(cfg, jax.random.key(0), activations=options.activations))
    size = d4.cache.tree_bytes(params)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {cfg.num_layers} layers, {size / 1e9:.1f} GB")
    rng = np.random.default_rng(0)
    for requests in map(int, options.requests.split(",")):
        prompts = rng.integers(0, cfg.vocab_size, (requests, options.prompt)).tolist()
        for drafts in map(int, options.drafts.split(",")):
            made = generate(params, prompts, options.max_new, Sampling.of(temperature=1.0), drafts, stop_tokens=[])
            count = sum(map(len, made.tokens))
            case = f"generate {cfg.num_layers} layers B{requests} drafts {drafts} {options.activations}"
            speed, per_pass = count / made.seconds, made.seconds / made.passes * 1e3
            print(f"{case:44} {speed:9.1f} tokens/s, {per_pass:.2f} ms a pass of {made.passes}", flush=True)
            record(options.out, case=case, tokens_per_second=speed, ms_per_pass=per_pass, bytes_of_weights=size)


if __name__ == "__main__":
    main()
