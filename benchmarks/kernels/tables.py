"""The tables of README.md and docs/, made of the recorded lines. ``report`` puts them in their places."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from benchmarks.kernels.lines import Line, Results
from dsv4jax.config import DSV4Config, layer_kind

KINDS = {"csa": "CSA", "hca": "HCA", "swa": "window alone"}
ACTIVATIONS = {
    "bf16": "bf16 activations",
    "fp8": "FP8 activations",
    "fp8_all": "FP8 activations, W_oa's too",
}
FLASH = DSV4Config.flash()
ALL_EARLIER = "All of these are older than the last change of what they time."
EARLIER = "*"  # of a figure that is older than the last change of what it times


def table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Markdown; the names of the columns are separated by bars."""
    columns = head.split(" | ")
    rows = list(rows)
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    marked = {tuple(cell.endswith(EARLIER) for cell in row) for row in rows}
    if len(marked) == 1 and any(*marked):
        return re.sub(r"\* \|", " |", text) + f"\n\n{ALL_EARLIER}"  # a mark that all have tells nothing apart
    return text


def us(line: Line | None, backend: str = "pallas") -> str:
    """The median of a line's times; "-" where it was not timed."""
    if line is None or (backend in ("pallas", "xla") and backend not in line):
        return "-"
    mark = EARLIER if "run" in line and backend == "pallas" else ""
    return number(line[backend]["median"]) + mark


def number(value: float) -> str:
    """Three figures, or all in front of the point."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"


def spread(times: Line) -> str:
    return f"{number(times['low'])}-{number(times['high'])}"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def public(line: Line | None) -> str:
    """As it was noted, without more figures."""
    return "-" if line is None else f"{line['us']:,}"


def requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


# What README shows of each sort of work: words, and the case.
SUMMARY = {
    "CSA attention, 1 request (64 heads, 128 + 512 keys)": "attention csa B1 64 heads 128 + 512 fp8_row",
    "CSA attention, 64 requests": "attention csa B64 64 heads 128 + 512 fp8_row",
    "CSA attention, 256 requests": "attention csa B256 64 heads 128 + 512 fp8_row",
    "HCA attention, 1 request (128 + 1,024 keys)": "attention hca B1 64 heads 128 + 1024 fp8_row",
    "CSA attention of a 4,096-token chunk": "attention csa B1 x 4096 tokens 64 heads 128 + 512 fp8_row",
    "indexer scores, 64 requests of 32,768 entries, `mxfp4`": "indexer mxfp4 B64 x 32768",
    "top-k, 64 requests, 8,192 to 512": "topk B64 8192 to 512",
}


def summary(results: Results) -> str:
    """README's table: eight rows."""
    rows = []
    for words, case in SUMMARY.items():
        line, beside = results.case(case), results.public_beside(case)
        assert beside is not None, case
        rows.append((words, us(line), f"{public(beside)} ({beside['library']})", us(line, "xla")))
    update = results.case("flash csa B64 T1 all fp8_row")
    parts = [line for line in results.public if line["device"] == update["device"]]
    insert = next(line for line in parts if "inserted" in line["kernel"] and line["case"] == "64 rows")
    entry = next(line for line in parts if "every request" in line["kernel"] and line["case"] == requests(64))
    both = f"{insert['us'] + entry['us']:.1f} (vLLM's insert and SGLang's compressor; the indexer's key not counted)"
    rows.append(
        ("cache update of a CSA layer, 64 requests, each completes an entry", us(update), both, us(update, "xla"))
    )
    return table("kernel time in us | this library | public CUDA | plain JAX", rows)


FLUSHING = {
    ("csa", "all"): "every request",
    ("csa", "mix"): "one in 4",
    ("hca", "all"): "every request",
    ("hca", "mix"): "one in 128",
}


def _layer(line: Line) -> str:
    return KINDS[line["kind"]] + (f", {line['hca_tail']} tail" if line["kind"] == "hca" else "")


def _writes(line: Line) -> tuple[str, ...]:
    xla = f"{us(line, 'xla')} in {line['xla']['kernels']:g}" if "xla" in line else "-"
    return us(line), spread(line["pallas"]), xla, percent(line["share of copy ceiling"])


def update_decode(results: Results) -> str:
    """One token per request."""
    chosen = [line for line in results.updates if line.get("tokens") == 1]
    chosen = [line for line in chosen if (line["model"], line["kv_format"]) == ("flash", "fp8_row")]
    flushings = ("all", "mix", "none")
    chosen.sort(key=lambda x: (list(KINDS).index(x["kind"]), x["hca_tail"], flushings.index(x["flushing"]), x["batch"]))
    rows = [
        (_layer(line), FLUSHING.get((line["kind"], line["flushing"]), "none"), str(line["batch"]), *_writes(line))
        for line in chosen
    ]
    head = (
        "layer | completes an entry | requests | us | 10th-90th percentile | XLA, us in kernels | of the copy ceiling"
    )
    return table(head, rows)


def update_other(results: Results) -> str:
    """Other formats, and V4-Pro."""
    chosen = [line for line in results.updates if line.get("tokens") == 1]
    chosen = [line for line in chosen if (line["model"], line["kv_format"]) != ("flash", "fp8_row")]
    rows = [
        (
            f"V4-{line['model'].title()}",
            _layer(line),
            f"`{line['kv_format']}`, `{line['indexer_format']}`",
            str(line["batch"]),
            *_writes(line),
        )
        for line in chosen
    ]
    head = "model | layer | formats | requests | us | 10th-90th percentile | XLA, us in kernels | of the copy ceiling"
    return table(head, rows)


def update_chunk(results: Results) -> str:
    """Chunks of a prompt."""
    chosen = [line for line in results.updates if line.get("flushing") == "chunk"]
    chosen.sort(key=lambda x: (list(KINDS).index(x["kind"]), x["hca_tail"], x["batch"], x["tokens"]))
    rows = [(_layer(line), str(line["batch"]), f"{line['tokens']:,}", *_writes(line)) for line in chosen]
    head = "layer | requests | tokens of each | us | 10th-90th percentile | XLA, us in kernels | of the copy ceiling"
    return table(head, rows)


def gather(results: Results) -> str:
    """Stored rows as bf16 ones."""
    rows = []
    for line in results.updates:
        if line["case"].startswith("gather"):
            *what, form, count = line["case"].removeprefix("gather ").split()
            words = "8,192 rows of a request, in order" if what[0] == "all" else "8,192 rows by a list"
            assert int(count) == 8192
            beside = results.public_beside(line["case"])
            rows.append((words, f"`{form}`", *_writes(line)[:2], public(beside), *_writes(line)[2:]))
    head = "what | rows | us | 10th-90th percentile | vLLM (Triton) | XLA, us in kernels | of the copy ceiling"
    return table(head, rows)


def _of_op(results: Results, op: str) -> list[Line]:
    return [line for line in results.reads if line.get("op") == op]


def _batch(line: Line) -> str:
    return str(line["batch"]) + (f", {line['tokens']:,} tokens each" if line["tokens"] > 1 else "")


def _share(line: Line) -> str:
    return percent(line["share of roofline"])


def _times(results: Results, line: Line, *shares: str) -> tuple[str, ...]:
    """What the kernel takes, shares of a limit, and what public CUDA and XLA take."""
    beside = public(results.public_beside(line["case"]))
    return us(line), spread(line["pallas"]), *shares, beside, us(line, "xla")


def attention(results: Results) -> str:
    """Attention of decode steps."""
    rows = []
    for line in _of_op(results, "attention"):
        extra = {"csa": f" + {line['picks']:,}", "hca": f" + {line['entries']:,}", "swa": ""}[line["kind"]]
        words = f"{KINDS[line['kind']]}, {line['heads']} heads, 128{extra} keys"
        rows.append((words, f"`{line['kv_format']}`", _batch(line), *_times(results, line, _share(line))))
    return table("attention | rows | requests | us | 10th-90th percentile | share | FlashMLA | XLA form", rows)


def scores(results: Results) -> str:
    """The indexer's scores."""
    rows = [
        (
            f"`{line['indexer_format']}`",
            f"{line['entries']:,}",
            _batch(line),
            *_times(results, line, _share(line)),
        )
        for line in _of_op(results, "indexer")
    ]
    return table("keys | entries | requests | us | 10th-90th percentile | share | DeepGEMM, FP8 keys | XLA form", rows)


def topk(results: Results) -> str:
    """The positions of the largest scores."""
    rows = [
        (f"{line['entries']:,} to {line['picks']:,}", str(line["batch"]), *_times(results, line))
        for line in _of_op(results, "topk")
    ]
    return table("top-k | requests | us | 10th-90th percentile | SGLang | XLA form", rows)


def queries(results: Results) -> str:
    """The kernels between the products and attention."""
    rows = []
    for name, words in (
        ("attention_queries", "queries of attention: norm, rope, f16"),
        ("indexer_queries", "queries of the indexer: rope, Hadamard transform, FP4"),
    ):
        few, many = (number(results.case(f"{name} B64{more}")["us"]) for more in ("", " x 4 tokens"))
        xla = [line for line in results.by_hand if line["case"] == f"{name} B64 xla"]
        rows.append((words, few, many, f"{xla[0]['us']:g}" if xla else "-"))
    return table("kernel time in us, 64 requests | 1 token each | 4 tokens each | XLA form, 1 token", rows)


def steps(results: Results) -> str:
    """Whole decode steps without the products of matrices."""
    rows = []
    for line in results.updates:
        if "step" in line["case"]:
            _, _, batch, tail, backend = line["case"].split()
            wall = line["us of wall per layer"]
            name = "XLA form" if backend == "xla" else "kernels"
            words = f"cache update alone, {tail} tails, {name}"
            rows.append((words, batch[1:], f"{number(wall['median'])} per layer", spread(wall), "-"))
    for line in results.reads:
        if line["case"].startswith("decode step"):
            *_, batch, context, form, tail = line["case"].split()
            wall, mark = line["us of wall"], EARLIER if "run" in line else ""
            shares = ", ".join(f"{op} {number(value)}" for op, value in line["us of kernels"].items())
            words = f"cache update, scores, top-k and attention, {int(context):,} tokens each, `{form}`, {tail} tails"
            rows.append((words, batch[1:], number(wall["median"]) + mark, spread(wall), shares))
    return table("43 Flash layers | requests | wall time in us | 10th-90th percentile | of it, kernels", rows)


def stored_layers(results: Results) -> str:
    """What one more layer adds to a decode step, with weights stored as FP8."""
    rows = []
    for line in results.layers:
        what, kind, batch, context, *form = line["case"].split()
        if what != "layer":
            continue
        rounded = "" if form[-1] == "bf16" else f", {ACTIVATIONS[form[-1]]}"
        rows.append(
            (
                f"{KINDS[kind]}, {requests(int(batch[1:]))}, {int(context):,} tokens each{rounded}",
                _median(line),
                spread(line["us"]),
                f"{line['launches']:g}",
                number(part(line, CHUNK_PARTS["products, with rounding and widening"])),
                public(results.public_beside(line["case"])),
            )
        )
    head = "layer | us | range of the runs | launches | of it, products | public CUDA, its kernels added up"
    return table(head, rows)


def wide_layers(results: Results) -> str:
    """One layer with bf16 weights and XLA's products, part by part, as it was before."""
    rows = []
    for line in results.by_hand:
        if line["case"].startswith("layer "):
            parts = [line[name] for name in ("products", "concatenation", "this library", "other XLA kernels")]
            cells = ["-" if part is None else number(part) for part in parts]
            words = f"{KINDS[line['kind']]}, {requests(line['batch'])}, {line['context']} tokens each"
            rows.append((words, f"{number(line['us'])} in {line['kernels']}", *cells))
    head = "layer | us in kernels | products | weights laid side by side | this library's kernels | other XLA kernels"
    return table(head, rows)


# What a batch is, as tables and cases call it.
PADDING = {
    "chunks and decode rows": "mixed",
    "its chunks alone": "its chunks",
    "its decode rows alone": "its rows",
    "1,000 tokens padded to 4,096": "padded",
    "1,000 tokens alone": "alone",
}

# What the kernels of a chunk are called: words, and the beginnings of their names.
CHUNK_PARTS = {
    "products, with rounding and widening": (
        *("product", "nvjet", "gemm_fusion", "loop_reduce_fusion", "round_rows", "loop_convert"),
    ),
    "attention": ("decode_attention", "widen_rows"),
    "scores": ("indexer_scores",),
    "top-k": ("top_k",),
    "queries": ("attention_queries", "indexer_queries"),
}


def part(line: Line, names: tuple[str, ...]) -> float:
    """The microseconds of the kernels of a layer whose names begin so."""
    return sum(us for name, us in line["by_kernel"].items() if name.startswith(names))


def products(results: Results) -> str:
    """Products of few rows with stored weights, by the number of rows."""
    found: dict[str, dict[str, Line]] = {}
    for line in results.layers:
        if matched := re.fullmatch(r"product (.*) (M\d+) stored bf16", line["case"]):
            found.setdefault(matched[1], {})[matched[2]] = line
    rows = [
        (
            words,
            *(_with_spread(lines[rows]) for rows in ("M1", "M8", "M64")),
        )
        for words, lines in found.items()
    ]
    return table("product | us for 1 row | 8 rows | 64 rows", rows)


def _median(line: Line) -> str:
    return number(line["us"]["median"]) + (EARLIER if "run" in line else "")


def _with_spread(line: Line) -> str:
    return f"{_median(line)} ({spread(line['us'])})"


def prefill(results: Results) -> str:
    """A chunk of 4,096 tokens in a layer, part by part."""
    rows = []
    for before, kind, form in itertools.product(("28672", "126976"), KINDS, ACTIVATIONS):
        if (before, kind) == ("126976", "swa"):  # the same as after 28K
            continue
        line = results.case(f"chunk of 4096 {kind} after {before} stored {form}")
        parts = [part(line, names) for names in CHUNK_PARTS.values()]
        shares = (number(us) if us else "-" for us in parts)
        name = f"{KINDS[kind]}, {int(before) >> 10}K before, {ACTIVATIONS[form]}"
        rows.append((name, _median(line), spread(line["us"]), *shares, f"{line['launches']:g}"))
    return table(" | ".join(["layer", "us", "range of the runs", *CHUNK_PARTS, "launches"]), rows)


def padding(results: Results) -> str:
    """Batches of ragged chunks and decode rows, and padded chunks, beside what they hold."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for line in results.layers:
        if matched := re.fullmatch(r"(mixed|its chunks|its rows|padded|alone) .* (csa|hca) .* (\w+)", line["case"]):
            found.setdefault((matched[2], matched[3]), {})[matched[1]] = line
    rows = [
        (f"{KINDS[kind]}, {ACTIVATIONS[form]}", *(_median(lines[name]) for name in PADDING.values()))
        for (kind, form), lines in found.items()
    ]
    return table(" | ".join(["us of a layer", *PADDING]), rows)


def prefill_model(results: Results) -> str:
    """A chunk of 4,096 tokens in all layers of V4-Flash, added up."""
    kinds = [layer_kind(FLASH, layer).value for layer in range(FLASH.num_layers)]
    rows = []
    for device, lines in (("H200", results.layers), ("H100", results.h100)):
        of_case = {line["case"]: line for line in lines}
        for form, words in ACTIVATIONS.items():
            cases = [f"chunk of 4096 {kind} after 28672 stored {form}" for kind in kinds]
            if not of_case.keys() >= set(cases):
                continue
            us = sum(of_case[case]["us"]["median"] for case in cases)
            rows.append((f"{words}, {device}", f"{us / 1e3:.1f}", f"{4096 / us * 1e6:,.0f}"))
    return table("43 layers | ms in kernels | tokens per second", rows)


def h100(results: Results) -> str:
    """What was timed on an H100, beside the same on an H200."""
    rows = []
    for line in results.h100:
        if line["case"] == "ceilings":
            continue
        beside, key = results.case(line["case"]), "pallas" if "pallas" in line else "us"
        rows.append(
            (line["case"], *(cell for of in (line, beside) for cell in (number(of[key]["median"]), spread(of[key]))))
        )
    return table("case | us on an H100 | range of the runs | us on an H200 | range of the runs", rows)


def drafts(results: Results) -> str:
    """What a pass with five drafts by DSpark takes beside the model's own layers, and over a pass without drafts."""
    found = {line["case"]: line for line in results.drafts}
    parts = "store keys", "run of the block", "logits", "draw drafts, greedy", "judge drafts, greedy"

    def cell(case: str) -> str:
        line = found.get(case)
        return "-" if line is None else number(line["us"]["median"]) + (EARLIER if "run" in line else "")

    rows: list[tuple[str, ...]] = []
    for requests in (1, 16, 64):
        cases = [f"{part} B{requests} 4096" for part in parts]
        whole = found.get(f"pass of 43 layers, 5 drafts, B{requests} 4096")
        plain = found.get(f"pass of 43 layers, 0 drafts, B{requests} 4096")
        ratio = even = both = "-"
        if whole is not None and plain is not None:
            both = " / ".join(number(line["ms_of_wall"]["median"]) for line in (plain, whole))
            ratio, even = f"{whole['plain']:.2f}", f"{whole['plain'] - 1:.2f}"
        if any(case in found for case in cases) or whole is not None:
            rows.append((str(requests), *map(cell, cases), both, ratio, even))
    columns = "keys of the pass | run of the block | logits | five drawn | five judged"
    return table(f"requests | {columns} | ms without / with drafts | ratio | accepted to break even", rows)


def programs(results: Results) -> str:
    """What the programs of benchmarks/ printed, as it was noted."""
    rows = []
    for line in results.by_hand:
        if "python -m" not in line["program"]:
            continue
        if "us" in line:
            value = line["us"]
            figure = (
                f"{value / 1e6:g} s" if value >= 1e6 else f"{value / 1e3:g} ms" if value >= 1e3 else f"{value:g} us"
            )
        elif "tokens/s" in line:
            figure = f"{line['tokens/s']:,} tokens/s"
        else:
            figure = f"ratio of times {line['ratio']:g}"
        rows.append((line["what"], figure, line["device"], f"`{line['program']}`"))
    return table("what | figure | hardware | program", rows)


def public_cuda(results: Results) -> str:
    """Every figure of other libraries."""
    rows = []
    for key, group in itertools.groupby(
        results.public, key=lambda x: [x[n] for n in ("library", "kernel", "device", "timed")]
    ):
        library, kernel, device, timed = key
        cells = "; ".join(f"{line['case']}: {public(line)}" for line in group)
        rows.append((library, kernel, cells, device, timed))
    return table("library | kernel | us | hardware | how timed", rows)


def ceilings(results: Results) -> str:
    """The limits that shares refer to."""
    updates, reads = results.updates, results.reads
    rows = [
        ("copy (read and write), runs of the cache update", "copy GB/s", updates),
        ("read, runs of the cache update", "read GB/s", updates),
        ("read, runs of attention, scores and top-k", "read GB/s", reads),
        ("product of bf16 matrices, the same runs", "matmul TFLOP/s", reads),
    ]
    cells = [
        (words, " / ".join(f"{x:,.0f}" for x in results.ceilings(of, name)), name.split()[1])
        for words, name, of in rows
    ]
    return table("limit | measured | unit", cells)
