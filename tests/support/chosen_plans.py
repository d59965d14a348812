"""Which kernel serves each product of the models, and how it is divided: python -m tests.support.chosen_plans

A line for each product, number of rows, kind of activations and GPU. A change that is not meant to choose other plans
prints the same lines before and after.
"""

import itertools
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.kernels.products import _most_numbers
from dsv4jax.weights.params import param_shapes
from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language import target
from pallas_kernels.products import call
from pallas_kernels.products.block import Layout
from pallas_kernels.products.both import layout_of_both
from pallas_kernels.products.heads import Heads
from pallas_kernels.products.keys import KeyHeads
from pallas_kernels.products.launches import fastest_layout, layout_of_heads
from pallas_kernels.products.many.tiling import Tiling, fastest_tiling, tiling_of_heads, tiling_of_key_heads
from pallas_kernels.products.queries import AttentionHeads, IndexerHeads
from tests.support.compiled_products import INDEXER_FORMAT, _weights

MODELS = {"flash": d4.DSV4Config.flash(), "pro": d4.DSV4Config.pro()}
ROWS = 1, 2, 8, 16, 32, 64, 65, 128, 256, 1024, 4096


def described(plan: Layout | Tiling | str) -> str:
    if isinstance(plan, str):
        return plan
    grid = f"{plan.grid.blocks} x {plan.grid.cluster} of {plan.grid.warpgroups}, {plan.grid.shared_bytes} bytes"
    if isinstance(plan, Tiling):
        return f"many: {plan.tile_rows} x {plan.tile_outputs}, {plan.parts} parts, {plan.stages} stages; {grid}"
    split = plan.split
    of_block = f"{split.tiles} tiles of {split.parts} parts of {split.chunks} chunks, {plan.beside} beside"
    x = "streamed" if plan.streams else f"in segments of {plan.segment}"
    return f"few: {of_block}; {plan.columns} columns {x}, {plan.stages} stages; {grid}"


def choices(cfg: d4.DSV4Config, rows: int, activations: str) -> Iterator[tuple[str, str]]:
    """Yield what is chosen for the products of a model."""
    gpu, shapes = target.gpu_or_first(), _weights(cfg)
    indexer = KEY_FORMATS[INDEXER_FORMAT]
    assert isinstance(indexer, Fp4Keys)
    form = pk.WeightForm(block=(128, 128), activations=activations)

    def store(shape: tuple[int, int], form: pk.WeightForm) -> Layout | Tiling | str:
        if pk.unsupported_product(shape, form, rows) is not None:
            return "XLA"
        few = call.MOST_ROWS if form.block is None else call.ROWS
        if rows <= few or call._unsupported_many(shape, form) is not None:
            return fastest_layout(rows, shape, form, gpu)
        return fastest_tiling(rows, shape[0] // form.groups, shape[1], form, gpu)

    for name, (outputs, inputs, groups) in shapes.items():
        of_groups = pk.WeightForm(block=(128, 128), groups=groups, activations=activations)
        takes = "operand" if pk.takes_operand((outputs, inputs), of_groups, rows) else "plain"
        takes = "rounded" if pk.takes_rounded((outputs, inputs), of_groups, rows) else takes
        yield f"{name}, {takes}", described(store((outputs, inputs), of_groups))

    shape = shapes["q_b"][:2]
    made: Layout | Tiling | None = None
    if pk.unsupported_product_of_queries(shape, form, rows, cfg.head_dim, cfg.rope_dim) is None:
        if rows <= 64:
            made = layout_of_heads(rows, shape, form, AttentionHeads(dim=512, eps=1e-6), gpu)
        else:
            made = tiling_of_heads(rows, *shape, form, Heads(dim=512, eps=1e-6), gpu)
    yield "q_b to queries", described(made or "two launches")

    shape, made = shapes["index_q_b"][:2], None
    asked = shape, form, rows, cfg.indexer_head_dim, cfg.rope_dim, INDEXER_FORMAT
    if pk.unsupported_product_of_indexer_queries(*asked) is None:
        if rows <= 64:
            made = layout_of_heads(rows, shape, form, IndexerHeads(dim=128, keys=indexer), gpu)
        else:
            made = tiling_of_key_heads(rows, *shape, form, KeyHeads(keys=indexer), gpu)
    yield "index_q_b to queries", described(made or "two launches")

    row = INDEXER_FORMATS[INDEXER_FORMAT].row(cfg.indexer_head_dim)
    queries = pk.QueryForm(weight=form, eps=1e-6, key_row=row, key_format=INDEXER_FORMAT)
    both = shapes["q_b"][:2], shapes["index_q_b"][:2]
    is_one = pk.unsupported_product_of_both_queries(both, queries, rows, cfg.rope_dim) is None
    yield (
        "q_b and index_q_b to queries",
        described((is_one and layout_of_both(rows, both, queries, gpu)) or "two launches"),
    )

    for kind in (AttentionType.CSA, AttentionType.HCA):
        compress = param_shapes(cfg, kind).compress
        assert compress is not None
        for needed, mask in {"all": None, "one request": (1, rows), "several": (4, rows)}.items():
            given = None if mask is None else jnp.ones(mask, bool)
            wide = compress.shape[0] * compress.shape[1] <= _most_numbers(rows, given)
            chosen = store(compress.shape, pk.WeightForm()) if wide else "XLA"
            yield f"compressors of {kind}, {needed} needed", described(chosen)
        shape, forms = shapes["q_a_kv"][:2], (pk.WeightForm(), form)
        pair = None
        if pk.unsupported_product_pair((compress.shape, shape), forms, rows) is None:
            pair = call._layouts_of_pair((compress.shape, shape), forms, rows)
        text = "two launches" if pair is None else " + ".join(map(described, pair))
        yield f"compressors of {kind} and q_a_kv", text


def main() -> None:
    for gpu, (model, cfg), activations, rows in itertools.product(target.GPUS, MODELS.items(), ("bf16", "fp8"), ROWS):
        with mock.patch.object(target, "gpu_or_first", lambda gpu=gpu: gpu):
            for name, chosen in choices(cfg, rows, activations):
                print(f"{gpu.architecture} {model} {activations} [{rows}] {name}: {chosen}")


if __name__ == "__main__":
    main()
