"""What a compiled program does to a donated cache: which bytes it updates in place, and what else it allocates.

Every audit compiles the same program for a small and a large cache, which has eight times the blocks and eight times
the slots. The update is in place if the bytes aliased from input to output are the whole cache, and neither temporaries
nor copies grow with the cache.
"""

import dataclasses
import functools
import inspect
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import dsv4jax as d4
from dsv4jax.cache.tables import granted_tokens, withdraw_grants
from dsv4jax.requests import prefix_slots
from dsv4jax.requests.snapshot import abstract_snapshot
from dsv4jax.weights.params import param_shapes

# Two CSA layers share one stack, so the second writes into the buffers that the first has read.
CFG = d4.DSV4Config.tiny(compress_ratios=(0, 4, 128, 4))
# Heads, key heads and window have the published models' sizes, which the kernels that read the cache require.
PUBLISHED = d4.DSV4Config(hidden_size=64, q_lora_rank=32, o_lora_rank=8, compress_ratios=CFG.compress_ratios)
SMALL, LARGE = 1024, 8192  # blocks; with 8 and 64 slots
BATCH = 4
Spec = jax.ShapeDtypeStruct


def whole_step(params, x, cache, slots, num_new):
    """Run one forward pass, with layers unrolled."""
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    for layer in range(cache.plan.cfg.num_layers):
        x, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, residual=x)
    return x, d4.advance(cache, slots, num_new), ok


def speculative_step(params, x, cache, slots, num_new):
    """Stage a draft in every layer, and accept a number of tokens that depends on the outputs."""
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    staged = []
    for layer in range(cache.plan.cfg.num_layers):
        y, cache, rows = d4.stage(params[layer], x, cache, layer, slots, num_new)
        x = x + y
        staged.append(rows)
    num_accepted = jnp.minimum(jnp.sum(x[..., 0] > 0, axis=1, dtype=jnp.int32), num_new)
    cache, committed = d4.commit(cache, staged, num_accepted)
    return x, cache, ok & committed


def many_steps(params, x, cache, slots, num_new):
    """Run a scan over tokens."""

    def body(carry, _):
        x, cache = carry
        y, cache, _ = whole_step(params, x, cache, slots, num_new)
        return (y, cache), None

    return jax.lax.scan(body, (x, cache), length=8)[0]


def _plan(blocks: int, cfg: d4.DSV4Config = CFG, **options) -> d4.CachePlan:
    return d4.plan_cache(cfg, max_requests=blocks // 128, max_context=4096, num_blocks=blocks, **options)


def table_entries(blocks: int) -> int:
    plan = _plan(blocks)
    return plan.num_blocks + plan.max_requests * (plan.max_blocks + 4)


def abstract_params(cfg: d4.DSV4Config):
    return [param_shapes(cfg, spec.attn) for spec in d4.config.layer_schedule(cfg)]


def batch_specs(tokens: int, hidden: int = CFG.hidden_size):
    row = Spec((BATCH,), jnp.int32)
    return Spec((BATCH, tokens, hidden), jnp.float32), row, row


def copied_bytes(hlo: str) -> int:
    """Return the bytes of all copy instructions in an optimised HLO module."""
    sizes = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
    total = 0
    for dtype, dims in re.findall(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", hlo):
        total += sizes.get(dtype, 8) * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_of(compiled):
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not say what a program allocates"
    return memory


def audit(compile_program, make_program) -> dict[str, int]:
    """Compile at both sizes. make_program(blocks) returns (function, args, donated argument)."""
    found: dict[str, int] = {}
    for size, blocks in (("small", SMALL), ("large", LARGE)):
        function, args, donated = make_program(blocks)
        compiled = compile_program(function, *args, donate_argnums=donated)
        memory = memory_of(compiled)
        found |= {
            f"donated_{size}": bytes_of(args[donated]),
            f"aliased_{size}": memory.alias_size_in_bytes,
            f"temporaries_{size}": memory.temp_size_in_bytes,
            f"copied_{size}": copied_bytes(compiled.as_text()),
        }
    return found


def forward(function=whole_step, tokens=1, cfg=CFG, **options):
    def make(blocks: int):
        x, slots, num_new = batch_specs(tokens)
        return (
            function,
            (abstract_params(cfg), x, d4.cache.abstract_cache(_plan(blocks, cfg, **options)), slots, num_new),
            2,
        )

    return functools.partial(audit, make_program=make)


def bookkeeping(function):
    def make(blocks: int):
        _, slots, num_new = batch_specs(1)
        return function, (d4.cache.abstract_cache(_plan(blocks)), slots, num_new), 0

    return functools.partial(audit, make_program=make)


def _scan_over_layers(params, x, cache, slots, num_new):
    """Run the CSA layers with a traced index, as in a model that scans over its layers."""

    def body(carry, index_and_params):
        x, cache = carry
        y, cache = d4.attention_layer_at(index_and_params[1], x, cache, "csa", index_and_params[0], slots, num_new)
        return (x + y, cache), None

    indices = jnp.arange(len(cache.plan.layers(d4.AttentionType.CSA)), dtype=jnp.int32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[params[i] for i in cache.plan.layers("csa")])
    return jax.lax.scan(body, (x, cache), (indices, stacked))[0]


def _flush(blocks: int):
    plan = _plan(blocks)
    cache = d4.cache.abstract_cache(plan)
    row = Spec((BATCH,), jnp.int32)
    entries, keys = (Spec((BATCH, 3, dim), jnp.float32) for dim in (CFG.head_dim, CFG.indexer_head_dim))
    places: Any = dict(block_table=cache.tables.block_table, slots=row, first=row, count=row)
    new = d4.pieces.NewEntries(**(places | dict(entries=entries, keys=keys)))
    args = (cache.stack("csa").pool, Spec((), jnp.int32), new)
    return functools.partial(d4.pieces.flush_entries.__wrapped__, plan=plan), args, 0


def _insert(blocks: int):
    plan = _plan(blocks)
    return d4.insert, (d4.cache.abstract_cache(plan), abstract_snapshot(plan, BATCH, blocks=4)), 0


def _keep_prefix(blocks: int):
    slot = Spec((), jnp.int32)
    return inspect.unwrap(prefix_slots.exchange), (d4.cache.abstract_cache(_plan(blocks)), slot, slot), 0


def _start_from_prefix(blocks: int):
    slot = Spec((), jnp.int32)
    return inspect.unwrap(prefix_slots.go_on), (d4.cache.abstract_cache(_plan(blocks)), slot, slot), 0


# For a GPU, only what touches the pool is audited. Other bookkeeping is audited on the CPU only.
GPU_AUDITS = {
    "decode step, fp8_tile64 + mxfp4, online tails": forward(
        kv_format="fp8_tile64", indexer_format="mxfp4", hca_tail="online"
    ),
    "draft of 4": forward(function=speculative_step, tokens=4),
    "fork": bookkeeping(d4.fork),
    "insert": functools.partial(audit, make_program=_insert),
    "keep a prefix": functools.partial(audit, make_program=_keep_prefix),
    "start from a prefix": functools.partial(audit, make_program=_start_from_prefix),
}
# On a CPU these are XLA's, like those above.
READ_AUDITS = {
    "decode step, published heads": forward(cfg=PUBLISHED),
    "prefill chunk of 33, published heads": forward(tokens=33, cfg=PUBLISHED),
}
ALL = GPU_AUDITS | READ_AUDITS
# Only the kernels differ between GPUs. A step runs all kernels that a layer uses.
STEP = {"decode step, published heads": READ_AUDITS["decode step, published heads"]}
AUDITS = GPU_AUDITS | {
    "scan over layers": forward(function=_scan_over_layers),
    "scan over tokens": forward(function=many_steps),
    "admit": bookkeeping(lambda cache, slots, num_new: d4.admit(cache, BATCH)),
    "prepare_forward": bookkeeping(d4.prepare_forward),
    "advance": bookkeeping(d4.advance),
    "release": bookkeeping(lambda cache, slots, num_new: d4.release(cache, slots)),
    "flush_entries": functools.partial(audit, make_program=_flush),
}


def grants(layers: int):
    """Do what the layers of a step do with the tables first."""
    _, slots, num_new = batch_specs(1)

    def ask(tables, slots, num_new):
        found = []
        for _ in range(layers):
            tables = withdraw_grants(tables, slots, num_new > 1)
            found.append(granted_tokens(tables, slots, num_new))
        return tables, found

    return ask, (d4.cache.abstract_cache(_plan(SMALL)).tables, slots, num_new)


PREFILL_LIMIT = 1 << 30  # bytes of temporaries


def flash_prefill(layer: int, dtype):
    """Prefill a chunk of 4,096 tokens of one request at V4-Flash sizes, in a cache planned for 128K of context."""
    cfg = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(0, 4, 128))
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=2, max_context=131072))
    params = jax.tree.map(lambda leaf: Spec(leaf.shape, dtype), abstract_params(cfg)[layer])
    row = Spec((1,), jnp.int32)

    def prefill(params, x, cache, slots, num_new):
        return d4.attention_layer(params, x, cache, layer, slots, num_new)

    return prefill, (params, Spec((1, 4096, cfg.hidden_size), dtype), cache, row, row)


def pro_scan():
    """Run one decode step of V4-Pro: [HCA, HCA], then 29 x (CSA, HCA), then CSA, as two scans and a layer."""
    cfg = d4.DSV4Config.pro()
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=BATCH, max_context=8192))

    def stacked(kind, layers):
        shapes = param_shapes(cfg, kind)
        return jax.tree.map(lambda leaf: Spec((layers, *leaf.shape), jnp.bfloat16), shapes)

    def step(params, x, cache, slots, num_new):
        cache, ok = d4.prepare_forward(cache, slots, num_new)

        def run(carry, kind, index, layer):
            x, cache = carry
            y, cache = d4.attention_layer_at(layer, x, cache, kind, index, slots, num_new)
            return x + y, cache

        def pair(carry, scanned):
            index, csa, hca = scanned
            return run(run(carry, "csa", index, csa), "hca", index + 2, hca), None

        first = jnp.arange(2, dtype=jnp.int32)
        carry, _ = jax.lax.scan(lambda c, s: (run(c, "hca", *s), None), (x, cache), (first, params["first"]))
        carry, _ = jax.lax.scan(pair, carry, (jnp.arange(29, dtype=jnp.int32), params["csa"], params["hca"]))
        x, cache = run(carry, "csa", 29, params["last"])
        return x, d4.advance(cache, slots, num_new), ok

    params = {
        "first": stacked("hca", 2),
        "csa": stacked("csa", 29),
        "hca": stacked("hca", 29),
        "last": jax.tree.map(lambda leaf: Spec(leaf.shape[1:], leaf.dtype), stacked("csa", 1)),
    }
    row = Spec((BATCH,), jnp.int32)
    return step, (params, Spec((BATCH, 1, cfg.hidden_size), jnp.bfloat16), cache, row, row)
