"""The kernels of products at a model's sizes, for ``compiled_kernels``."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from dsv4jax.kinds import AttentionType
from dsv4jax.weights.params import param_shapes
from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language.target import HOPPER
from pallas_kernels.operand_rows import OperandRows
from pallas_kernels.products.heads import Heads
from pallas_kernels.products.keys import KeyHeads
from pallas_kernels.products.launches import launch_tiles
from pallas_kernels.products.many.tiles import ManyInputs, needed_tiles
from pallas_kernels.products.many.tiling import Tiling, fastest_tiling, tiling_of_heads, tiling_of_key_heads
from pallas_kernels.rounding import round_rows
from pallas_kernels.scores import fp4
from tests.support.kernel_report import Kernel

MANY_ROWS = 100, 256, 4096  # few that do not fill a tile, those of a draft, those of a chunk
INDEXER_FORMAT = "nvfp4"  # a plan's default
Spec = jax.ShapeDtypeStruct


def product_kernels(cfg: d4.DSV4Config, *, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products of a model, of few rows and of many. Those of V4-Flash are for more numbers of rows."""
    yield from _multiplications(cfg, is_flash)
    yield from _pairs(cfg)
    yield from _queries_in_products(cfg, is_flash)
    yield from _multiplications_of_many(cfg, is_flash)


def f32(*shape: int) -> Any:
    return Spec(shape, jnp.float32)


def _weights(cfg: d4.DSV4Config) -> dict[str, tuple[int, int, int]]:
    """Return, of a layer's weights that are stored as FP8: outputs of all groups, inputs of one, groups."""
    heads, indexer = cfg.num_heads * cfg.head_dim, cfg.indexer_heads * cfg.indexer_head_dim
    return {
        "q_a_kv": (cfg.q_lora_rank + cfg.head_dim, cfg.hidden_size, 1),
        "q_b": (heads, cfg.q_lora_rank, 1),
        "index_q_b": (indexer, cfg.q_lora_rank, 1),
        "o_a": (cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups, cfg.o_groups),
        "o_b": (cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank, 1),
    }


def _multiplications(cfg: d4.DSV4Config, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products with stored weights, for few and most rows of a block, and those with compressors.

    FP8 activations and Pro's sizes for most rows alone, which take the most registers.
    """
    shapes = _weights(cfg)

    def multiply(form: pk.WeightForm, x: Any, weight: Any, scales: Any) -> Any:
        return pk.product(x, weight, scales, form)

    for rows in (1, 64) if is_flash else (64,):
        for name, (outputs, inputs, groups) in shapes.items():
            x = Spec((rows, groups * inputs), jnp.bfloat16)
            weight = (
                Spec((outputs, inputs), jnp.float8_e4m3fn),
                Spec((outputs // 128, inputs // 128), jnp.float8_e8m0fnu),
            )
            for activations in ("bf16", "fp8") if rows == 64 else ("bf16",):
                form = pk.WeightForm(block=(128, 128), groups=groups, activations=activations)
                function = functools.partial(multiply, form)
                title = f"product {name} {activations} [{rows}]"
                yield Kernel(name=title, function=function, args=(x, *weight), rows=None, reads_only=True)
        outputs, inputs, groups = shapes["o_a"]
        operand, weight = OperandRows.shapes(rows, groups * inputs), Spec((outputs, inputs), jnp.float8_e4m3fn)

        def in_order_of_operands(x: Any, weight: Any, scales: Any, groups: int = groups) -> Any:
            form = pk.WeightForm(block=(128, 128), groups=groups)
            return pk.product(x, weight, scales, form, dtype=jnp.bfloat16, is_operand=True)

        args = operand, weight, Spec((outputs // 128, inputs // 128), jnp.float8_e8m0fnu)
        title = f"product o_a of operand rows [{rows}]"
        yield Kernel(name=title, function=in_order_of_operands, args=args, rows=None, reads_only=True)
        outputs, inputs, _ = shapes["o_b"]

        def add(residual: Any, x: Any, weight: Any, scales: Any) -> Any:
            form = pk.WeightForm(block=(128, 128))
            return pk.product(x, weight, scales, form, dtype=jnp.bfloat16, residual=residual)

        residual = pk.Residual(rows=Spec((rows, outputs), jnp.bfloat16), positions=Spec((rows,), jnp.int32))
        x, weight = Spec((rows, inputs), jnp.bfloat16), Spec((outputs, inputs), jnp.float8_e4m3fn)
        args = residual, x, weight, Spec((outputs // 128, inputs // 128), jnp.float8_e8m0fnu)
        yield Kernel(name=f"product o_b onto [{rows}]", function=add, args=args, rows=None, reads_only=True)
        x, function = Spec((rows, cfg.hidden_size), jnp.bfloat16), functools.partial(multiply, pk.WeightForm())
        for name, outputs in {
            "compress": 2 * cfg.head_dim,
            "compress_csa": 4 * (cfg.head_dim + cfg.indexer_head_dim) + cfg.indexer_heads,
        }.items():
            args = x, Spec((outputs, cfg.hidden_size), jnp.bfloat16), None
            yield Kernel(name=f"product {name} [{rows}]", function=function, args=args, rows=None, reads_only=True)


def _pairs(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the products of a layer's input with both of its weights."""
    for rows, kind in itertools.product((1, 64), (AttentionType.CSA, AttentionType.HCA)):
        outputs, inputs, _ = _weights(cfg)["q_a_kv"]
        compress = param_shapes(cfg, kind).compress
        assert compress is not None
        forms = pk.WeightForm(), pk.WeightForm(block=(128, 128))
        if pk.unsupported_product_pair((compress.shape, (outputs, inputs)), forms, rows) is not None:
            continue  # two launches are as fast
        x, wide = Spec((rows, inputs), jnp.bfloat16), Spec(compress.shape, jnp.bfloat16)
        codes = Spec((outputs, inputs), jnp.float8_e4m3fn)
        scales = Spec((outputs // 128, inputs // 128), jnp.float8_e8m0fnu)

        def multiply(x: Any, wide: Any, codes: Any, scales: Any, forms: Any = forms) -> Any:
            return pk.product_pair(x, (wide, None, forms[0]), (codes, scales, forms[1]))

        yield Kernel(
            name=f"products {kind} [{rows}]",
            function=multiply,
            args=(x, wide, codes, scales),
            rows=None,
            reads_only=True,
        )


def _queries_in_products(cfg: d4.DSV4Config, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products of few rows that make queries."""
    shapes, form = _weights(cfg), pk.WeightForm(block=(128, 128))
    for rows in (1, 64):
        angles = f32(rows, cfg.rope_dim)
        convert: dict[str, Any] = {
            "q_b": functools.partial(pk.product_of_queries, form=form, eps=cfg.norm_eps),
        }
        for key_format in fp4.FORMATS if is_flash else ("mxfp4",):
            row = INDEXER_FORMATS[key_format].row(cfg.indexer_head_dim)
            make = functools.partial(pk.product_of_indexer_queries, form=form, key_row=row, key_format=key_format)
            convert[f"index_q_b {key_format}"] = make
        for name, function in convert.items():
            outputs, inputs, _ = shapes[name.split()[0]]
            x, weight = Spec((rows, inputs), jnp.bfloat16), Spec((outputs, inputs), jnp.float8_e4m3fn)
            scales = Spec((outputs // 128, inputs // 128), jnp.float8_e8m0fnu)

            def multiply(x: Any, weight: Any, scales: Any, angles: Any, function: Any = function) -> Any:
                return function(x, weight, scales, angles=angles)

            title = f"product_of_queries {name} [{rows}]"
            yield Kernel(name=title, function=multiply, args=(x, weight, scales, angles), rows=None, reads_only=True)
        yield from _both_queries(cfg, rows)


def _both_queries(cfg: d4.DSV4Config, rows: int) -> Iterator[Kernel]:
    """Yield the product of few rows that makes the queries of attention and of the indexer, where there is one."""
    shapes = [_weights(cfg)[name][:2] for name in ("q_b", "index_q_b")]
    form = pk.QueryForm(
        weight=pk.WeightForm(block=(128, 128)),
        eps=cfg.norm_eps,
        key_row=INDEXER_FORMATS["mxfp4"].row(cfg.indexer_head_dim),
        key_format="mxfp4",
    )
    if pk.unsupported_product_of_both_queries((shapes[0], shapes[1]), form, rows, cfg.rope_dim) is not None:
        return
    weights = [
        (Spec(shape, jnp.float8_e4m3fn), Spec((shape[0] // 128, shape[1] // 128), jnp.float8_e8m0fnu))
        for shape in shapes
    ]

    def multiply(x: Any, first: Any, second: Any, angles: Any) -> Any:
        return pk.product_of_both_queries(x, first, second, form, angles)

    args = Spec((rows, cfg.q_lora_rank), jnp.bfloat16), *weights, f32(rows, cfg.rope_dim)
    title = f"product_of_queries both [{rows}]"
    yield Kernel(name=title, function=multiply, args=args, rows=None, reads_only=True)


def _multiplications_of_many(cfg: d4.DSV4Config, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products of many rows, with the tilings that they get, and the rounding of rows before some of them."""
    all_rows = MANY_ROWS if is_flash else MANY_ROWS[-1:]
    for rows, (name, (outputs, inputs, groups)), activations in itertools.product(
        all_rows, _weights(cfg).items(), ("bf16", "fp8")
    ):
        form = pk.WeightForm(block=(128, 128), groups=groups, activations=activations)
        tiling = fastest_tiling(rows, outputs // groups, inputs, form, HOPPER)
        function = functools.partial(launch_tiles, tiling, dtype=jnp.bfloat16 if name == "o_a" else jnp.float32)
        is_rounded = activations == "fp8"
        args = ManyInputs(
            x=Spec((rows, groups * inputs), jnp.uint8 if is_rounded else jnp.bfloat16),
            x_scales=f32(groups * inputs // 128, -(-rows // 128) * 128) if is_rounded else None,
            weight=Spec((outputs, inputs), jnp.uint8),
            scales=Spec((outputs // 128, inputs // 128), jnp.uint8),
            needed=_needed(tiling),
        )
        title = f"product_of_many {name} {activations} [{rows}]"
        yield Kernel(name=title, function=function, args=(args,), rows=None, reads_only=True)
        if name == "o_b" and rows == all_rows[-1]:
            onto = functools.partial(_launch_onto, tiling)
            given = Spec((rows, outputs), jnp.bfloat16), dataclasses.replace(args, positions=Spec((rows,), jnp.int32))
            yield Kernel(name=f"{title}, onto rows", function=onto, args=given, rows=None)
        if is_rounded and name == "o_a" and tiling.parts == 1:
            function = functools.partial(launch_tiles, tiling, dtype=jnp.float8_e4m3fn)
            title += ", rounded"
            yield Kernel(name=title, function=function, args=(args,), rows=None, reads_only=True)
        if is_rounded and name == "q_b":
            heads = Heads(dim=cfg.head_dim, eps=cfg.norm_eps)
            tiling = tiling_of_heads(rows, outputs, inputs, form, heads, HOPPER)
            function = functools.partial(launch_tiles, tiling, dtype=jnp.float16)
            args = dataclasses.replace(args, angles=f32(rows, cfg.rope_dim), needed=_needed(tiling))
            title = f"product_of_queries {name} {activations} [{rows}]"
            yield Kernel(name=title, function=function, args=(args,), rows=None, reads_only=True)
        if is_rounded and name == "index_q_b":
            keys = KEY_FORMATS[INDEXER_FORMAT]
            assert isinstance(keys, Fp4Keys)
            tiling = tiling_of_key_heads(rows, outputs, inputs, form, KeyHeads(keys=keys), HOPPER)
            key_row = INDEXER_FORMATS[INDEXER_FORMAT].row(cfg.indexer_head_dim)
            function = functools.partial(launch_tiles, tiling, key_row=key_row)
            args = dataclasses.replace(args, angles=f32(rows, cfg.rope_dim), needed=_needed(tiling))
            title = f"product_of_indexer_queries {name} {activations} [{rows}]"
            yield Kernel(name=title, function=function, args=(args,), rows=None, reads_only=True)
    for kind in (AttentionType.CSA, AttentionType.HCA):
        compress = param_shapes(cfg, kind).compress
        assert compress is not None
        tiling = fastest_tiling(all_rows[-1], *compress.shape, pk.WeightForm(), HOPPER)
        args = ManyInputs(
            x=Spec((all_rows[-1], cfg.hidden_size), jnp.bfloat16),
            x_scales=None,
            weight=Spec(compress.shape, jnp.bfloat16),
            scales=None,
            needed=_needed(tiling),
        )
        function = functools.partial(launch_tiles, tiling, dtype=jnp.float32)
        title = f"product_of_many compressors of {kind} bf16 [{all_rows[-1]}]"
        yield Kernel(name=title, function=function, args=(args,), rows=None, reads_only=True)
    x = Spec((all_rows[-1], cfg.hidden_size), jnp.bfloat16)
    yield Kernel(name="round_rows", function=round_rows, args=(x,), rows=None, reads_only=True)


def _launch_onto(tiling: Tiling, rows: Any, inputs: ManyInputs) -> Any:
    return launch_tiles(tiling, inputs, jnp.bfloat16, onto=rows)


def _needed(tiling: Tiling) -> Any:
    """Return which tiles of rows are needed, where a chunk's product leaves out those of padding."""
    if tiling.parts > 1:
        return None
    find = functools.partial(needed_tiles, tile_rows=tiling.tile_rows, tiles_of_outputs=tiling.output_tiles)
    return jax.eval_shape(find, Spec((tiling.rows,), jnp.bool_))
