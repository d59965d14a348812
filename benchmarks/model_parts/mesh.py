"""The whole model on several devices: python -m benchmarks.model_parts.mesh --mesh 1x2

    same    a few layers: tokens of a small model in f32 on the mesh and on one device, and logits of layers of
            V4-Flash's sizes as stored
    made    seconds to draw the weights where they lie, and bytes on each device
    token   wall time of a token of one text after 4,096, by the loop that generates
    prompt  wall time of a prompt of 4,096 tokens to the first new one
    step    wall time of decode steps of --steps, several in a row; of the last also on the mesh turned round
    kernels what the kernels of these steps, and of the prompt's pass, take on a device, by name
    folder  seconds to write the weights as a checkpoint, and to load it from the page cache on to the mesh

The last two run only when they are named. Weights are drawn in the formats of checkpoints, of as many layers as are
asked for. What requests hold before a step is granted and counted, but not computed: rows of zeros.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dsv4jax as d4
from benchmarks.kernels.timing import Times, kernel_events, record
from benchmarks.model_parts.sizes import model_of, parser_of, with_layers
from benchmarks.model_parts.texts import time_texts
from benchmarks.model_parts.whole import step
from dsv4jax.generate import mesh_of
from dsv4jax.model import (
    ModelConfig,
    ModelParams,
    forward,
    generate,
    init_caches,
    load_model,
    random_model,
    save_model,
)
from dsv4jax.model.inside.devices import weight_specs
from dsv4jax.weights.stored import LAYER_ACTIVATIONS

PARTS = "same", "made", "token", "prompt", "step"
ON_DEMAND = "kernels", "folder"  # which compile more programs, and fill the disk
IN_A_ROW, ROUNDS = 10, 3
ROOM = 256  # tokens that requests can grow by
FIRST = 1, 33, 256  # tokens whose logits are compared: the outputs of few are gathered, and many are divided


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes and options of a run."""

    mesh: Mesh
    cfg: ModelConfig
    steps: tuple[tuple[int, int], ...]  # (requests, tokens that each has)
    context: int  # tokens of a prompt
    out: Path | None

    def note(self, case: str, text: str, **fields: Any) -> None:
        case = f"{case}, {self.cfg.num_layers} layers, {named(self.mesh)}"
        print(f"{case:48} {text}", flush=True)
        record(self.out, case=case, **fields)


def named(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape.values()))


def turned(mesh: Mesh) -> Mesh:
    """The mesh of the same devices in the same order with its axes' sizes exchanged."""
    sizes = tuple(reversed(mesh.shape.values()))
    return jax.make_mesh(sizes, mesh.axis_names, devices=mesh.devices.ravel().tolist())


def on_mesh(params: ModelParams, mesh: Mesh) -> ModelParams:
    """The same weights over another mesh of the same devices: they stay where they are."""
    mesh = Mesh(mesh.devices, mesh.axis_names)
    return dataclasses.replace(jax.device_put(params, weight_specs(params, mesh)), mesh=mesh)


def compare(bench: Bench) -> None:
    tiny, key = ModelConfig.tiny(), jax.random.key(0)
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    made = {}
    for mesh in (None, bench.mesh, turned(bench.mesh)):
        params = random_model(tiny, key, weights="f32", mesh=mesh)
        caches = init_caches(tiny, 4, 256, kv_format="f32", indexer_format="f32", mesh=mesh)
        made["one" if mesh is None else named(mesh)] = generate(params, prompts, 24, caches=caches).tokens
    print("tokens of a small model in f32 equal those of one device:", {k: v == made["one"] for k, v in made.items()})

    few = with_layers(bench.cfg, bench.cfg.attention.compress_ratios[:4], 1)
    logits: dict[bool, list[np.ndarray]] = {}
    for mesh in (None, bench.mesh):
        params = random_model(few, key, drafts=0, mesh=mesh)
        logits[mesh is None] = [first_logits(params, tokens) for tokens in FIRST]
        del params
    for tokens, one, other in zip(FIRST, logits[True], logits[False], strict=True):
        difference = np.sqrt(np.mean((one - other) ** 2) / np.mean(one**2))
        said = f"logits of {few.num_layers} layers as stored, after {tokens} tokens, differ from one device's by"
        print(f"{said} {difference:.2e} of their rms")


def first_logits(params: ModelParams, tokens: int) -> np.ndarray:
    """The logits of two requests after their first tokens, at most so many."""
    cache, slots, _ = init_caches(params.cfg, 2, 256, mesh=params.mesh).admit(2)
    counts = jnp.asarray([tokens, min(7, tokens)], jnp.int32)
    cache, _ = d4.prepare_forward(cache.model, slots, counts)
    ids = np.random.default_rng(0).integers(0, params.cfg.vocab_size, (2, tokens))
    return np.asarray(forward(params, jnp.asarray(ids, jnp.int32), cache, slots, counts)[0])


def ready(params: ModelParams, requests: int, context: int, tokens: int = 1) -> tuple[jax.Array, d4.KVCache, jax.Array]:
    """Return (ids [B, tokens], cache, slots) of requests that have ``context`` tokens each."""
    caches = init_caches(params.cfg, requests, context + tokens + ROOM, mesh=params.mesh, headroom=1.0)
    caches, slots, _ = caches.admit(requests)
    stored = jnp.full(requests, context, jnp.int32)
    cache, ok = d4.prepare_forward(caches.model, slots, stored)
    assert np.all(jax.device_get(ok)), "no room"
    ids = jnp.asarray(np.random.default_rng(1).integers(0, params.cfg.vocab_size, (requests, tokens)), jnp.int32)
    return ids, d4.advance(cache, slots, stored), slots


def time_steps(bench: Bench, params: ModelParams) -> None:
    for requests, context in bench.steps:
        ids, cache, slots = ready(params, requests, context)
        began = time.perf_counter()
        program = jax.jit(step, donate_argnums=2).lower(params, ids, cache, slots).compile()
        compiled, samples = time.perf_counter() - began, []
        for _ in range(1 + ROUNDS):
            jax.block_until_ready(cache)
            began, oks = time.perf_counter(), []
            for _ in range(IN_A_ROW):
                ids, cache, ok = program(params, ids, cache, slots)
                oks.append(ok)
            jax.block_until_ready((ids, cache))
            samples.append((time.perf_counter() - began) / IN_A_ROW * 1e3)
            assert np.all(jax.device_get(oks)), "a request was refused"
            assert np.any(jax.device_get(ids)), "logits of tokens that were not taken are 0"
        times = Times.of(samples[1:])
        text = f"{times.median:9.3f} ms [{times.low:.3f}, {times.high:.3f}], compiled in {compiled:.0f} s"
        bench.note(f"step B{requests} {context}", text, ms=dataclasses.asdict(times))
        del cache


def show_kernels(bench: Bench, params: ModelParams) -> None:
    """Print what kernels of a pass take, by name: the mean of devices. A sum includes waiting for the other device."""
    passes = {f"kernels B{requests} {context}": (requests, context, 1) for requests, context in bench.steps}
    for case, sizes in (passes | {f"kernels prompt {bench.context}": (1, 0, bench.context)}).items():
        sums: dict[str, float] = {}
        for name, ms in kernel_events(jax.jit(step), params, *ready(params, *sizes)):
            name = name.rstrip("0123456789_.")
            sums[name] = sums.get(name, 0.0) + ms / bench.mesh.size
        bench.note(case, f"{sum(sums.values()):9.3f} ms", ms=sums)
        for name, ms in sorted(sums.items(), key=lambda item: -item[1])[:24]:
            print(f"        {ms:9.3f} ms {name[:100]}", flush=True)


def time_prompts(bench: Bench, params: ModelParams, activations: str) -> None:
    times = Times.of([text.first for text in time_texts(params, bench.context, 1)])
    text = f"{times.median:9.1f} ms to the first token [{times.low:.1f}, {times.high:.1f}]"
    bench.note(f"prompt of {bench.context} tokens, {activations}", text, ms=dataclasses.asdict(times))


def time_tokens(bench: Bench, params: ModelParams) -> None:
    times = Times.of([text.again / text.passes for text in time_texts(params, bench.context, 65)])
    text = f"{times.median:9.3f} ms [{times.low:.3f}, {times.high:.3f}]"
    bench.note("token of one text", text, ms=dataclasses.asdict(times))


def time_folder(bench: Bench, params: ModelParams) -> None:
    """Write the weights, forget them, and load them."""
    size = d4.cache.tree_bytes(params) / 2**30
    last = jax.device_get(params.blocks[-1].attention)
    with tempfile.TemporaryDirectory() as parent:
        began, folder = time.perf_counter(), Path(parent) / "model"
        save_model(params, folder)
        bench.note("folder written", f"{time.perf_counter() - began:.0f} s")
        jax.tree.map(lambda leaf: leaf.delete(), params)
        began = time.perf_counter()
        loaded = jax.block_until_ready(load_model(folder, mesh=bench.mesh))
        seconds = time.perf_counter() - began
    pairs = zip(jax.tree.leaves(last), jax.tree.leaves(loaded.blocks[-1].attention), strict=True)
    assert all(before.tobytes() == np.asarray(after).tobytes() for before, after in pairs)
    text = f"{seconds:.1f} s, {size:.1f} GiB: {seconds / size:.2f} s per GiB"
    bench.note("folder loaded", text, seconds=seconds, gib=size)


def two_numbers(text: str) -> tuple[int, int]:
    """Return the numbers of a text such as 64x32768."""
    first, second = map(int, text.split("x"))
    return first, second


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mesh", type=mesh_of, default="1x2")
    parser.add_argument("--part", action="append", choices=PARTS + ON_DEMAND, help="may be repeated")
    parser.add_argument("--steps", default="1x4096,64x32768,256x8192", help="requests x the tokens that each has")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--activations", choices=LAYER_ACTIVATIONS, default="bf16")
    options = parser.parse_args(arguments)
    cfg = model_of(options)
    steps = tuple(two_numbers(each) for each in options.steps.split(","))
    bench = Bench(mesh=options.mesh, cfg=cfg, steps=steps, context=options.context, out=options.out)
    parts = options.part or PARTS
    if "same" in parts:
        compare(bench)
    if not set(parts) - {"same"}:
        return
    began = time.perf_counter()
    params = jax.block_until_ready(
        random_model(cfg, jax.random.key(0), activations=options.activations, drafts=0, mesh=bench.mesh)
    )
    seconds, size = time.perf_counter() - began, d4.cache.tree_bytes(params)
    own = sum(part.data.nbytes for leaf in jax.tree.leaves(params) for part in leaf.addressable_shards[:1])
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in bench.mesh.devices.flat]
    text = f"{seconds:.0f} s, {size / 2**30:.1f} GiB in all, {own / 2**30:.1f} on a device; peaks "
    bench.note("made", text + ", ".join(f"{peak / 2**30:.1f}" for peak in peaks), seconds=seconds, bytes=own)
    if "token" in parts:
        time_tokens(bench, params)
    if "prompt" in parts:
        time_prompts(bench, params, options.activations)
    if "step" in parts:
        time_steps(bench, params)
        time_steps(
            dataclasses.replace(bench, mesh=turned(bench.mesh), steps=steps[-1:]),
            on_mesh(params, turned(bench.mesh)),
        )
    if "kernels" in parts:
        show_kernels(bench, params)
    if "folder" in parts:
        time_folder(bench, params)


if __name__ == "__main__":
    main()
