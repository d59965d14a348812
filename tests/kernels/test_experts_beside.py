"""A product with experts and one with the shared expert in one launch: the bits of two launches, and when it is one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.activations import OperandRows
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.experts.beside import beside
from pallas_kernels.products.experts.launch import OfExperts
from pallas_kernels.products.few.launch import Few
from tests.support.cases import first_of
from tests.support.expert_cases import Experts
from tests.support.machines import MACHINES
from tests.support.product_cases import Product

machines = pytest.mark.parametrize("simulate", MACHINES)
# One token; tokens with padding, whose rows are NaN, and more units than blocks; and inputs of the shared expert that
# are stored in several segments.
CASES = [
    Experts(tokens=1),
    Experts(tokens=5, padding=1, hidden=1024),
    Experts(tokens=40, one=True, hidden=2560, rows=16),
]
cases = pytest.mark.parametrize("case", first_of(CASES, count=0), ids=str)


def shared_of(case: Experts, gate_up: bool) -> Product:
    outputs, inputs = (2 * case.width, case.hidden) if gate_up else (case.hidden, case.width)
    return Product(rows=case.tokens, outputs=outputs, inputs=inputs)


def both(case: Experts, product: Product, gate_up: bool) -> pk.Together:
    """Return the plan of one launch, in which the experts have the case's number of blocks."""
    if gate_up:
        spec = pk.ExpertsSpec(experts=case.experts, shape=(2 * case.width, case.hidden), **case.stored)
        routed: Any = pk.Gated(routing=case.routing, limit=case.limit)
        shared = product.plan(product.problem(pk.SwiGLU(limit=case.limit, kind=OperandRows)))
    else:
        spec = pk.ExpertsSpec(experts=case.experts, shape=(case.hidden, case.width), **case.stored)
        routed = pk.OfPicks(routing=case.routing)
        shared = product.plan(product.problem(pk.Store(dtype=jnp.bfloat16), OperandRows))
    found = pk.together(case.plan(spec, routed), shared)
    assert isinstance(found, pk.Together), found
    experts = dataclasses.replace(found.kernel.experts, blocks=case.blocks)
    of_shared = dataclasses.replace(found.kernel.shared, first_block=case.blocks)
    return dataclasses.replace(found, kernel=dataclasses.replace(found.kernel, experts=experts, shared=of_shared))


@machines
@pytest.mark.parametrize("gate_up", [True, False], ids=["gate and up", "down"])
@cases
def test_one_launch_has_the_bits_of_two(case: Experts, gate_up: bool, simulate: bool):
    product = shared_of(case, gate_up)
    plan = both(case, product, gate_up)
    codes, scales = case.gate_up if gate_up else case.down
    routed_x: Any = case.x if gate_up else case.inner
    shared_x: Any = case.x if gate_up else OperandRows.of(product.x)

    @jax.jit
    def run(routed_x: Any, shared_x: Any, codes: Any, scales: Any, shared: Any, picked: Any, gains: Any) -> Any:
        tiles = pk.routed_tiles(picked, case.experts, case.rows)
        extras = tiles.pairs, tiles.tiles, tiles.count, *([gains] if gate_up else [])
        x = routed_x if gate_up else pk.ExpertRows.of(routed_x)
        weight = pk.interleaved_codes(codes), scales
        of_experts = pk.Operands(x=x, weights=[weight], extras=extras)
        of_shared = pk.Operands(x=shared_x, weights=[shared])
        together = pk.run_together(plan, of_experts, of_shared, simulate=simulate)
        (one,) = pk.run(plan.experts, x, [weight], *extras, simulate=simulate)
        (other,) = pk.run(plan.shared, shared_x, [shared], simulate=simulate)
        return together, (one, other)

    found, want = run(routed_x, shared_x, codes, scales, product.arrays, case.picked, case.gains.reshape(-1))
    places = np.arange(len(case.order)) if gate_up else case.order  # what of the experts is written
    for got, alone in zip(jax.tree.leaves(found[0]), jax.tree.leaves(want[0]), strict=True):
        got, alone = (np.asarray(each).reshape(-1, each.shape[-1])[places] for each in (got, alone))
        np.testing.assert_array_equal(got, alone)
        assert np.isfinite(got.astype(np.float32)).all()
    for got, alone in zip(jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True):
        got, alone = (np.asarray(each, np.float32) for each in (got, alone))
        np.testing.assert_array_equal(got, alone)
        assert np.isfinite(got[: case.tokens - case.padding]).all()


def plans(tokens: int, gate_up: bool, activations: str = "bf16") -> tuple[pk.Plan, pk.Plan]:
    """Return the plans of V4-Flash's experts and of its shared one."""
    hidden, width, picks, experts = 4096, 2048, 6, 256
    rows = pk.tile_rows(tokens, picks, experts)
    routing = pk.Routing(tokens=tokens, picks=picks, experts=experts, rows=rows, activations=activations)
    shape = (2 * width, hidden) if gate_up else (hidden, width)
    made: Any = pk.Gated(routing=routing, limit=10.0) if gate_up else pk.OfPicks(routing=routing)
    spec = pk.ExpertsSpec(experts=experts, shape=shape, activations=activations)
    problem = pk.Problem(rows=pk.RowsSpec(count=made.x_rows, width=shape[1]), weights=(spec,), epilogues=(made,))
    routed = pk.plan(dataclasses.replace(problem, rows=pk.rows_taken(problem, HOPPER)), HOPPER)
    product = Product(rows=tokens, outputs=shape[0], inputs=shape[1])
    shared = product.plan(product.problem(pk.SwiGLU(limit=10.0) if gate_up else pk.Store(dtype=jnp.bfloat16)))
    assert isinstance(routed, pk.Plan)
    return routed, shared


@pytest.mark.parametrize("gate_up", [True, False], ids=["gate and up", "down"])
def test_few_tokens_leave_room_for_the_shared_expert(gate_up: bool):
    """Beside experts while their units come in as many waves as without it, and after them for up to 32 tokens."""
    found = {tokens: pk.together(*plans(tokens, gate_up)) for tokens in (1, 2, 3, 4, 8, 32, 33)}
    assert [tokens for tokens, each in found.items() if isinstance(each, pk.Together)] == [1, 2, 3, 4, 8, 32]
    for tokens, each in found.items():
        if isinstance(each, pk.Together):
            experts, shared = each.kernel.experts, each.kernel.shared
            assert shared.grid.blocks == (32, 1)
            assert each.kernel.grid.blocks == (experts.blocks + 32, 1)
            assert (experts.blocks + 32 <= HOPPER.multiprocessors) == (tokens <= 3)
            assert experts.blocks <= HOPPER.multiprocessors
            assert shared.first_block == experts.blocks
        else:
            assert "with 33 rows take longer than the experts' last units" in each.reason


def test_what_is_never_one_launch():
    routed, shared = plans(1, True)
    assert isinstance(shared.kernel, Few)
    assert isinstance(routed.kernel, OfExperts)
    in_fp8, _ = plans(1, True, activations="fp8")
    found = pk.together(in_fp8, shared)
    assert isinstance(found, pk.Unsupported)
    assert "timed together with bf16 rows alone" in found.reason
    found = pk.together(shared, routed)
    assert isinstance(found, pk.Unsupported)
    assert "can be one launch" in found.reason
    found = pk.together(plans(4096, False)[0], shared)
    assert isinstance(found, pk.Unsupported)
    assert "may be of two sizes" in found.reason
    eight = dataclasses.replace(shared.kernel.layout.split, cluster=8)
    found = beside(routed.kernel.layouts[0], dataclasses.replace(shared.kernel.layout, split=eight))
    assert isinstance(found, pk.Unsupported)
    assert "8 parts of the shared expert's inputs are not 4 warpgroups" in found.reason
    many = beside(routed.kernel.layouts[0], dataclasses.replace(shared.kernel.layout, rows=65))
    assert isinstance(many, pk.Unsupported)
    assert "at most 64 rows, got 65" in many.reason
    on_blackwell = dataclasses.replace(shared, gpu=BLACKWELL)
    assert isinstance(pk.together(routed, on_blackwell), pk.Unsupported)
