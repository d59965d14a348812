"""Every GPU kernel at the models' sizes, compiled without a GPU: python -m tests.support.compiled_kernels h200

Prints one JSON line that maps each kernel to what PTX, ptxas and XLA report about it. With ``--table`` it first prints
each kernel's registers and the blocks that fit on an SM. There is one target per process. Needs the extra ``cross``.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.cache.pool import PagedPool
from dsv4jax.formats import INDEXER_FORMATS
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.layer.update import store
from dsv4jax.pieces import (
    append_swa,
    flush_csa,
    flush_hca,
    gather_all_compressed,
    gather_compressed,
    reset_hca,
    rotate_csa,
)
from dsv4jax.tails import Streams
from tests.support.compile_for_gpu import compile_for, prepare_environment
from tests.support.in_place import copied_bytes, memory_of

MODELS = {"flash": d4.DSV4Config.flash(), "pro": d4.DSV4Config.pro()}
# The CSA rows of one layer take more than 2^31 bytes, so 32 bits are too few for the offset of a layer or of a block in
# it.
NUM_BLOCKS = 160_000
FORMATS = (
    dict(kv_format="fp8_row", indexer_format="nvfp4"),
    dict(kv_format="fp8_tile64", indexer_format="mxfp4"),
)
DECODE = 256, 1
CHUNKS = (1, 4096), (8, 128)
DRAFT = 64, 4
# Without MOSAIC_GPU_DUMP_TO dumps go to standard output. With it, nvdisasm would be required too.
DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
SM_REGISTERS, SM_THREADS, SM_BLOCKS, SM_SHARED = 65536, 2048, 32, 228 << 10
Spec = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A call that launches one kernel. Its first argument is the state, which it updates unless ``reads_only``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rows: Any  # the pool's NoPE bytes [layers, num_blocks, entries_per_block, dim], if the kernel addresses them
    reads_only: bool = False
    has_scratch: bool = False  # besides the cache, which is larger


def _f32(*shape: int) -> Any:
    return Spec(shape, jnp.float32)


def _i32(*shape: int) -> Any:
    return Spec(shape, jnp.int32)


def _many(row: Any, *lead: int) -> Any:
    return jax.tree.map(lambda leaf: Spec((*lead, *leaf.shape), leaf.dtype), row)


LAYER = _i32()
GATHERS = gather_compressed, gather_all_compressed


def _cache(cfg: d4.DSV4Config, **options: Any) -> d4.KVCache:
    plan = d4.plan_cache(cfg, max_requests=256, max_context=131072, num_blocks=NUM_BLOCKS, **options)
    return d4.abstract_cache(plan)


def _update(
    name: str, cache: d4.KVCache, kind: AttentionType, batch: int, tokens: int, *, is_draft: bool = False
) -> Kernel:
    cfg, stack, is_csa = cache.plan.cfg, cache.stack(kind), kind == AttentionType.CSA

    def streams(dim: int) -> Any:
        rows = _f32(batch, tokens, (1 + is_csa) * dim)
        return Streams(k=rows, z=rows, overlap=is_csa), _f32(dim)

    def function(stack, index, table, rows, batch):
        call = LayerCall(stack=stack, index=index, block_table=table, batch=batch, kind=kind, plan=cache.plan)
        return store(call, rows, "pallas", keep_tails=is_draft)

    entry = streams(cfg.head_dim) if stack.pool is not None else None
    key = streams(cfg.indexer_head_dim) if is_csa else None
    kv, row = None if is_draft else _f32(batch, tokens, cfg.head_dim), _i32(batch)
    new, rows_of = TokenRows(kv=kv, entry=entry, key=key), Batch(slots=row, start=row, num_new=row)
    args = stack, LAYER, cache.tables.block_table, new, rows_of
    rows = None if stack.pool is None else stack.pool.entries.nope
    return Kernel(name=name, function=function, args=args, rows=rows)


def _updates(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    variants = [(AttentionType.CSA, options) for options in FORMATS]
    variants += [(AttentionType.HCA, dict(hca_tail=tail)) for tail in ("ring", "online")]
    if 0 in cfg.compress_ratios:
        variants.insert(0, (AttentionType.SWA, {}))
    for kind, options in variants:
        cache = _cache(cfg, **options)
        for batch, tokens in (DECODE, *CHUNKS):
            launch = "cache_step" if tokens == 1 else "append_chunk"
            name = " ".join([launch, kind, *options.values(), f"[{batch}, {tokens}]"])
            yield _update(name, cache, kind, batch, tokens)
        if options in (FORMATS[0], dict(hca_tail="online")):
            name = " ".join(["stage_entries", kind, *options.values(), str(list(DRAFT))])
            yield _update(name, cache, kind, *DRAFT, is_draft=True)


def _pieces(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the pieces that depend on a format, for each format, and then the others."""
    row, done = _i32(DECODE[0]), Spec((DECODE[0],), jnp.bool)
    for options in FORMATS:
        cache = _cache(cfg, **options)
        csa, hca, table = cache.stack("csa"), cache.stack("hca"), cache.tables.block_table
        static = dict(plan=cache.plan, backend="pallas")
        kv, keys = (_f32(*DECODE, dim) for dim in (cfg.head_dim, cfg.indexer_head_dim))
        piece = functools.partial(_piece, options["kv_format"], static)
        yield piece(append_swa, csa.state, LAYER, kv, row, row, row)
        yield piece(flush_csa, csa.pool, LAYER, kv, keys, table, row, row, row)
        yield piece(flush_hca, hca.pool, LAYER, kv, table, row, row, row)
        for dtype in (jnp.bfloat16, jnp.float32):
            detail, typed = f"{options['kv_format']} {jnp.dtype(dtype).name}", static | dict(dtype=dtype)
            picks = _i32(DECODE[0], cfg.indexer_top_k)
            yield _piece(f"csa {detail}", typed, gather_compressed, csa.pool, LAYER, table, row, picks)
            for kind, pool in (("csa", csa.pool), ("hca", hca.pool)):
                few = _i32(8)  # requests: each has room for max_context
                yield _piece(f"{kind} {detail}", typed, gather_all_compressed, pool, LAYER, table, few, few)
    yield _piece("", dict(backend="pallas"), rotate_csa, _cache(cfg).stack("csa").state, LAYER, row, done)
    for tail in ("ring", "online"):
        cache = _cache(cfg, hca_tail=tail)
        static = dict(plan=cache.plan, backend="pallas")
        yield _piece(tail, static, reset_hca, cache.stack("hca").state, LAYER, row, done)


def _reads(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield scores, top-k and attention, for one and for several tokens per request."""
    layer = _i32(1)
    formats = *FORMATS, dict(kv_format="bf16", indexer_format="mxfp4")
    for options in formats if cfg is MODELS["flash"] else FORMATS[:1]:
        cache = _cache(cfg, **options)
        plan, table = cache.plan, cache.tables.block_table
        for batch, tokens in ((1, 1), (9, 4)):  # attention with few queries, and with blocks that share one
            sizes, lead = f"[{batch}, {tokens}]", (batch, tokens)
            q = Spec((*lead, cfg.num_heads, cfg.head_dim), jnp.float16)
            for kind in sorted({spec.attn for spec in d4.layer_schedule(cfg)}):
                stack = cache.stack(kind)
                entries = None if stack.pool is None else stack.pool.entries
                inputs = pk.AttentionInputs(
                    q=q,
                    window=stack.state.window,
                    pos=stack.state.pos,
                    fresh=_many(plan.rows.row(448, 64), *lead) if tokens > 1 else None,
                    entries=entries,
                    picks=_i32(*lead, cfg.indexer_top_k) if kind == AttentionType.CSA else None,
                    block_table=None if entries is None else table,
                    slots=_i32(batch),
                    start=_i32(batch),
                    positions=_i32(*lead),
                    visible=None if entries is None else _i32(*lead),
                    sinks=_f32(cfg.num_heads),
                    angles=_f32(*lead, cfg.rope_dim),
                    layer=layer,
                )

                attend: Any = functools.partial(pk.decode_attention, kv_format=plan.kv_format)
                name = f"decode_attention {kind} {plan.kv_format} {sizes}"
                yield Kernel(name=name, function=attend, args=(inputs,), rows=None, reads_only=True, has_scratch=True)
            keys: Any = cast(PagedPool, cache.stack("csa").pool).indexer_keys
            queries = _many(plan.keys.row(128), *lead, cfg.indexer_heads)

            if options["kv_format"] != "bf16":
                inputs = pk.ScoreInputs(
                    queries=queries,
                    weights=_f32(*lead, cfg.indexer_heads),
                    keys=None,  # the first argument
                    layer=layer,
                    block_table=table,
                    slots=_i32(batch),
                    visible=_i32(*lead),
                )

                def score(keys: Any, inputs: Any, form: str = plan.indexer_format) -> Any:
                    return pk.indexer_scores(dataclasses.replace(inputs, keys=keys), key_format=form)

                name = f"indexer_scores {plan.indexer_format} {sizes}"
                yield Kernel(name=name, function=score, args=(keys, inputs), rows=keys.codes, reads_only=True)
    for rows, size in ((8, 32768), (256, 8192), (64, 262144)):
        select = functools.partial(pk.top_k, k=cfg.indexer_top_k)
        args = _f32(rows, size), _i32(rows)
        yield Kernel(name=f"top_k [{rows}, {size}]", function=select, args=args, rows=None, reads_only=True)


def _queries(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the kernels that convert matrix products to queries."""
    for batch, tokens in ((64, 1), DRAFT):
        lead, angles = (batch, tokens), _f32(batch, tokens, cfg.rope_dim)
        prepare: Any = functools.partial(pk.attention_queries, eps=cfg.norm_eps)
        args = _f32(*lead, cfg.num_heads, cfg.head_dim), angles
        yield Kernel(name=f"attention_queries {list(lead)}", function=prepare, args=args, rows=None, reads_only=True)
        for options in FORMATS if cfg is MODELS["flash"] else ():  # Pro's indexer is the same
            form = options["indexer_format"]
            row = INDEXER_FORMATS[form].row(cfg.indexer_head_dim)
            prepare = functools.partial(pk.indexer_queries, key_row=row, key_format=form)
            args = _f32(*lead, cfg.indexer_heads, cfg.indexer_head_dim), angles
            name = f"indexer_queries {form} {list(lead)}"
            yield Kernel(name=name, function=prepare, args=args, rows=None, reads_only=True)


def _piece(detail: str, static: dict[str, Any], function: Any, *args: Any) -> Kernel:
    name = f"{function.__name__} {detail}".strip()
    rows = args[0].entries.nope if isinstance(args[0], PagedPool) else None
    call = functools.partial(function.__wrapped__, **static)  # only the outermost jit decides what is donated
    return Kernel(name=name, function=call, args=args, rows=rows, reads_only=function in GATHERS)


@contextlib.contextmanager
def _standard_output() -> Iterator[list[str]]:
    """Capture what the process writes to standard output, including C++ code."""
    written: list[str] = []

    def flush() -> None:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)

    flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield written
        finally:
            flush()
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        written.append(file.read())


def _numbers(pattern: str, text: str) -> list[int]:
    """Return the groups of a pattern's only match; an empty list if it does not match exactly once."""
    found = re.findall(pattern, text)
    return [int(group) for group in (found[0] if isinstance(found[0], tuple) else found)] if len(found) == 1 else []


def strides_in_32_bits(ptx: str, rows: Any) -> list[int]:
    """Return the pool's strides in bytes, of layer and block, that the kernel does not multiply in 64 bits."""
    strides = [rows.size // rows.shape[0], rows.size // (rows.shape[0] * rows.shape[1])]
    wide, narrow = (
        {int(number) for number in re.findall(rf"{op} \s*[^;]*?, (\d+)[,;]", ptx)}
        for op in (r"(?:mul\.wide\.[su]32|m(?:ul|ad)\.lo\.[su]64)", r"m(?:ul|ad)\.lo\.[su]32")
    )
    return [stride for stride in strides if stride not in wide or stride in narrow]


def blocks_per_sm(registers: int, threads: int, shared: int) -> int:
    """Return how many blocks of a kernel fit on an SM.

    Registers are allocated per warp in units of 256; 1 KiB is reserved.
    """
    by_registers = SM_REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(by_registers, SM_THREADS // threads, SM_BLOCKS, SM_SHARED // (shared + 1024))


def report(target: str, kernel: Kernel, *, donate: bool = True) -> dict[str, Any]:
    donated = {} if kernel.reads_only or not donate else dict(donate_argnums=0)
    with _standard_output() as written:
        compiled = compile_for(target, kernel.function, *kernel.args, **donated)
    dump, hlo, memory = written[0], compiled.as_text() or "", memory_of(compiled)
    leaves = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kernel.args[0])]
    registers = _numbers(r"Used (\d+) registers", dump)
    threads = _numbers(r"\.maxntid (\d+), 1, 1", dump)
    shared = _numbers(r"smem_scratch_bytes=(\d+)", dump)
    return {
        "targets": sorted(set(re.findall(r"^\.target (\w+)", dump, re.MULTILINE))),
        "architectures": sorted(set(re.findall(r"Compiling entry function '\w+' for '(\w+)'", dump))),
        "entry points": len(re.findall(r"^\.visible \.entry", dump, re.MULTILINE)),
        "custom calls": re.findall(r'custom_call_target="([^"]+)"', hlo),
        "stack and spills": _numbers(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", dump
        ),
        "setmaxnreg ignored": "'setmaxnreg' ignored" in dump,
        "registers": registers,
        "threads": threads,
        "shared": shared,
        "blocks per SM": blocks_per_sm(*registers, *threads, *shared) if registers and threads and shared else 0,
        "strides in 32 bits": [] if kernel.rows is None else strides_in_32_bits(dump, kernel.rows),
        "elements": 0 if kernel.rows is None else kernel.rows.size,
        "donated": 0 if kernel.reads_only else sum(leaves),
        "aliased": memory.alias_size_in_bytes,
        "smallest leaf": (max if kernel.has_scratch else min)(leaves),
        "temporaries": memory.temp_size_in_bytes,
        "copied": copied_bytes(hlo),
    }


def _print_table(reports: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, reports))
    print(f"{'kernel':<{width}}  registers  threads  shared B  blocks per SM  warps per SM")
    for name, found in reports.items():
        registers, threads, shared = (found[part][0] for part in ("registers", "threads", "shared"))
        blocks = found["blocks per SM"]
        print(f"{name:<{width}}  {registers:>9}  {threads:>7}  {shared:>8}  {blocks:>13}  {blocks * threads // 32:>12}")


def main(target: str, *options: str) -> None:
    prepare_environment()
    jax.config.update("jax_platforms", "cpu")  # JAX is already imported and has read the environment variable
    os.environ.pop("MOSAIC_GPU_DUMP_TO", None)
    os.environ.update(dict.fromkeys(DUMPS, "1"))
    reports: dict[str, dict[str, Any]] = {}
    for model, cfg in MODELS.items():
        for kernel in (*_updates(cfg), *_pieces(cfg), *_reads(cfg), *_queries(cfg)):
            name = f"{model} {kernel.name}"
            assert name not in reports, name
            reports[name] = report(target, kernel)
    if "--table" in options:
        _print_table(reports)
    # Cases that the audit must reject.
    undonated = report(target, next(iter(_updates(MODELS["flash"]))), donate=False)
    print(json.dumps({"kernels": reports, "undonated": undonated}))


if __name__ == "__main__":
    main(*sys.argv[1:])
