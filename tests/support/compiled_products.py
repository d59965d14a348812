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
from dsv4jax.model.config import ModelConfig
from dsv4jax.weights.params import param_shapes
from pallas_kernels.activations import ActivationRows, PlainRows, round_rows
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.experts.epilogues import ExpertEpilogue
from pallas_kernels.products.experts.launch import OfExperts
from pallas_kernels.products.experts.rows import expert_rows
from pallas_kernels.products.experts.sm90 import ExpertInputs
from pallas_kernels.products.many.launch import Many
from pallas_kernels.products.many.tiles import ManyInputs, needed_tiles
from pallas_kernels.products.many.tiling import Tiling, fastest_tiling, tiling_of_heads
from pallas_kernels.products.problem import Epilogue
from pallas_kernels.scores import fp4
from tests.support.kernel_report import Kernel

MANY_ROWS = 100, 256, 4096  # few that do not fill a tile, those of a draft, those of a chunk
INDEXER_FORMAT = "nvfp4"  # a plan's default
Spec = jax.ShapeDtypeStruct


def product_kernels(cfg: d4.DSV4Config, *, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products of a model, of few rows and of many. Those of V4-Flash are for more numbers of rows."""
    yield from _multiplications(cfg, is_flash)
    if is_flash:
        yield from _in_the_order_of_few(cfg)
    yield from _pairs(cfg)
    yield from _queries_in_products(cfg, is_flash)
    yield from _multiplications_of_many(cfg, is_flash)
    model = ModelConfig.flash() if is_flash else ModelConfig.pro()
    yield from _experts(model, is_flash)
    yield from _shared_expert(model, is_flash)
    yield from _experts_and_shared(model, is_flash)


def _shared_expert(cfg: ModelConfig, is_flash: bool) -> Iterator[Kernel]:
    """Yield the gated product of the shared expert: of Pro for most rows alone."""
    for rows, activations in ((1, "bf16"), (64, "bf16"), (64, "fp8")) if is_flash else ((64, "bf16"),):
        weight = shared_gate_up(cfg, activations)
        made = pk.SwiGLU(limit=cfg.swiglu_limit, kind=pk.OperandRows)
        yield from _kernel(f"{made.name} {activations} [{rows}]", rows, (weight, made))


def shared_gate_up(cfg: ModelConfig, activations: str) -> pk.WeightSpec:
    """Return the weight of the shared expert's gates and ups."""
    shape = 2 * cfg.expert_width, cfg.hidden_size
    return pk.WeightSpec(shape=shape, block=(128, 128), activations=activations)


def _experts_and_shared(cfg: ModelConfig, is_flash: bool) -> Iterator[Kernel]:
    """Yield both products of experts and of the shared one in one launch: of V4-Flash for fewest and most tokens."""
    for tokens in (1, 32) if is_flash else (1,):
        shared = (
            (shared_gate_up(cfg, "bf16"), pk.SwiGLU(limit=cfg.swiglu_limit, kind=pk.OperandRows), PlainRows),
            (
                pk.WeightSpec(shape=(cfg.hidden_size, cfg.expert_width), block=(128, 128)),
                pk.Store(dtype=jnp.bfloat16),
                pk.OperandRows,
            ),
        )
        for (weight, made), (shared_weight, shared_made, kind) in zip(
            _of_experts(cfg, tokens, "bf16"), shared, strict=True
        ):
            rows = pk.RowsSpec(count=made.x_rows, width=weight.inputs)
            problem = pk.Problem(rows=rows, weights=(weight,), epilogues=(made,))
            rows = pk.RowsSpec(count=tokens, width=shared_weight.inputs, kind=kind)
            problems = (
                dataclasses.replace(problem, rows=pk.rows_taken(problem, HOPPER)),
                pk.Problem(rows=rows, weights=(shared_weight,), epilogues=(shared_made,)),
            )
            experts, alone = (pk.plan(each, HOPPER) for each in problems)
            assert isinstance(experts, pk.Plan)
            assert isinstance(alone, pk.Plan)
            plan = pk.together(experts, alone)
            if isinstance(plan, pk.Together):
                title = f"{made.name}_and_shared [{tokens}]"
                run = functools.partial(pk.run_together, plan)
                args = tuple(map(_operands, problems))
                # Two results have a list of their places.
                yield Kernel(name=title, function=run, args=args, rows=None, reads_only=True, has_scratch=True)


def _operands(problem: pk.Problem) -> Any:
    """Return the shapes of what a product takes."""
    weights: Any = [weight.arrays for weight in problem.weights]
    extras: Any = [*problem.extras.values()]
    return pk.Operands(x=problem.rows.shapes, weights=weights, extras=extras)


def _experts(cfg: ModelConfig, is_flash: bool) -> Iterator[Kernel]:
    """Yield both products with experts: from one token to a chunk, in tiles of all sizes; of Pro in the largest."""
    for tokens, activations in itertools.product((1, 256, 1024, 2048, 4096) if is_flash else (4096,), ("bf16", "fp8")):
        yield from _products_with_experts(cfg, tokens, activations)
    for kind, pairs in ((pk.RoundedExpertRows, None), (pk.ExpertRows, Spec((36,), jnp.int32))):
        made = functools.partial(expert_rows, kind=kind, picks=cfg.experts_per_token, simulate=False)
        args = PlainRows.shapes(24, cfg.hidden_size), pairs
        yield Kernel(
            name=f"experts_rows {kind.__name__}",
            function=lambda x, pairs, made=made: made(x, pairs=pairs),
            args=args,
            rows=None,
            reads_only=True,
        )


def _products_with_experts(cfg: ModelConfig, tokens: int, activations: str) -> Iterator[Kernel]:
    """Yield both products, without the launches that round rows before them."""
    for weight, made in _of_experts(cfg, tokens, activations):
        plain = pk.RowsSpec(count=made.x_rows, width=weight.inputs)
        problem = pk.Problem(rows=plain, weights=(weight,), epilogues=(made,))
        problem = dataclasses.replace(problem, rows=pk.rows_taken(problem, HOPPER))
        plan = pk.plan(problem, HOPPER)
        assert isinstance(plan, pk.Plan)
        assert isinstance(plan.kernel, OfExperts)
        first = plan.kernel.layouts[0]
        rows: Any = problem.rows.shapes
        if first.is_rounded or first.sorts:
            rows = made.routing.row_kind.shapes(made.routing.pairs if first.sorts else made.x_rows, weight.inputs)
        x, x_scales = (rows.codes, rows.scales) if first.is_rounded else (rows.values, None)
        codes, scales = (Spec((leaf.shape[0] * leaf.shape[1], leaf.shape[2]), jnp.uint8) for leaf in weight.arrays)
        inputs = ExpertInputs(x=x, x_scales=x_scales, codes=codes, scales=scales, **problem.extras)
        for layout in plan.kernel.layouts:
            yield Kernel(
                name=f"{made.name} {activations} [{tokens}] in tiles of {layout.rows}",
                function=OfExperts(layouts=(layout,)).launch_product,
                args=(inputs,),
                rows=None,
                reads_only=True,
            )


def _of_experts(cfg: ModelConfig, tokens: int, activations: str) -> list[tuple[pk.ExpertsSpec, ExpertEpilogue]]:
    """Return the weights of both products with experts, and what is made of their sums."""
    hidden, width = cfg.hidden_size, cfg.expert_width
    rows = pk.tile_rows(tokens, cfg.experts_per_token, cfg.num_experts)
    routing = pk.Routing(
        tokens=tokens, picks=cfg.experts_per_token, experts=cfg.num_experts, rows=rows, activations=activations
    )
    stored: Any = dict(experts=cfg.num_experts, interleaved=True, activations=activations)
    return [
        (pk.ExpertsSpec(shape=(2 * width, hidden), **stored), pk.Gated(routing=routing, limit=cfg.swiglu_limit)),
        (pk.ExpertsSpec(shape=(hidden, width), **stored), pk.OfPicks(routing=routing)),
    ]


def f32(*shape: int) -> Any:
    return Spec(shape, jnp.float32)


def weights_of(cfg: d4.DSV4Config, activations: str) -> dict[str, pk.WeightSpec]:
    """Return a layer's weights that are stored as FP8, by name."""
    heads, indexer = cfg.num_heads * cfg.head_dim, cfg.indexer_heads * cfg.indexer_head_dim
    shapes = {
        "q_a_kv": (cfg.q_lora_rank + cfg.head_dim, cfg.hidden_size),
        "q_b": (heads, cfg.q_lora_rank),
        "index_q_b": (indexer, cfg.q_lora_rank),
        "o_a": (cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups),
        "o_b": (cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank),
    }
    return {
        name: pk.WeightSpec(
            shape=shape, block=(128, 128), activations=activations, groups=cfg.o_groups if name == "o_a" else 1
        )
        for name, shape in shapes.items()
    }


def _wide(cfg: d4.DSV4Config, kind: AttentionType) -> pk.WeightSpec:
    """Return the weight of a layer's compressors."""
    compress = param_shapes(cfg, kind).compress
    assert compress is not None
    return pk.WeightSpec(shape=compress.shape)


def _kernel(
    title: str,
    rows: int,
    *of: tuple[pk.WeightSpec, Epilogue],
    kind: type[ActivationRows] = PlainRows,
    invariant: bool = False,
) -> Iterator[Kernel]:
    """Yield the launch of a product; none if it has no kernel."""
    (first, _), *_ = of
    weights, epilogues = zip(*of, strict=True)
    given = pk.RowsSpec(count=rows, width=first.groups * first.inputs, kind=kind)
    problem = pk.Problem(rows=given, weights=weights, epilogues=epilogues)
    if isinstance(served := pk.plan(problem, HOPPER, invariant=invariant), pk.Unsupported) and served.plan is None:
        return

    def multiply(x: Any, weights: Any, *extras: Any) -> Any:
        found = pk.plan(problem, invariant=invariant)
        return pk.run(found.plan if isinstance(found, pk.Unsupported) else found, x, weights, *extras)

    args = given.shapes, tuple(weight.arrays for weight in weights), *problem.extras.values()
    yield Kernel(name=title, function=multiply, args=args, rows=None, reads_only=True)


def _multiplications(cfg: d4.DSV4Config, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products with stored weights, for few and most rows of a block, and those with compressors.

    FP8 activations and Pro's sizes for most rows alone, which take the most registers.
    """
    for rows in (1, 64) if is_flash else (64,):
        for name in weights_of(cfg, "bf16"):
            for activations in ("bf16", "fp8") if rows == 64 else ("bf16",):
                weight = weights_of(cfg, activations)[name]
                yield from _kernel(f"product {name} {activations} [{rows}]", rows, (weight, pk.Store()))
        weights = weights_of(cfg, "bf16")
        made = pk.Store(kind=pk.OperandRows)
        yield from _kernel(f"product o_a of operand rows [{rows}]", rows, (weights["o_a"], made), kind=pk.OperandRows)
        yield from _kernel(f"product o_b onto [{rows}]", rows, (weights["o_b"], pk.AddTo()))
        for name, kind in {"compress": AttentionType.HCA, "compress_csa": AttentionType.CSA}.items():
            yield from _kernel(f"product {name} [{rows}]", rows, (_wide(cfg, kind), pk.Store()))


def _in_the_order_of_few(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the products of an invariant cache: of the most rows that a block has, and of a chunk."""
    weights, operand = weights_of(cfg, "bf16"), pk.OperandRows
    for rows in (128, 4096):
        of_rows: tuple[tuple[str, pk.WeightSpec, Epilogue, type[ActivationRows]], ...] = (
            ("q_a_kv", weights["q_a_kv"], pk.Store(), PlainRows),
            ("q_b", weights["q_b"], pk.AttentionQueries(eps=cfg.norm_eps, rope_dim=cfg.rope_dim), operand),
            ("index_q_b", weights["index_q_b"], _key_queries(cfg, INDEXER_FORMAT), operand),
            ("o_a", weights["o_a"], pk.Store(kind=operand), operand),
            ("o_b", weights["o_b"], pk.AddTo(), operand),
            ("compress_csa", _wide(cfg, AttentionType.CSA), pk.Store(), PlainRows),
        )
        for name, weight, made, kind in of_rows:
            title = f"{made.name} {name} in the order of few [{rows}]"
            yield from _kernel(title, rows, (weight, made), kind=kind, invariant=True)


def _pairs(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield the products of a layer's input with both of its weights, where they are one launch."""
    for rows, kind in itertools.product((1, 64), (AttentionType.CSA, AttentionType.HCA)):
        both = (_wide(cfg, kind), pk.Store()), (weights_of(cfg, "bf16")["q_a_kv"], pk.Store())
        yield from _kernel(f"products {kind} [{rows}]", rows, *both)


def _key_queries(cfg: d4.DSV4Config, key_format: str) -> pk.IndexerQueries:
    row = INDEXER_FORMATS[key_format].row(cfg.indexer_head_dim)
    return pk.IndexerQueries(key_format=key_format, key_row=row, rope_dim=cfg.rope_dim)


def _queries_in_products(cfg: d4.DSV4Config, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products of few rows that make queries."""
    weights = weights_of(cfg, "bf16")
    queries = pk.AttentionQueries(eps=cfg.norm_eps, rope_dim=cfg.rope_dim)
    for rows in (1, 64):
        yield from _kernel(f"product_of_queries q_b [{rows}]", rows, (weights["q_b"], queries))
        for key_format in fp4.FORMATS if is_flash else ("mxfp4",):
            of_indexer = weights["index_q_b"], _key_queries(cfg, key_format)
            yield from _kernel(f"product_of_queries index_q_b {key_format} [{rows}]", rows, of_indexer)
        both = (weights["q_b"], queries), (weights["index_q_b"], _key_queries(cfg, "mxfp4"))
        yield from _kernel(f"product_of_queries both [{rows}]", rows, *both)


def _of_tiles(title: str, tiling: Tiling) -> Iterator[Kernel]:
    """Yield the kernel of many rows, without the launches that round rows before it."""
    rows, weight = tiling.rows, tiling.weight
    width = weight.groups * weight.inputs
    extras = tiling.epilogue.extras(rows, weight.shape[0])
    onto = extras.pop("onto", None)
    arrays = [Spec(leaf.shape, jnp.uint8) if leaf.dtype.itemsize == 1 else leaf for leaf in weight.arrays]
    inputs = ManyInputs(
        x=Spec((rows, width), jnp.uint8 if tiling.is_rounded else jnp.bfloat16),
        x_scales=f32(width // 128, -(-rows // 128) * 128) if tiling.is_rounded else None,
        weight=arrays[0],
        scales=arrays[1] if arrays[1:] else None,
        extras=extras,
        needed=_needed(tiling),
    )
    launch = Many(tiling=tiling).launch_tiles
    if onto is None:
        yield Kernel(name=title, function=launch, args=(inputs,), rows=None, reads_only=True)
    else:
        yield Kernel(name=title, function=lambda onto, inputs: launch(inputs, onto), args=(onto, inputs), rows=None)


def _multiplications_of_many(cfg: d4.DSV4Config, is_flash: bool) -> Iterator[Kernel]:
    """Yield the products of many rows, with the tilings that they get, and the rounding of rows before some of them."""
    all_rows = MANY_ROWS if is_flash else MANY_ROWS[-1:]
    for rows, name, activations in itertools.product(all_rows, weights_of(cfg, "bf16"), ("bf16", "fp8")):
        weight, is_rounded = weights_of(cfg, activations)[name], activations == "fp8"
        in_bf16 = pk.Store(dtype=jnp.bfloat16)
        tiling = fastest_tiling(rows, weight, in_bf16 if name == "o_a" else pk.Store(), HOPPER)
        title = f"product_of_many {name} {activations} [{rows}]"
        yield from _of_tiles(title, tiling)
        if name == "o_b" and rows == all_rows[-1]:
            yield from _of_tiles(f"{title}, onto rows", fastest_tiling(rows, weight, pk.AddTo(), HOPPER))
        if is_rounded and name == "o_a" and tiling.parts == 1:
            rounded = fastest_tiling(rows, weight, pk.Store(kind=pk.RoundedRows), HOPPER)
            yield from _of_tiles(f"{title}, rounded", rounded)
        if is_rounded and name == "q_b":
            queries = pk.AttentionQueries(eps=cfg.norm_eps, rope_dim=cfg.rope_dim)
            tiling = tiling_of_heads(rows, weight, queries, HOPPER)
            yield from _of_tiles(f"product_of_queries {name} {activations} [{rows}]", tiling)
        if is_rounded and name == "index_q_b":
            tiling = tiling_of_heads(rows, weight, _key_queries(cfg, INDEXER_FORMAT), HOPPER)
            yield from _of_tiles(f"product_of_indexer_queries {name} {activations} [{rows}]", tiling)
    for kind in (AttentionType.CSA, AttentionType.HCA):
        tiling = fastest_tiling(all_rows[-1], _wide(cfg, kind), pk.Store(), HOPPER)
        yield from _of_tiles(f"product_of_many compressors of {kind} bf16 [{all_rows[-1]}]", tiling)
    x = Spec((all_rows[-1], cfg.hidden_size), jnp.bfloat16)
    yield Kernel(name="round_rows", function=round_rows, args=(x,), rows=None, reads_only=True)


def _needed(tiling: Tiling) -> Any:
    """Return which tiles of rows are needed, where a chunk's product leaves out those of padding."""
    if tiling.parts > 1:
        return None
    find = functools.partial(needed_tiles, tile_rows=tiling.tile_rows, tiles_of_outputs=tiling.output_tiles)
    return jax.eval_shape(find, Spec((tiling.rows,), jnp.bool_))
