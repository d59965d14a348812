"""Which kernel serves each product of the models, and how it is divided: python -m tests.support.chosen_plans

A line for each product, number of rows, kind of activations and GPU. A change that is not meant to choose other plans
prints the same lines before and after.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from dsv4jax.kinds import AttentionType
from dsv4jax.weights.params import param_shapes
from pallas_kernels.language import target
from pallas_kernels.products.few.launch import Few, Pair
from pallas_kernels.products.few.layout import Layout
from pallas_kernels.products.many.launch import Many
from tests.support.compiled_products import INDEXER_FORMAT, weights_of

MODELS = {"flash": d4.DSV4Config.flash(), "pro": d4.DSV4Config.pro()}
ROWS = 1, 2, 8, 16, 32, 64, 65, 128, 256, 1024, 4096


def described(plan: pk.Plan | pk.Unsupported, otherwise: str) -> str:
    """Say what a plan launches, or what is done instead."""
    if isinstance(plan, pk.Unsupported):
        return otherwise
    kernel = plan.kernel
    if isinstance(kernel, Few):
        return _few(kernel.layout)
    if isinstance(kernel, Pair):
        return " + ".join(map(_few, kernel.layouts))
    assert isinstance(kernel, Many), "products of a layer's weights"
    tiling = kernel.tiling
    tiles = f"{tiling.tile_rows} x {tiling.tile_outputs}, {tiling.parts} parts, {tiling.stages} stages"
    return f"many: {tiles}; {_grid(tiling.grid)}"


def _few(layout: Layout) -> str:
    split, beside = layout.split, layout.epilogue.beside
    parts = f"{split.parts} parts" if split.turns == 1 else f"{split.turns} turns"
    of_block = f"{split.tiles} tiles of {parts} of {split.chunks} chunks, {beside} beside"
    x = "streamed" if layout.streams else f"in segments of {layout.segment}"
    return f"few: {of_block}; {layout.columns} columns {x}, {layout.stages} stages; {_grid(layout.grid)}"


def _grid(grid: Any) -> str:
    return f"{grid.blocks} x {grid.cluster} of {grid.warpgroups}, {grid.shared_bytes} bytes"


def choices(cfg: d4.DSV4Config, gpu: target.GPU, rows: int, activations: str) -> Iterator[tuple[str, str]]:
    """Yield what is chosen for the products of a model."""
    weights = weights_of(cfg, activations)
    row = INDEXER_FORMATS[INDEXER_FORMAT].row(cfg.indexer_head_dim)
    queries = pk.AttentionQueries(eps=cfg.norm_eps, rope_dim=cfg.rope_dim, head_dim=cfg.head_dim)
    key_queries = pk.IndexerQueries(key_format=INDEXER_FORMAT, key_row=row, rope_dim=cfg.rope_dim)

    def problem(*of: tuple[pk.WeightSpec, Any], needed: pk.Needed = pk.Needed.ALL) -> pk.Problem:
        (first, _), *_ = of
        of_weights, epilogues = zip(*of, strict=True)
        width = first.groups * first.inputs
        given = pk.RowsSpec(count=rows, width=width)
        return pk.Problem(rows=given, weights=of_weights, epilogues=epilogues, needed=needed)

    def chosen(*of: tuple[pk.WeightSpec, Any], otherwise: str = "two launches", **options: Any) -> str:
        return described(pk.plan(problem(*of, **options), gpu), otherwise)

    kinds = {pk.OperandRows: "operand", pk.RoundedRows: "rounded"}
    for name, weight in weights.items():
        taken = pk.rows_taken(problem((weight, pk.Store())), gpu)
        yield f"{name}, {kinds.get(taken.kind, 'plain')}", chosen((weight, pk.Store()), otherwise="XLA")
    both = (weights["q_b"], queries), (weights["index_q_b"], key_queries)
    yield "q_b to queries", chosen(both[0])
    yield "index_q_b to queries", chosen(both[1])
    yield "q_b and index_q_b to queries", chosen(*both)
    which = {"all": pk.Needed.ALL, "one request": pk.Needed.PREFIX, "several": pk.Needed.MASK}
    for kind in (AttentionType.CSA, AttentionType.HCA):
        compress = param_shapes(cfg, kind).compress
        assert compress is not None
        of_input = pk.WeightSpec(shape=compress.shape), pk.Store()
        for name, needed in which.items():
            yield f"compressors of {kind}, {name} needed", chosen(of_input, needed=needed, otherwise="XLA")
        yield f"compressors of {kind} and q_a_kv", chosen(of_input, (weights["q_a_kv"], pk.Store()))


def main() -> None:
    for gpu, (model, cfg), activations, rows in itertools.product(target.GPUS, MODELS.items(), ("bf16", "fp8"), ROWS):
        for name, chosen in choices(cfg, gpu, rows, activations):
            print(f"{gpu.architecture} {model} {activations} [{rows}] {name}: {chosen}")


if __name__ == "__main__":
    main()
