"""A demonstration of the cache, checked against known outputs.

On a CPU (``--size recorded``) a tiny layer of each kind serves a ragged batch whose outputs were recorded from
DeepSeek's published inference code, and a tiny model is loaded from a checkpoint and continues a text. On a GPU
(``--size flash``) one layer of each kind has V4-Flash's size, and one request is compared with the library's own full
recompute, on the CPU; then a random model with such layers continues texts. ``--size tiny`` does the same
at a size that any machine can run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from batching import Request, Served, schedule, serve
from occupancy_plot import plot_occupancy
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from dsv4jax.model import (
    Generated,
    Generator,
    ModelConfig,
    ModelParams,
    generate,
    init_caches,
    load_model,
    random_model,
)

RECORDINGS = Path(__file__).parents[1] / "tests" / "data"
XLA_QUICKLY = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


@dataclasses.dataclass(frozen=True)
class Check:
    """How far outputs may be from what they are compared with."""

    tolerance: float
    outliers: float = 0.0  # share of tokens whose error may be larger


# (row format, indexer key format, recorded array) -> layer kind -> Check.
RECORDED = {
    # fp32 sums are in another order: measured 1.3e-6 on outputs up to 1.8.
    ("f32", "f32", "out"): dict.fromkeys(d4.AttentionType, Check(2e-5)),
    # The recording has the rope dims in fp32, but a stored row has them in bfloat16: measured 1.5e-3. On another
    # machine, sums may round an indexer key to the next FP4 value and thus change a pick, which changes a token's
    # output by 0.1 or more.
    ("fp8_tile64", "mxfp4", "out_q"): {
        d4.AttentionType.SWA: Check(2e-3),
        d4.AttentionType.CSA: Check(2e-3, outliers=0.02),
        d4.AttentionType.HCA: Check(2e-3),
    },
}


@dataclasses.dataclass(frozen=True)
class RandomJob:
    """Layers of random bfloat16 weights on random inputs, and a random model."""

    cfg: d4.DSV4Config
    prompts: tuple[int, ...]
    decode: int
    chunk: int
    model: ModelConfig


def one_of_each(cfg: ModelConfig) -> ModelConfig:
    """A model of one layer of each kind, of which the first picks experts by a table."""
    attention = dataclasses.replace(cfg.attention, compress_ratios=(0, 4, 128))
    return dataclasses.replace(cfg, attention=attention, num_hash_layers=1)


# Request 0 is compared. It is so short that the indexer picks every entry, so bfloat16 cannot change a pick, and that a
# recompute on the CPU takes seconds.
RANDOM_JOBS = {
    "flash": RandomJob(
        dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(0, 4, 128)),
        prompts=(300, 1433, 1861, 2297, 2731, 3169, 3593, 4000),
        decode=64,
        chunk=1024,
        model=one_of_each(ModelConfig.flash()),
    ),
    "tiny": RandomJob(
        d4.DSV4Config.tiny(indexer_top_k=64),
        prompts=(131, 150, 190),
        decode=9,
        chunk=64,
        model=ModelConfig.tiny(),
    ),
}
TEXTS, PROMPT, NEW = 4, 64, 64  # that a random model continues
# A token's rms error divided by the rms of all outputs. Activations are rounded to bfloat16 (2^-9) in several places.
# Measured 8e-3 at the tiny size.
RANDOM_TOLERANCE = 2e-2


def recorded_requests(length: int) -> list[Request]:
    """Return five requests, which are prefixes of one recorded sequence.

    Four fit at once. The third ends early, and the last takes its place.
    """
    shares = ((0.6, 1.0), (0.22, 1.0), (0.02, 0.28), (0.43, 0.86), (0.47, 0.88))
    return [Request(prompt=max(1, int(prompt * length)), total=int(total * length)) for prompt, total in shares]


def results_table(title: str, reference: str) -> Table:
    table = Table(title=title, caption="tokens/s over all requests, without compilation")
    for column in ("layer", "rows", "indexer keys"):
        table.add_column(column)
    for column in ("tokens", "entries", f"error against {reference}", "tolerance", "beyond", "prefill/s", "decode/s"):
        table.add_column(column, justify="right")
    return table


def speeds(served: Served) -> tuple[str, str]:
    return f"{served.speed('prefill'):,.0f}", f"{served.speed('decode'):,.0f}"


def run_recorded(console: Console, progress: Progress, kinds: Sequence[d4.AttentionType], picture: Path) -> bool:
    """Serve prefixes of the recorded sequences and compare every output. Returns whether all are within tolerance."""
    archives = {}
    for kind in kinds:
        with np.load(RECORDINGS / f"{kind}.npz") as archive:
            archives[kind] = dict(archive)
    configs = {kind: d4.DSV4Config.from_hf(json.loads(bytes(a["hf_config"]))) for kind, a in archives.items()}
    longest = max(len(a["x"]) for a in archives.values())
    one_of_each = dataclasses.replace(configs[kinds[0]], compress_ratios=(0, 4, 128))
    console.print("A cache with one layer of each recorded kind:\n", style="bold")
    console.print(str(d4.plan_cache(one_of_each, 4, longest, "fp8_tile64", "mxfp4")), highlight=False)
    console.print()

    table = results_table("Recorded layers, five requests in four slots", "recording")
    histories, all_good = {}, True
    for kind, arrays in archives.items():
        cfg = configs[kind]
        names = {name.removeprefix("hf/"): value for name, value in arrays.items() if name.startswith("hf/")}
        params = d4.load_attention_params(names, cfg, 0, naming="hf")
        x = arrays["x"]
        requests = recorded_requests(len(x))
        inputs = jnp.broadcast_to(jnp.asarray(x), (len(requests), *x.shape))
        for (rows, keys, expected), checks in RECORDED.items():
            plan = d4.plan_cache(cfg, 4, len(x), kv_format=rows, indexer_format=keys)
            task = progress.add_task(f"{kind.upper()} {rows}", total=len(schedule(requests, 4, chunk=32)))
            served = serve(plan, (params,), inputs, requests, 32, lambda task=task: progress.advance(task))
            errors = np.concatenate(
                [
                    np.abs(served.output(0, r) - arrays[expected][: request.total]).max(axis=1)
                    for r, request in enumerate(requests)
                ]
            )
            check = checks[kind]
            beyond = int(np.sum(~(errors <= check.tolerance)))  # counts NaN too
            good = beyond <= check.outliers * len(errors)
            all_good &= good
            entries = sum(request.total // cfg.ratio(kind) for request in requests) if cfg.ratio(kind) else 0
            table.add_row(
                kind.upper(),
                rows,
                keys if kind == d4.AttentionType.CSA else "",
                str(len(errors)),
                str(entries),
                f"{errors.max():.1e}",
                f"{check.tolerance:.0e}",
                f"{beyond}",
                *speeds(served),
                style=None if good else "red",
            )
            histories[kind] = served
    plot_occupancy(histories, configs, picture)
    is_good = run_model(console, progress)
    console.print(table)
    return all_good and is_good


def run_model(console: Console, progress: Progress) -> bool:
    """Continue a prompt with a tiny checkpoint. Returns whether the tokens are the recorded ones."""
    folder = RECORDINGS / "model" / "a"
    with np.load(folder / "recorded.npz") as recorded:
        prompt, expected = np.split(recorded["ids"], [recorded["prompt_len"]])
    task = progress.add_task("model f32", total=1)
    params = load_model(folder, weights="f32")
    caches = init_caches(params.cfg, 1, 512, kv_format="f32", indexer_format="f32")
    made = generate(params, [prompt.tolist()], len(expected), stop_tokens=(), caches=caches)
    progress.advance(task)
    progress.stop()
    same = sum(a == b for a, b in zip(made.tokens[0], expected.tolist(), strict=True))
    good = same == len(expected)
    equal = {"equal to recorded": f"{same} of {len(expected)}"}
    title = "A whole model from a checkpoint, the likeliest tokens"
    console.print(model_table(title, params, [prompt.tolist()], made, equal, style=None if good else "red"))
    return good


def model_table(
    title: str,
    params: ModelParams,
    prompts: list[list[int]],
    made: Generated,
    more: dict[str, str],
    style: str | None = None,
) -> Table:
    """One row: a model's sizes, its texts, what ``more`` says, and its speed."""
    new = sum(map(len, made.tokens))
    cells = {
        "layers": f"{params.cfg.num_layers}",
        "experts": f"{params.cfg.num_experts}",
        "weights": f"{d4.cache.tree_bytes(params) / 2**20:,.1f} MiB",
        "prompts": f"{len(prompts)} of {len(prompts[0])}",
        "new tokens": f"{new}",
        **more,
        "tokens/s": f"{new / made.seconds:,.0f}",
    }
    table = Table(title=title, caption="tokens/s with the prompts' passes, without compilation")
    for column in cells:
        table.add_column(column, justify="right")
    table.add_row(*cells.values(), style=style)
    return table


def run_random(console: Console, progress: Progress, size: str, picture: Path) -> bool:
    """Serve random sequences through one layer of each kind, and compare request 0 with a recompute without a cache.

    Nearly all the time is compilation: a random model is compiled beside the layers, and what is timed begins when both
    are done. The recompute runs on the CPU while the model continues texts.
    """
    job = RANDOM_JOBS[size]
    cfg = job.cfg
    requests = [Request(prompt, prompt + job.decode) for prompt in job.prompts]
    longest = max(request.total for request in requests)
    plan = d4.plan_cache(cfg, len(requests), longest)
    console.print(str(plan), highlight=False)
    console.print()
    weights_key, x_key = jax.random.split(jax.random.key(0))
    passes = progress.add_task(f"{size}, bfloat16", total=len(schedule(requests, len(requests), job.chunk)))
    texts = progress.add_task("a random model", total=1)
    with ThreadPoolExecutor() as threads:
        ahead = threads.submit(random_generator, job.model)

        def layer_params(layer: int) -> d4.AttentionParams:
            return d4.init_attention_params(jax.random.fold_in(weights_key, layer), cfg, layer, jnp.bfloat16)

        params = tuple(threads.map(layer_params, range(cfg.num_layers)))
        x = jax.random.normal(x_key, (len(requests), longest, cfg.hidden_size), jnp.bfloat16)
        served = serve(plan, params, x, requests, job.chunk, lambda: progress.advance(passes), ahead.result)
        inputs = np.asarray(x[0, : requests[0].total], np.float32)
        expected = threads.submit(recomputed, params, inputs, plan)
        model, generator = ahead.result()
        prompts = random_prompts(job.model, seed=0)
        made = generator.generate(prompts, NEW, stop_tokens=())
        progress.advance(texts)
        references = expected.result()
    progress.stop()
    title = f"A random model of a layer of each kind, {size} size, weights as stored"
    console.print(model_table(title, model, prompts, made, {"ms a pass": f"{made.seconds / made.passes * 1e3:.2f}"}))

    table = results_table(f"One layer of each kind, {size} size, {len(requests)} requests", "recompute")
    all_good = True
    for layer, spec in enumerate(d4.config.layer_schedule(cfg)):
        length, ratio = requests[0].total, cfg.ratio(spec.attn)
        want, got = references[layer], served.output(layer, 0)
        token_error = np.sqrt(np.mean((got - want) ** 2, axis=1) / np.mean(want**2))
        beyond = int(np.sum(~(token_error <= RANDOM_TOLERANCE)))
        all_good &= not beyond
        table.add_row(
            spec.attn.upper(),
            plan.kv_format,
            plan.indexer_format if spec.attn == d4.AttentionType.CSA else "",
            str(length),
            str(length // ratio if ratio else 0),
            f"{token_error.max():.1e}",
            f"{RANDOM_TOLERANCE:.0e}",
            str(beyond),
            *(speeds(served) if layer == 0 else ("", "")),
            style="red" if beyond else None,
        )
    table.caption = "errors of request 0, relative; tokens/s over all requests and three layers, without compilation"
    console.print(table)
    plot_occupancy(
        {spec.attn: served for spec in d4.config.layer_schedule(cfg)}, dict.fromkeys(d4.AttentionType, cfg), picture
    )
    return all_good


def random_prompts(cfg: ModelConfig, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, (TEXTS, PROMPT)).tolist()


def random_generator(cfg: ModelConfig) -> tuple[ModelParams, Generator]:
    """A random model, and what continues its texts: it has continued others, so that all is compiled."""
    model = random_model(cfg, jax.random.key(1), drafts=0)
    generator = Generator(model, rows=TEXTS)
    generator.generate(random_prompts(cfg, seed=1), 2, stop_tokens=())
    return model, generator


def recomputed(params: Sequence[d4.AttentionParams], x: np.ndarray, plan: d4.CachePlan) -> list[np.ndarray]:
    """The outputs f32 [T, hidden] of each layer on x f32 [T, hidden], without a cache and on the CPU."""
    host = jax.devices("cpu")[0]
    with jax.default_device(host):
        outputs = [
            reference_layer(
                jax.device_put(weights, host), jnp.asarray(x), plan.cfg, layer, plan.kv_format, plan.indexer_format
            )
            for layer, weights in enumerate(params)
        ]
    return [np.asarray(output.out) for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--size", choices=("recorded", *RANDOM_JOBS), help="default: recorded on cpu, flash on gpu")
    kinds = tuple(d4.AttentionType)
    parser.add_argument(
        "--kinds", nargs="+", choices=kinds, default=kinds, type=d4.AttentionType, help="of recorded layers"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    args = parser.parse_args()
    if args.device == "cpu":
        # Nearly all the time on a CPU is compilation, which these two shorten to two fifths.
        os.environ["XLA_FLAGS"] = f"{XLA_QUICKLY} {os.environ.get('XLA_FLAGS', '')}"
        jax.config.update("jax_disable_most_optimizations", True)
        jax.config.update("jax_platforms", "cpu")
    else:
        logging.getLogger("jax").setLevel(logging.CRITICAL)  # plugins log long tracebacks if there is no GPU
        try:
            jax.devices("gpu")
        except RuntimeError as error:
            print(f"No GPU that JAX can use: {error}", file=sys.stderr)
            print("Run with --device cpu, or see why: python -c 'import jax; jax.devices(\"gpu\")'", file=sys.stderr)
            return 2

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"dsv4jax on {jax.devices()[0].device_kind}, jax {jax.__version__}\n", highlight=False)
    size = args.size or ("recorded" if args.device == "cpu" else "flash")
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "occupancy.png"
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        if size == "recorded":
            good = run_recorded(console, progress, args.kinds, picture)
        else:
            good = run_random(console, progress, size, picture)
    console.print(f"\nWho held what over time: {picture}", highlight=False)
    if not good:
        console.print("Outputs differ from what they should be by more than the tolerance.", style="bold red")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
