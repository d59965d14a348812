"""A model that keeps the routed experts of some layers in host memory: python -m benchmarks.model_parts.host_experts

Prints bytes on the device, the wall time of a token of one text by the loop that generates, and what a step does to
fetch picked experts, by the names of kernels and copies. Weights are random, in the formats of checkpoints.
"""

from __future__ import annotations

import dataclasses
import time

import jax

from benchmarks.kernels.timing import Times, kernel_events, record
from benchmarks.model_parts.mesh import ready
from benchmarks.model_parts.sizes import model_of, parser_of
from benchmarks.model_parts.texts import time_texts
from benchmarks.model_parts.whole import added, step
from dsv4jax.model import random_model

TOKENS = 65


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--host", default="5", help="layers with experts in host memory; several numbers one by one")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--kernels", action="store_true", help="also what a step runs, by name")
    options = parser.parse_args(arguments)
    cfg = model_of(options)
    for host in map(int, options.host.split(",")):
        began = time.perf_counter()
        params = jax.block_until_ready(random_model(cfg, jax.random.key(0), drafts=0, host_experts=host))
        held = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0) / 2**30
        print(f"made in {time.perf_counter() - began:.0f} s, {held:.1f} GiB on the device", flush=True)
        times = Times.of([text.again / text.passes for text in time_texts(params, options.context, TOKENS)])
        case = f"token of one text, {cfg.num_layers} layers, experts of {host} on the host, {options.context} tokens"
        print(f"{case}: {times.median:.2f} ms [{times.low:.2f}, {times.high:.2f}]", flush=True)
        record(options.out, case=case, ms=dataclasses.asdict(times), gib=held)
        if options.kernels:
            sums = added([], kernel_events(jax.jit(step), params, *ready(params, 1, options.context)))
            for name, ms in sorted(sums.items(), key=lambda item: -item[1])[:24]:
                print(f"        {ms:9.3f} ms {name[:100]}", flush=True)


if __name__ == "__main__":
    main()
