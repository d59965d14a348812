"""Every GPU kernel at the models' sizes, compiled where there is no GPU: python -m tests.support.compiled_kernels h200

Prints one JSON line, kernel -> what PTX, ptxas and XLA say of it; with ``--table`` first its registers and the blocks
that an SM can hold; with ``--only`` and a pattern only the kernels whose names match, and with ``--few`` one of each
launch. One target per process. Needs the extra ``cross``.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator
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
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.layer.update import store
from dsv4jax.pieces import (
    NewEntries,
    append_swa,
    flush_entries,
    gather_all_compressed,
    gather_compressed,
    reset_hca,
    rotate_csa,
)
from dsv4jax.plan import split_heads
from dsv4jax.tails import Streams, num_touched_blocks
from pallas_kernels.attention import call, sm90
from pallas_kernels.attention.inputs import WideRows
from pallas_kernels.attention.sm90 import QueryOrder
from pallas_kernels.attention.wide import instead_of_rows, widen
from pallas_kernels.formats import ATTENDED_FORMATS
from pallas_kernels.plugin import compiles_relocatable_code
from pallas_kernels.scores import fp4
from tests.support.compile_for_gpu import TARGETS, prepare_environment
from tests.support.compiled_model import model_kernels
from tests.support.compiled_products import INDEXER_FORMAT, Spec, f32, product_kernels
from tests.support.kernel_report import Kernel, dump_to_standard_output, report

MODELS = {"flash": d4.DSV4Config.flash(), "pro": d4.DSV4Config.pro()}
EXPERTS = {"flash": 256, "pro": 384}
# The CSA rows of one layer take more than 2^31 bytes, so 32 bits are too few for the offset of a layer or of a block in
# it.
NUM_BLOCKS = 160_000  # of one byte for each NoPE channel
CHANNEL_BYTES = {"bf16": 2, "f32": 4}  # of formats that have more
# Every format of rows, and every format of keys. The first of them are a plan's defaults.
DEFAULT = dict(kv_format="fp8_row", indexer_format=INDEXER_FORMAT)
FORMATS = (
    DEFAULT,
    dict(kv_format="fp8_tile64", indexer_format="mxfp4"),
    dict(kv_format="bf16", indexer_format="bf16"),
    dict(kv_format="f32", indexer_format="f32"),
)
# Requests, and tokens of each.
DECODE = 256, 1
CHUNKS = (1, 4096), (8, 128)
DRAFT = 64, 4
# Launches that Blackwell does not have.
HOPPER_ONLY = {
    "attend_in_order",
    "experts_gate_up",
    "experts_gate_up_and_shared",
    "experts_down",
    "experts_down_and_shared",
    "products",
    "product_of_many",
    "product_of_queries",
    "product_of_indexer_queries",
    "round_rows",
    "widen_rows",
    "attend_to_widened",
    "router",
    "mix_streams",
}
# Of attention: few queries with 8, 16 and 32 heads of a block, then clusters of 8, 4 and 2 blocks, and blocks alone.
READS = (1, 1), (2, 1), (4, 1), (8, 1), (20, 1), (64, 1), (256, 1), (9, 4)
TOP_K_SIZES = (1, 32768), (8, 32768), (64, 32768), (256, 8192), (64, 262144)  # rows, and scores of each
FEWER_READS = (1, 1), (64, 1), (9, 4)  # of what is no default: few queries, many, and several tokens of a request
SHARES_OF_HEADS = 8, 4, 2  # devices over which heads are divided


def _i32(*shape: int) -> Any:
    return Spec(shape, jnp.int32)


def _many(row: Any, *lead: int) -> Any:
    return jax.tree.map(lambda leaf: Spec((*lead, *leaf.shape), leaf.dtype), row)


LAYER = _i32()
GATHERS = gather_compressed, gather_all_compressed


def _cache(cfg: d4.DSV4Config, **options: Any) -> d4.KVCache:
    num_blocks = NUM_BLOCKS // CHANNEL_BYTES.get(options.get("kv_format", ""), 1)
    plan = d4.plan_cache(cfg, max_requests=256, max_context=131072, num_blocks=num_blocks, **options)
    return d4.cache.abstract_cache(plan)


def _update(
    name: str, cache: d4.KVCache, kind: AttentionType, batch: int, tokens: int, *, is_draft: bool = False
) -> Kernel:
    cfg, stack, is_csa = cache.plan.cfg, cache.stack(kind), kind == AttentionType.CSA

    def streams(dim: int) -> Any:
        rows = f32(batch, tokens, (1 + is_csa) * dim)
        return Streams(k=rows, z=rows, overlap=is_csa), Spec((dim,), jnp.bfloat16)

    def function(stack, index, table, rows, batch):
        call = LayerCall(stack=stack, index=index, block_table=table, batch=batch, kind=kind, plan=cache.plan)
        return store(call, rows, CACHE_UPDATE["pallas"], keep_tails=is_draft)

    entry = streams(cfg.head_dim) if stack.pool is not None else None
    key = streams(cfg.indexer_head_dim) if is_csa else None
    kv, row = None if is_draft else f32(batch, tokens, cfg.head_dim), _i32(batch)
    new, rows_of = TokenRows(kv=kv, entry=entry, key=key), Batch(slots=row, start=row, num_new=row)
    args = stack, LAYER, cache.tables.block_table, new, rows_of
    rows = None if stack.pool is None else stack.pool.entries.nope
    return Kernel(name=name, function=function, args=args, rows=rows)


def _formats(cfg: d4.DSV4Config) -> tuple[dict[str, str], ...]:
    """Those that a model's kernels are compiled in. Heads are all that differs between models: one is enough of Pro."""
    return FORMATS if cfg is MODELS["flash"] else (DEFAULT,)


def _updates(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    kinds = [kind for kind in AttentionType if kind in {spec.attn for spec in d4.config.layer_schedule(cfg)}]
    variants = [(kind, formats) for kind in kinds for formats in _formats(cfg)]
    variants.append((AttentionType.HCA, DEFAULT | dict(hca_tail="online")))
    for kind, options in variants:
        cache, is_default = _cache(cfg, **options), DEFAULT.items() <= options.items()
        for batch, tokens in (DECODE, *CHUNKS) if is_default else (DECODE, CHUNKS[-1]):
            launch = "cache_step" if tokens == 1 else "append_chunk"
            name = " ".join([launch, kind, *options.values(), f"[{batch}, {tokens}]"])
            yield _update(name, cache, kind, batch, tokens)
        if is_default:
            name = " ".join(["stage_entries", kind, *options.values(), str(list(DRAFT))])
            if kind != AttentionType.SWA:
                yield _update(name, cache, kind, *DRAFT, is_draft=True)


def _pieces(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the pieces that depend on a format, for each format, and then the others."""
    row, done = _i32(DECODE[0]), Spec((DECODE[0],), jnp.bool)
    for options in _formats(cfg):
        cache = _cache(cfg, **options)
        csa, hca, table = cache.stack("csa"), cache.stack("hca"), cache.tables.block_table
        static = dict(plan=cache.plan, backend="pallas")
        kv, keys = (f32(*DECODE, dim) for dim in (cfg.head_dim, cfg.indexer_head_dim))
        piece = functools.partial(_piece, options["kv_format"], static)
        yield piece(append_swa, csa.state, LAYER, kv, row, row, row)
        new = NewEntries(entries=kv, keys=keys, block_table=table, slots=row, first=row, count=row)
        yield _piece(f"csa {options['kv_format']}", static, flush_entries, csa.pool, LAYER, new)
        new = dataclasses.replace(new, keys=None)
        yield _piece(f"hca {options['kv_format']}", static, flush_entries, hca.pool, LAYER, new)
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
    for options in _formats(cfg):
        cache = _cache(cfg, **options)
        is_default = options is DEFAULT and cfg is MODELS["flash"]
        for batch, tokens in READS if is_default else FEWER_READS:
            if options["kv_format"] in ATTENDED_FORMATS:
                for kind in sorted({spec.attn for spec in d4.config.layer_schedule(cfg)}):
                    yield _attention(cache, kind, batch, tokens)
            if options["indexer_format"] in fp4.FORMATS and cfg is MODELS["flash"]:  # Pro's indexer is the same
                yield _scores(cache, batch, tokens)
        if options["kv_format"] in ATTENDED_FORMATS:
            for kind in (AttentionType.CSA, AttentionType.HCA):
                yield from _attention_of_chunk(cache, kind, *CHUNKS[0])
                yield _attention_in_order(cache, kind)
    for shares in SHARES_OF_HEADS if cfg is MODELS["flash"] else ():
        share = split_heads(cfg, shares, "model")
        yield from _reads_of_few_heads(_cache(share, **DEFAULT))
    for rows, size in TOP_K_SIZES if cfg is MODELS["flash"] else TOP_K_SIZES[-1:]:
        select = functools.partial(pk.top_k, k=cfg.indexer_top_k)
        args = f32(rows, size), _i32(rows)
        yield Kernel(name=f"top_k [{rows}, {size}]", function=select, args=args, rows=None, reads_only=True)


def _reads_of_few_heads(cache: d4.KVCache) -> Iterator[Kernel]:
    """Yield attention where heads are divided over devices: each of its kernels."""
    of_heads, kind = f" of {cache.plan.cfg.num_heads} heads", AttentionType.CSA
    for batch, tokens in (*FEWER_READS, DECODE):
        kernel = _attention(cache, kind, batch, tokens)
        yield dataclasses.replace(kernel, name=kernel.name + of_heads)
    for kernel in _attention_of_chunk(cache, kind, *CHUNKS[0]):
        if not kernel.name.startswith("widen_rows"):  # which know no heads
            yield dataclasses.replace(kernel, name=kernel.name + of_heads)


def _attention(cache: d4.KVCache, kind: AttentionType, batch: int, tokens: int) -> Kernel:
    plan = cache.plan
    attend: Any = functools.partial(pk.decode_attention, kv_format=plan.kv_format)
    name, args = f"decode_attention {kind} {plan.kv_format} [{batch}, {tokens}]", (_read(cache, kind, batch, tokens),)
    return Kernel(name=name, function=attend, args=args, rows=None, reads_only=True, has_scratch=True)


def _attention_in_order(cache: d4.KVCache, kind: AttentionType) -> Kernel:
    """Return attention of one query, in the order in which many are added."""
    plan, inputs = cache.plan, _read(cache, kind, 1, 1)
    attend: Any = functools.partial(pk.decode_attention, kv_format=plan.kv_format, invariant=True)
    name = f"attend_in_order {kind} {plan.kv_format} [1, 1]"
    return Kernel(name=name, function=attend, args=(inputs,), rows=None, reads_only=True, has_scratch=True)


def _attention_of_chunk(cache: d4.KVCache, kind: AttentionType, batch: int, tokens: int) -> Iterator[Kernel]:
    """Yield the launches of attention whose rows are widened before. The second is the same for every format."""
    form, inputs = ATTENDED_FORMATS[cache.plan.kv_format], _read(cache, kind, batch, tokens)
    title = f"{kind} {cache.plan.kv_format} [{batch}, {tokens}]"

    def widened(inputs: Any) -> Any:
        return widen(inputs, form).wide

    assert inputs.entries is not None
    rows = inputs.entries.nope
    yield Kernel(
        name=f"widen_rows {title}", function=widened, args=(inputs,), rows=rows, reads_only=True, has_scratch=True
    )
    if cache.plan.kv_format != DEFAULT["kv_format"]:
        return
    order = jax.eval_shape(QueryOrder.of, Spec((batch, tokens), jnp.bool_))
    args = (dataclasses.replace(instead_of_rows(inputs, WideRows.of(inputs)), order=order),)
    for dtype, result in (jnp.bfloat16, ""), (jnp.float8_e4m3fn, ", rounded"):
        attend: Any = functools.partial(call.attend, form=form, layout=sm90.Layout(is_wide=True), dtype=dtype)
        name = f"attend_to_widened {title}{result}"
        yield Kernel(name=name, function=attend, args=args, rows=None, reads_only=True)


def _read(cache: d4.KVCache, kind: AttentionType, batch: int, tokens: int) -> pk.AttentionInputs:
    plan, cfg, lead, stack = cache.plan, cache.plan.cfg, (batch, tokens), cache.stack(kind)
    entries = None if stack.pool is None else stack.pool.entries
    return pk.AttentionInputs(
        q=Spec((*lead, cfg.num_heads, cfg.head_dim), jnp.float16),
        window=stack.state.window,
        pos=stack.state.pos,
        fresh=_many(plan.rows.row(448, 64), *lead) if tokens > 1 else None,
        entries=entries,
        picks=_i32(*lead, cfg.indexer_top_k) if kind == AttentionType.CSA else None,
        block_table=None if entries is None else cache.tables.block_table,
        slots=_i32(batch),
        start=_i32(batch),
        positions=_i32(*lead),
        visible=None if entries is None else _i32(*lead),
        sinks=Spec((cfg.num_heads,), jnp.bfloat16),
        angles=f32(*lead, cfg.rope_dim),
        layer=_i32(1),
    )


def _scores(cache: d4.KVCache, batch: int, tokens: int) -> Kernel:
    plan, lead = cache.plan, (batch, tokens)
    keys: Any = cast(PagedPool, cache.stack("csa").pool).indexer_keys
    inputs = pk.ScoreInputs(
        queries=_many(plan.keys.row(128), *lead, plan.cfg.indexer_heads),
        weights=f32(*lead, plan.cfg.indexer_heads),
        keys=cast(Any, None),  # the first argument
        layer=_i32(1),
        block_table=cache.tables.block_table,
        slots=_i32(batch),
        visible=_i32(*lead),
    )

    def score(keys: Any, inputs: Any) -> Any:
        return pk.indexer_scores(dataclasses.replace(inputs, keys=keys), key_format=plan.indexer_format)

    name = f"indexer_scores {plan.indexer_format} [{batch}, {tokens}]"
    return Kernel(name=name, function=score, args=(keys, inputs), rows=keys.codes, reads_only=True)


def _queries(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the kernels that convert matrix products to queries."""
    for batch, tokens in ((64, 1), DRAFT):
        lead, angles = (batch, tokens), f32(batch, tokens, cfg.rope_dim)
        prepare: Any = functools.partial(pk.attention_queries, eps=cfg.norm_eps)
        args = f32(*lead, cfg.num_heads, cfg.head_dim), angles
        yield Kernel(name=f"attention_queries {list(lead)}", function=prepare, args=args, rows=None, reads_only=True)
        for form in fp4.FORMATS if cfg is MODELS["flash"] else ():
            row = INDEXER_FORMATS[form].row(cfg.indexer_head_dim)
            prepare = functools.partial(pk.indexer_queries, key_row=row, key_format=form)
            args = f32(*lead, cfg.indexer_heads, cfg.indexer_head_dim), angles
            name = f"indexer_queries {form} {list(lead)}"
            yield Kernel(name=name, function=prepare, args=args, rows=None, reads_only=True)


def _grants(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the kernel that allocates blocks, for a usual batch and for the largest one."""
    tables, plan = _cache(cfg).tables, _cache(cfg).plan
    held = pk.Grants(**{field.name: getattr(tables, field.name) for field in dataclasses.fields(pk.Grants)})
    sizes = pk.PageSizes(
        max_context=plan.max_context, ratio=plan.min_ratio, per_page=cfg.block_tokens // plan.min_ratio
    )
    for rows in (64, 1024):
        asked = pk.Asked(
            slots=_i32(rows),
            num_new=_i32(rows),
            shared=Spec((rows,), jnp.bool),
            admitted=tables.admitted,
            seq_lens=tables.seq_lens,
            free_blocks=tables.free_blocks,
        )

        def grant(held: Any, asked: Any) -> Any:
            return pk.grant_tokens(asked, held, sizes)

        yield Kernel(name=f"grant_tokens [{rows}]", function=grant, args=(held, asked), rows=None, has_scratch=True)


def _token_parts(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the kernel that splits the products of new tokens, for a decode step, a draft and a chunk of each kind."""
    for formats in _formats(cfg):
        plan = _cache(cfg, **formats).plan
        for kind in sorted({spec.attn for spec in d4.config.layer_schedule(cfg)}):
            for batch, tokens in (DECODE, DRAFT, CHUNKS[0]) if formats is DEFAULT else (DRAFT,):
                is_decode = tokens == 1
                rounding = pk.TokenRounding(
                    eps=cfg.norm_eps,
                    head_factor=0.5,
                    stream_dtype=jnp.float32 if formats is DEFAULT else jnp.bfloat16,
                    kv_format=None if is_decode else plan.kv_format,
                )
                row_spec = None if is_decode else plan.row_spec
                split = functools.partial(
                    pk.token_parts, rounding=rounding, row_spec=row_spec, reads_padding=tokens == 1
                )
                name = f"token_parts {kind} {plan.kv_format} [{batch}, {tokens}]"
                args = (_products(cfg, kind, batch, tokens),)
                yield Kernel(name=name, function=split, args=args, rows=None, reads_only=True, has_scratch=True)


def _updates_of_products(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the updates that load the streams of tokens from their product: a decode step and a chunk of each kind."""
    kinds = sorted({spec.attn for spec in d4.config.layer_schedule(cfg)})
    for kind, formats, hca_tail in itertools.product(kinds, _formats(cfg), ("online", "ring")):
        if hca_tail == "ring" and kind != AttentionType.HCA:
            continue
        cache = _cache(cfg, hca_tail=hca_tail, **formats)
        ratio = cfg.ratio(kind) if kind.compresses else None
        stack = cache.stack(kind)
        rows = None if stack.pool is None else stack.pool.entries.nope
        options: dict[str, Any] = dict(key_format=cache.plan.indexer_format, ratio=ratio)
        name = " ".join([kind, *formats.values(), hca_tail])
        make = functools.partial(Kernel, rows=rows, has_scratch=True)
        if hca_tail == "online":
            rounding = pk.TokenRounding(eps=cfg.norm_eps, head_factor=0.5, kv_format=cache.plan.kv_format)
            step = functools.partial(pk.token_step, rounding=rounding, **options)
            products, tokens = _of_products(cfg, cache, kind, *DECODE)
            args = stack, tokens, products
            yield make(name=f"token_step {name} {list(DECODE)}", function=step, args=args)
        if formats is DEFAULT and kind.compresses:
            options |= dict(kv_format=cache.plan.kv_format, eps=cfg.norm_eps)
            update = functools.partial(pk.append_chunk, **options)
            args = stack, _of_products(cfg, cache, kind, *CHUNKS[0])[1]
            yield make(name=f"append_chunk {name} of products {list(CHUNKS[0])}", function=update, args=args)


def _of_products(
    cfg: d4.DSV4Config, cache: d4.KVCache, kind: AttentionType, batch: int, tokens: int
) -> tuple[pk.TokenProducts, pk.NewTokens]:
    """The products of tokens, and where their streams go."""
    products, row = _products(cfg, kind, batch, tokens), _i32(batch)
    entry, key = _product_streams(cfg, kind, products)
    rope = f32(batch, num_touched_blocks(tokens, cfg.ratio(kind)), cfg.rope_dim) if kind.compresses else None
    places: dict[str, Any] = dict(
        layer=_i32(1), slots=row, start=row, num_new=row, block_table=cache.tables.block_table
    )
    return products, pk.NewTokens(kv=None, entry=entry, key=key, rope=rope, **places)


def _product_streams(cfg: d4.DSV4Config, kind: AttentionType, products: pk.TokenProducts) -> tuple[Any, Any]:
    """The streams of entries and of keys, as columns of the product."""

    def streams(ape: Any, dim: int, first: int) -> Any:
        norm, source = Spec((dim,), jnp.bfloat16), products.compress
        return ape and pk.ProductStreams(product=source, ape=ape, norm=norm, first=first, is_bf16=False)

    entry = streams(products.entry_ape, cfg.head_dim, 0)
    return entry, streams(products.key_ape, cfg.indexer_head_dim, 2 * products.widths[0])


def _products(cfg: d4.DSV4Config, kind: AttentionType, batch: int, tokens: int) -> pk.TokenProducts:
    lead, streams, heads = (batch, tokens), 1 + kind.overlaps, cfg.indexer_heads if kind.is_indexed else 0
    entry = streams * cfg.head_dim if kind.compresses else 0
    key = streams * cfg.indexer_head_dim if kind.is_indexed else 0

    def ape(width: int) -> Any:
        return Spec((cfg.ratio(kind), width), jnp.bfloat16) if width else None

    return pk.TokenProducts(
        q_a_kv=f32(*lead, cfg.q_lora_rank + cfg.head_dim),
        compress=f32(*lead, 2 * (entry + key) + heads) if entry else None,
        q_norm=Spec((cfg.q_lora_rank,), jnp.bfloat16),
        kv_norm=Spec((cfg.head_dim,), jnp.bfloat16),
        entry_ape=ape(entry),
        key_ape=ape(key),
        angles=f32(*lead, cfg.rope_dim),
        positions=_i32(*lead),
    )


def _piece(detail: str, static: dict[str, Any], function: Any, *args: Any) -> Kernel:
    name = f"{function.__name__} {detail}".strip()
    rows = args[0].entries.nope if isinstance(args[0], PagedPool) else None
    call = functools.partial(function.__wrapped__, **static)  # only the outermost jit decides what is donated
    return Kernel(name=name, function=call, args=args, rows=rows, reads_only=function in GATHERS)


def _print_table(reports: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, reports))
    print(f"{'kernel':<{width}}  registers  threads  shared B  blocks per SM  warps per SM")
    for name, found in reports.items():
        registers, threads, shared = (found[part][0] for part in ("registers", "threads", "shared"))
        blocks = found["blocks per SM"]
        print(f"{name:<{width}}  {registers:>9}  {threads:>7}  {shared:>8}  {blocks:>13}  {blocks * threads // 32:>12}")


def kernels() -> Iterator[tuple[str, Kernel]]:
    """Yield all kernels, each with the name of its model before its own.

    What both models store is the same, so its kernels are compiled of Flash alone.
    """
    for model, cfg in MODELS.items():
        is_flash = model == "flash"
        of_cache = (*_updates(cfg), *_pieces(cfg), *_updates_of_products(cfg), *_grants(cfg)) if is_flash else ()
        for kernel in (
            *of_cache,
            *_reads(cfg),
            *_queries(cfg),
            *_token_parts(cfg),
            *model_kernels(cfg, EXPERTS[model]),
            *product_kernels(cfg, is_flash=is_flash),
        ):
            yield f"{model} {kernel.name}", kernel


def last_of_each(chosen: dict[str, Kernel]) -> dict[str, Kernel]:
    """Return the last kernel of each launch, and of those whose pool 32 bits do not address."""
    last: dict[tuple[str, bool], str] = {}
    for name, kernel in chosen.items():
        is_large = kernel.rows is not None and kernel.rows.size > 1 << 31
        last[name.split()[1], is_large] = name
    return {name: chosen[name] for name in last.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression, found in a kernel's name")
    parser.add_argument("--few", action="store_true", help="of each launch one kernel")
    options = parser.parse_args()
    prepare_environment()
    jax.config.update("jax_platforms", "cpu")  # JAX is already imported and has read the environment variable
    dump_to_standard_output()
    chosen: dict[str, Kernel] = {}
    for name, kernel in kernels():
        assert name not in chosen, name
        if options.target != "h200" and name.split()[1] in HOPPER_ONLY:
            continue
        if re.search(options.only, name):
            chosen[name] = kernel
    if options.few:
        chosen = last_of_each(chosen)
    reports = {name: report(options.target, kernel) for name, kernel in chosen.items()}
    if options.table:
        _print_table(reports)
    # Cases that the audit must reject.
    undonated = report(options.target, next(iter(_updates(MODELS["flash"]))), donate=False)
    facts = {"kernels": reports, "undonated": undonated, "register counts are ignored": compiles_relocatable_code()}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
