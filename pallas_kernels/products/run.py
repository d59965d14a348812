"""Solves a problem by its plan: checks the arrays, and launches what the plan says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import ActivationRows, PlainRows, round_rows
from pallas_kernels.language import target
from pallas_kernels.products.epilogues.faces import Made
from pallas_kernels.products.experts.launch import OfExperts
from pallas_kernels.products.few.launch import inputs_of
from pallas_kernels.products.plan import Plan, Together

type Rows = jax.Array | ActivationRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The arrays of a product."""

    x: Rows
    weights: Sequence[tuple[jax.Array, ...]]
    extras: Sequence[jax.Array] = ()


def run(
    plan: Plan, x: Rows, weights: Sequence[tuple[jax.Array, ...]], *extras: jax.Array, simulate: bool = False
) -> tuple[Made, ...]:
    """Multiply rows by one weight or several, and make of the sums what the problem says.

        weight = pk.WeightSpec(shape=(1536, 4096), block=(128, 128))
        rows = pk.RowsSpec(count=8, width=4096)
        plan = pk.plan(pk.Problem(rows=rows, weights=(weight,), epilogues=(pk.Store(),)))
        if isinstance(plan, pk.Plan):
            (y,) = pk.run(plan, x, [(codes, scales)])

    Args:
      plan: of the problem.
      x: the problem's rows: an array of plain rows, or what holds those of another class.
      weights: the arrays of each weight, as ``WeightSpec.arrays`` says.
      extras: what ``Problem.extras`` says, in that order.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      What each epilogue makes: rows, or queries of each row's heads.

    Raises:
      AssertionError: (chex) a shape or dtype is not the problem's.
      ValueError: there are more or fewer arrays than the problem has, or the plan is of another GPU.
    """
    given = _Given.of(plan, Operands(x=x, weights=weights, extras=extras), simulate=simulate)
    made = plan.kernel.launch(given.rows, given.weights, given.extras, given.needed, simulate=simulate)
    return tuple(round_rows(one, simulate=simulate) for one in made) if plan.rounds else tuple(made)


def run_together(plan: Together, experts: Operands, shared: Operands, *, simulate: bool = False) -> tuple[Made, Made]:
    """Return what the epilogues make of a product with experts and of one with the shared expert, in one launch.

    Operands are as ``run`` takes them, and so are errors.
    """
    one = _Given.of(plan.experts, experts, simulate=simulate)
    other = _Given.of(plan.shared, shared, simulate=simulate)
    alone = OfExperts(layouts=(plan.kernel.experts,))
    of_experts = alone.inputs_of(one.rows, one.weights[0], one.extras, simulate=simulate)
    of_shared = inputs_of(other.rows, other.weights[0], other.extras)
    return plan.kernel.launch((of_experts, of_shared), one.rows, simulate=simulate)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The arrays of a product, checked, as launches take them."""

    rows: ActivationRows
    weights: list[tuple[jax.Array, ...]]
    extras: dict[str, jax.Array]
    needed: jax.Array | None

    @classmethod
    def of(cls, plan: Plan, operands: Operands, *, simulate: bool) -> _Given:
        problem, gpu, weights, extras = plan.problem, target.gpu_or_first(), operands.weights, operands.extras
        if not simulate and plan.gpu.architecture != gpu.architecture:
            raise ValueError(f"the plan is of {plan.gpu.architecture}, the target is {gpu.architecture}")
        x = operands.x
        rows = x if isinstance(x, ActivationRows) else PlainRows(values=x)
        chex.assert_equal(type(rows), problem.rows.kind)
        chex.assert_trees_all_equal_shapes_and_dtypes(rows, problem.rows.shapes)
        if len(extras) != len(problem.extras):
            raise ValueError(f"the problem takes {tuple(problem.extras)} beside its weights, got {len(extras)} arrays")
        if len(weights) != len(problem.weights):
            raise ValueError(f"the problem has {len(problem.weights)} weights, got {len(weights)}")
        for arrays, spec in zip(weights, problem.weights, strict=True):
            chex.assert_trees_all_equal_shapes_and_dtypes(tuple(arrays), spec.arrays)
        given = dict(zip(problem.extras, extras, strict=True))
        chex.assert_trees_all_equal_shapes_and_dtypes(given, problem.extras)
        needed = given.pop("needed", None)
        return cls(rows=rows, weights=[_as_bytes(arrays) for arrays in weights], extras=given, needed=needed)


def _as_bytes(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return FP8 codes and scales as the bytes that kernels read."""
    return tuple(lax.bitcast_convert_type(leaf, jnp.uint8) if leaf.dtype.itemsize == 1 else leaf for leaf in arrays)
