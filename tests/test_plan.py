"""Shapes and bytes of a cache are compared with figures worked out by hand; arguments that a plan refuses."""

import dataclasses
import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS
from dsv4jax.model.caches import TRAINED
from tests.support.cases import first_of

SWA, CSA, HCA = d4.AttentionType.SWA, d4.AttentionType.CSA, d4.AttentionType.HCA
FLASH, PRO, TINY = d4.DSV4Config.flash(), d4.DSV4Config.pro(), d4.DSV4Config.tiny()
KIB = 1024

# Covers every size that matters to a plan: other ratios, a window that is not a power of two, kinds that are absent.
MODELS = {
    "flash": FLASH,
    "pro": PRO,
    "tiny": TINY,
    "swa alone": d4.DSV4Config.tiny(compress_ratios=(0, 0, 0)),
    "csa alone": d4.DSV4Config.tiny(compress_ratios=(4,)),
    "hca alone": d4.DSV4Config.tiny(compress_ratios=(128, 128), sliding_window=5),
    "ratios 4 and 6": d4.DSV4Config.tiny(
        compress_ratios=(6, 4, 0, 4), csa_compression_ratio=4, hca_compression_ratio=6, sliding_window=7
    ),
}


# ---- by hand


def test_flash_in_the_models_own_formats_by_hand():
    plan = d4.plan_cache(FLASH, max_requests=8, max_context=131072, kv_format="fp8_tile64", indexer_format="mxfp4")
    row = 448 + 64 * 2 + 7  # E4M3, bf16 RoPE, UE8M0 scales: 583
    window = 128 * (row + 4)  # and an int32 position per row
    # Keys and gates, [3 streams][4 rows][512] f32: current a, current b, previous b.
    csa_tail, indexer_tail = 2 * 3 * 4 * 512 * 4, 2 * 3 * 4 * 128 * 4
    assert (csa_tail, indexer_tail) == (48 * KIB, 12 * KIB)
    hca_tail = 2 * 128 * 512 * 4  # keys and gates of 128 tokens
    assert hca_tail == 512 * KIB
    assert plan.state_bytes(SWA) == {"window": window}
    assert plan.state_bytes(CSA) == {"window": window, "tail": csa_tail, "indexer tail": indexer_tail}
    assert plan.state_bytes(HCA) == {"window": window, "tail": hca_tail}

    # 128 tokens: 32 CSA entries and as many indexer keys of 64 + 4 bytes, one HCA entry.
    assert plan.block_bytes(SWA) == {}
    assert plan.block_bytes(CSA) == {"entries": 32 * row, "indexer keys": 32 * 68}
    assert plan.block_bytes(HCA) == {"entries": row}
    block = 21 * (32 * 583 + 32 * 68) + 20 * 583
    assert block == 449_132
    assert plan.bytes_per_token == block / 128 == 3508.84375  # "about 3.5 KB per token"

    table_row = 4 * 1024 + 3 * 4 + 1  # 131072 / 128 block ids, three int32 lengths, one bool
    request = 2 * window + 21 * (window + csa_tail + indexer_tail) + 20 * (window + hca_tail) + table_row
    assert plan.bytes_per_request == request == 15_010_957

    assert plan.num_blocks == 9012  # 8 * 1024 * 1.1 = 9011.2
    free_list = 4 * (9012 + 9012 + 1)  # readers per block, stack of free ids, how many are free
    assert plan.memory_bytes() == 9012 * block + 8 * request + free_list


def test_pro_in_the_default_formats_by_hand():
    plan = d4.plan_cache(PRO, max_requests=2, max_context=1 << 20, hca_tail="online", headroom=1)
    row, key = 448 + 64 * 2 + 4, 64 + 8  # fp8_row: 580; nvfp4: 72
    window = 128 * (row + 4)
    block = 30 * 32 * (row + key) + 31 * row
    assert block == 643_900
    assert plan.bytes_per_token == block / 128
    online = 3 * 512 * 4  # running maximum, sum and weighted sum per channel
    assert online == 6 * KIB
    assert plan.state_bytes(HCA) == {"window": window, "tail": online}
    request = 30 * (window + 60 * KIB) + 31 * (window + online) + 4 * 8192 + 13
    assert plan.bytes_per_request == request
    assert plan.num_blocks == 2 * 8192
    assert plan.memory_bytes() == 16384 * block + 2 * request + 4 * (2 * 16384 + 1)


def test_bf16_tails_take_half():
    plans = [d4.plan_cache(FLASH, tail_dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    for kind, part in [(CSA, "tail"), (CSA, "indexer tail"), (HCA, "tail")]:
        wide, narrow = (plan.state_bytes(kind)[part] for plan in plans)
        assert wide == 2 * narrow


# ---- against the arrays


@pytest.mark.parametrize("model", first_of(MODELS))
def test_bytes_equal_the_sum_over_the_leaves(model):
    """This holds for all formats, tails and dtypes, and for each request and block. Nothing is allocated."""
    for kv, keys, tail, dtype in itertools.product(
        KV_FORMATS, INDEXER_FORMATS, ("ring", "online"), (jnp.float32, jnp.bfloat16)
    ):
        plan = d4.plan_cache(
            MODELS[model],
            max_requests=3,
            max_context=1000,
            kv_format=kv,
            indexer_format=keys,
            tail_dtype=dtype,
            hca_tail=tail,
            num_blocks=5,
        )
        label = f"{kv} {keys} {tail} {np.dtype(dtype).name}"
        assert d4.cache.tree_bytes(d4.cache.abstract_cache(plan)) == plan.memory_bytes(), label
        one_more = dataclasses.replace(plan, max_requests=4)
        grown = d4.cache.tree_bytes(d4.cache.abstract_cache(one_more)) - plan.memory_bytes()
        assert grown == plan.bytes_per_request, label
        longer = dataclasses.replace(plan, num_blocks=6)
        grown = d4.cache.tree_bytes(d4.cache.abstract_cache(longer)) - plan.memory_bytes()
        # A block also has an entry in the free list and a count of readers.
        assert grown == plan.bytes_per_token * plan.cfg.block_tokens + 8, label


def test_bytes_of_a_real_cache():
    plan = d4.plan_cache(TINY, max_requests=3, max_context=300, kv_format="fp8_tile64", indexer_format="mxfp4")
    cache = d4.init_cache(plan)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == plan.memory_bytes() == d4.cache.tree_bytes(cache)
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), cache)
    assert described == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), d4.cache.abstract_cache(plan)
    )


@pytest.mark.parametrize("cfg", [FLASH, PRO], ids=["flash", "pro"])
def test_a_cache_has_few_leaves(cfg):
    """Each leaf costs host time in every call. Because of stacking there are only 80 for 61 layers."""
    for kv, keys, tail in itertools.product(KV_FORMATS, INDEXER_FORMATS, ("ring", "online")):
        plan = d4.plan_cache(cfg, kv_format=kv, indexer_format=keys, hca_tail=tail)
        assert len(jax.tree.leaves(d4.cache.abstract_cache(plan))) <= 80, (kv, keys, tail)


# ---- block budget


@pytest.mark.parametrize(
    ("context", "requests", "headroom", "blocks"),
    [
        (128, 10, 1.1, 11),  # 10 * 1.1 is 11.000000000000002 in binary floats
        (128, 100, 1.1, 110),
        (128, 1, 1.0, 1),
        (127, 4, 1.0, 4),
        (129, 4, 1.0, 8),
        (130, 1, 1.0, 2),  # the last partial block counts
        (1, 3, 1.1, 4),  # 3.3
        (131072, 8, 1.1, 9012),  # 9011.2
        (256, 5, 2, 20),
    ],
)
def test_block_budget_by_hand(context, requests, headroom, blocks):
    assert d4.porting.compute_block_budget(FLASH, context, requests, headroom) == blocks
    plan = d4.plan_cache(FLASH, max_requests=requests, max_context=context, headroom=headroom)
    assert plan.num_blocks == blocks
    assert plan.max_blocks == -(-context // 128)


def test_headroom_is_a_tenth_by_default():
    assert d4.porting.compute_block_budget(FLASH, 128, 10) == 11
    assert d4.plan_cache(FLASH, max_requests=10, max_context=128).num_blocks == 11


def test_a_model_without_compression_needs_no_blocks():
    cfg = MODELS["swa alone"]
    assert d4.porting.compute_block_budget(cfg, 1 << 20, 100, 1.1) == 0
    plan = d4.plan_cache(cfg)
    assert plan.num_blocks == 1  # keeps the tables' arrays non-empty
    assert (plan.bytes_per_token, plan.min_ratio) == (0, 0)


def test_fewer_blocks_than_the_budget_are_legal():
    plan = d4.plan_cache(TINY, max_requests=4, max_context=1024, num_blocks=1)
    assert (plan.num_blocks, plan.max_blocks) == (1, 8)
    assert d4.cache.abstract_cache(plan).tables.block_refs.shape == (1,)


# ---- what a plan refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_format": "fp8"}, r"kv_format must be one of \['f32', 'bf16', 'fp8_row', 'fp8_tile64'\], got 'fp8'"),
        ({"kv_format": "nvfp4"}, "kv_format must be one of .*, got 'nvfp4'"),
        ({"indexer_format": "fp8_row"}, "indexer_format must be one of .*'mxfp4'.*, got 'fp8_row'"),
        ({"hca_tail": "rings"}, r"hca_tail must be one of \['ring', 'online'\], got 'rings'"),
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"max_requests": 2.5}, r"max_requests must be an integer, got 2\.5"),
        ({"max_context": 0}, r"max_context must be in \[1, 16777216\] .*got 0"),
        ({"max_context": (1 << 24) + 1}, r"max_context must be in \[1, 16777216\] .*fp32.*got 16777217"),
        ({"max_context": 1e5}, r"max_context must be an integer, got 100000\.0"),
        ({"headroom": 0.99}, r"headroom must be finite and at least 1, got 0\.99"),
        ({"headroom": math.inf}, "headroom must be finite and at least 1, got inf"),
        ({"headroom": math.nan}, "headroom must be finite and at least 1, got nan"),
        ({"tail_dtype": jnp.int32}, r"tail_dtype must be one of \['float32', 'bfloat16'\], got 'int32'"),
        # float64 would be narrowed by JAX, and narrower floats do not hold the gate of an empty slot.
        ({"tail_dtype": "float64"}, "tail_dtype must be .*, got 'float64'"),
        ({"tail_dtype": jnp.float16}, "tail_dtype must be .*, got 'float16'"),
        ({"tail_dtype": jnp.float8_e4m3fn}, "tail_dtype must be .*, got 'float8_e4m3fn'"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": 3.5}, r"num_blocks must be an integer, got 3\.5"),
    ],
    ids=str,
)
def test_a_refused_argument_is_named_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        d4.plan_cache(TINY, **arguments)


def test_formats_refuse_sizes_they_cannot_hold_when_planned():
    odd = d4.DSV4Config.tiny(head_dim=108)  # 100 NoPE dims
    with pytest.raises(ValueError, match="fp8_tile64: head_dim - rope_dim = 100 must be divisible by 64"):
        d4.plan_cache(odd, kv_format="fp8_tile64")
    assert d4.plan_cache(odd, kv_format="fp8_row").kv_format == "fp8_row"
    small = d4.DSV4Config.tiny(indexer_head_dim=8)
    for name, group in (("nvfp4", 16), ("mxfp4", 32)):
        with pytest.raises(ValueError, match=f"indexer_head_dim=8 must be divisible by the group of {group}"):
            d4.plan_cache(small, indexer_format=name)
    assert d4.plan_cache(small, indexer_format="bf16").indexer_format == "bf16"


@pytest.mark.parametrize("layer", [-1, 43])
def test_schemas_of_layers_that_do_not_exist_are_refused(layer):
    with pytest.raises(ValueError, match=rf"layer must be in \[0, 43\), got {layer}"):
        d4.porting.build_schema(FLASH, layer)


# ---- largest context


@pytest.mark.parametrize("model", ["flash", "pro", "tiny", "hca alone", "ratios 4 and 6"])
@pytest.mark.parametrize(("requests", "headroom"), [(None, 1.1), (1, 1.0), (7, 1.25)])
def test_largest_context_fits_and_one_block_more_does_not(model, requests, headroom):
    cfg = MODELS[model]
    plan = d4.plan_cache(cfg, max_requests=3, kv_format="fp8_tile64", indexer_format="mxfp4")

    def bytes_for(context: int) -> int:
        sized = d4.plan_cache(
            cfg, requests or 3, context, kv_format="fp8_tile64", indexer_format="mxfp4", headroom=headroom
        )
        return sized.memory_bytes()

    exact = bytes_for(1000 * cfg.block_tokens)
    for memory in (exact, exact - 1, exact + 1, 3 * exact + 12345):
        context = plan.largest_context(memory, requests, headroom)
        assert context % cfg.block_tokens == 0
        assert bytes_for(context) <= memory < bytes_for(context + cfg.block_tokens)
    assert plan.largest_context(exact, requests, headroom) == 1000 * cfg.block_tokens


def test_largest_context_at_both_ends():
    plan = d4.plan_cache(TINY, max_requests=3)
    assert plan.largest_context(1000) == 0
    assert plan.largest_context(1 << 60) == 1 << 24  # positions beyond are no exact fp32 angles
    with pytest.raises(ValueError, match="max_requests must be at least 1, got 0"):
        plan.largest_context(1 << 30, max_requests=0)


# ---- schemas


def test_schemas_of_flash_by_hand():
    common = {"entry_head_dim": 512, "rope_dim": 64, "swa_window_size": 128}
    window_only = {
        "compression_ratio": 0,
        "entries_per_block": 0,
        "indexer_entries_per_block": 0,
        "indexer_head_dim": 0,
        "tail_buffer_size_a": 0,
        "tail_buffer_size_b": 0,
    }
    sparse = {
        "compression_ratio": 4,
        "entries_per_block": 32,
        "indexer_entries_per_block": 32,
        "indexer_head_dim": 128,
        "tail_buffer_size_a": 4,
        "tail_buffer_size_b": 4,
    }
    heavy = window_only | {"compression_ratio": 128, "entries_per_block": 1, "tail_buffer_size_a": 128}
    plan = d4.plan_cache(FLASH)
    for layer, kind, sizes in [(0, SWA, window_only), (2, CSA, sparse), (3, HCA, heavy), (42, CSA, sparse)]:
        want = d4.porting.LayerCacheSchema(layer_idx=layer, attn_type=kind, **common, **sizes)
        assert d4.porting.build_schema(FLASH, layer) == want
        assert plan.schema(layer) == want


@pytest.mark.parametrize("cfg", [FLASH, PRO], ids=["flash", "pro"])
def test_layers_of_a_kind_agree_with_schedule_and_schemas(cfg):
    plan = d4.plan_cache(cfg)
    schedule = d4.config.layer_schedule(cfg)
    assert [spec.attn for spec in schedule] == [
        d4.porting.build_schema(cfg, i).attn_type for i in range(cfg.num_layers)
    ]
    for kind in d4.AttentionType:
        assert plan.layers(kind) == tuple(spec.layer_idx for spec in schedule if spec.attn == kind)
    assert sorted(itertools.chain(*(plan.layers(kind) for kind in d4.AttentionType))) == list(range(cfg.num_layers))


# ---- printed, hashed, static


def test_a_printed_plan_names_its_parts_and_totals():
    text = str(d4.plan_cache(FLASH, kv_format="fp8_tile64", indexer_format="mxfp4"))
    for kind in ("2 SWA", "21 CSA", "20 HCA"):
        assert kind in text
    # The figures worked out by hand above: per layer, then all layers, all requests or blocks.
    for part, one, unit, total in [
        ("tail", "48.00 KiB", "request", "7.88 MiB"),  # 21 * 8 * 48 KiB
        ("indexer tail", "12.00 KiB", "request", "1.97 MiB"),
        ("tail", "512.00 KiB", "request", "80.00 MiB"),  # 20 * 8 * 512 KiB
        ("entries", "18.22 KiB", "block", "3.29 GiB"),  # 32 * 583; times 21 * 9012
        ("indexer keys", "2.12 KiB", "block", "392.73 MiB"),
        ("entries", "583 B", "block", "100.21 MiB"),
    ]:
        assert any(
            f" {part} " in line and one in line and f"per {unit}" in line and line.endswith(total)
            for line in text.splitlines()
        ), (part, one, unit, total)
    for figure in ("15,010,957 B", "3,508.8 B", "9,012 blocks of 128 tokens", "8 requests x 131,072 tokens"):
        assert figure in text
    plan = d4.plan_cache(FLASH, kv_format="fp8_tile64", indexer_format="mxfp4")
    assert f"{plan.memory_bytes():,} B" in text
    assert f"{plan.largest_context(24 << 30):,} tokens" in text
    assert max(map(len, text.splitlines())) <= 150


def test_a_printed_plan_leaves_out_kinds_that_the_model_lacks():
    text = str(d4.plan_cache(MODELS["csa alone"]))
    assert "1 CSA" in text
    assert "SWA" not in text
    assert "HCA" not in text


def test_equal_plans_are_one_static_argument():
    traces = []

    @functools.partial(jax.jit, static_argnames="plan")
    def double(x, plan):
        traces.append(plan)
        return x * 2

    x = jnp.zeros(2)
    plans = [d4.plan_cache(TINY, max_requests=2), d4.plan_cache(d4.DSV4Config.tiny(), max_requests=2)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    for plan in plans:
        double(x, plan=plan)
    assert len(traces) == 1
    double(x, plan=d4.plan_cache(TINY, max_requests=2, tail_dtype=jnp.bfloat16))
    assert len(traces) == 2


def test_both_sets_of_default_formats_are_those_that_the_docstring_of_plan_cache_explains():
    """``plan_cache`` keeps the original's formats, and ``init_caches`` takes those of training."""
    plan, said = d4.plan_cache(d4.DSV4Config.tiny()), inspect.getdoc(d4.plan_cache) or ""
    assert (plan.kv_format, plan.indexer_format, plan.hca_tail) == ("fp8_row", "nvfp4", "ring")
    assert all(f'{name}="{value}"' in said for name, value in TRAINED.items())
