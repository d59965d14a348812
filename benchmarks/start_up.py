"""How long from the start of a process to its first decode step? python -m benchmarks.start_up --cache-dir DIR

Every column is a fresh process: one without a compilation cache and, with --cache-dir, one that fills the cache in that
directory and one that finds it full. The first phase begins when the process is started, each of the others where the
one before it ends. The step is that of all layers of V4-Flash in bf16, each with weights of its own. With --overlap it
is compiled in a thread while weights and cache are made.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Nothing else is imported before the clock runs: how long that takes is the first thing to know.


class Phases:
    """Seconds of each phase, one after another, since a moment of the system's monotonic clock."""

    def __init__(self, started: float):
        self.started, self.last = started, started
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What was done since the phase before."""
        now = time.monotonic()
        self.seconds[name], self.last = now - self.last, now


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Everything up to the first decode step, in this process."""
    phases = Phases(options.started)
    import jax
    import jax.numpy as jnp

    phases.end("Python, import jax")
    import dsv4jax as d4

    phases.end("import dsv4jax")
    programs = Programs(jax)
    if options.cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache_dir))
        # jax keeps programs of a second and more; of the small ones, each costs a few tenths again.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    device = jax.devices()[0]
    phases.end("find the device")

    import dataclasses
    import functools
    from concurrent.futures import ThreadPoolExecutor

    cfg, dtype = d4.DSV4Config.flash(), jnp.bfloat16
    requests, context = options.requests, options.context
    if options.tiny:
        cfg, dtype, requests, context = d4.DSV4Config.tiny(), jnp.float32, 4, 512
    cfg = dataclasses.replace(cfg, compress_ratios=cfg.compress_ratios[: options.layers])
    plan = d4.plan_cache(cfg, requests, context, indexer_format="mxfp4", hca_tail=options.hca_tail, headroom=1.0)

    def make_params() -> list[d4.AttentionParams]:
        return [d4.init_attention_params(jax.random.key(i), cfg, i, dtype) for i in range(cfg.num_layers)]

    def make_cache() -> tuple[d4.KVCache, jax.Array]:
        cache, slots, _ = d4.admit(d4.init_cache(plan), requests)
        return cache, slots

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(params: Any, x: jax.Array, cache: d4.KVCache, slots: jax.Array) -> Any:
        one = jnp.ones_like(slots)
        cache, ok = d4.prepare_forward(cache, slots, one)
        for layer in range(cfg.num_layers):
            y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, one)
            x = x + y
        return x, d4.advance(cache, slots, one), ok

    def lower() -> Any:
        """Of shapes alone: no weight need be there yet."""
        x = jax.ShapeDtypeStruct((requests, 1, cfg.hidden_size), dtype)
        traced = step.trace(jax.eval_shape(make_params), x, *jax.eval_shape(make_cache))
        phases.end("trace")
        lowered = traced.lower()
        phases.end("lower")
        return lowered

    def make_inputs() -> tuple[Any, ...]:
        params = jax.block_until_ready(make_params())
        phases.end("weights")
        cache, slots = jax.block_until_ready(make_cache())
        phases.end("cache")
        return params, jnp.ones((requests, 1, cfg.hidden_size), dtype), cache, slots

    lowered = lower()
    if options.overlap:
        with ThreadPoolExecutor(max_workers=1) as thread:
            compiling = thread.submit(lowered.compile)
            inputs = make_inputs()
            compiled = compiling.result()
        phases.end("rest of the compilation")
    else:
        inputs = make_inputs()
        compiled = lowered.compile()
        phases.end("compile")
    params, x, cache, slots = inputs
    x, cache, ok = jax.block_until_ready(compiled(params, x, cache, slots))
    phases.end("first step")
    counts = programs.counts()
    assert bool(ok)
    assert bool(jnp.isfinite(x).all())
    return {
        "seconds": phases.seconds,
        "total": phases.last - phases.started,
        "programs": counts,
        "case": f"{cfg.num_layers} layers, {requests} requests of {context} tokens, {jnp.dtype(dtype).name}",
        "device": device.device_kind,
        "platform_version": device.client.platform_version,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


class Programs:
    """Counts the programs that are compiled or read from the cache, by what jax reports of them."""

    def __init__(self, jax: Any):
        self.compiled, self.read = 0, 0
        jax.monitoring.register_event_duration_secs_listener(self._timed)
        jax.monitoring.register_event_listener(self._happened)

    def _timed(self, event: str, seconds: float, **_: Any) -> None:
        self.compiled += event == "/jax/core/compile/backend_compile_duration"

    def _happened(self, event: str, **_: Any) -> None:
        self.read += event == "/jax/compilation_cache/cache_hits"

    def counts(self) -> dict[str, int]:
        """A program that is read counts as compiled too, in jax's reports."""
        return {"compiled": self.compiled - self.read, "read from the cache": self.read}


def in_a_process(options: argparse.Namespace, cache_dir: Path | None) -> dict[str, Any]:
    """Run ``start`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.start_up", "--requests", str(options.requests)]
    command += ["--context", str(options.context), "--layers", str(options.layers), "--hca-tail", options.hca_tail]
    command += ["--tiny"] * options.tiny + ["--overlap"] * options.overlap
    command += [] if cache_dir is None else ["--cache-dir", str(cache_dir)]
    command += ["--started", repr(time.monotonic())]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"the process that was timed ended with {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


def print_table(runs: dict[str, dict[str, Any]]) -> None:
    first, width = next(iter(runs.values())), max(map(len, runs)) + 4
    overlaps = "rest of the compilation" in first["seconds"]
    print(f"{first['device']}, jax {first['jax']}, jaxlib {first['jaxlib']}: {first['case']}")
    print(" " * 28 + "".join(f"{name:>{width}}" for name in runs))
    for phase in first["seconds"]:
        print(f"{phase:28}" + "".join(f"{run['seconds'][phase]:>{width - 2}.2f} s" for run in runs.values()))
    total = "total, compiling beside" if overlaps else "total"
    print(f"{total:28}" + "".join(f"{run['total']:>{width - 2}.2f} s" for run in runs.values()))
    for what in first["programs"]:
        print(f"{'programs ' + what:28}" + "".join(f"{run['programs'][what]:>{width}}" for run in runs.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, help="of jax's compilation cache; give a new one for cold figures")
    parser.add_argument("--overlap", action="store_true", help="compile the step while weights and cache are made")
    parser.add_argument("--tiny", action="store_true", help="a small model in f32, for a CPU")
    parser.add_argument("--layers", type=int, default=43, help="of V4-Flash, the first ones")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--hca-tail", choices=("online", "ring"), default="online")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, to which a line is added for each process")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # this is a process that is timed
    options = parser.parse_args()
    if options.started is not None:
        print(json.dumps(start(options)))
        return

    runs = {"no cache": in_a_process(options, None)}
    if options.cache_dir is not None:
        was_empty = not options.cache_dir.exists() or not any(options.cache_dir.iterdir())
        runs["cache empty" if was_empty else "cache as given"] = in_a_process(options, options.cache_dir.resolve())
        runs["cache full"] = in_a_process(options, options.cache_dir.resolve())
    print_table(runs)
    if options.out is not None:
        with options.out.open("a") as file:
            for name, run in runs.items():
                file.write(json.dumps({"run": name, "overlap": options.overlap} | run) + "\n")


if __name__ == "__main__":
    main()
