"""Which kernel solves a problem, and how it is divided; or why there is none, or better none.

The sums of few rows do not depend on how many there are. For many rows there is another kernel on Hopper, which adds in
another order. Its order depends on the number of rows only where blocks share the inputs of a tile
(``many.tiling``), as they do for a few hundred rows. A plan that is ``invariant`` has the kernel of few rows for any
number of them, or that of many where its tiles have the order of few; and what it makes of sums is decided by the
weights alone.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from pallas_kernels.activations import OperandRows, PlainRows, RoundedRows
from pallas_kernels.language import target
from pallas_kernels.language.target import GPU
from pallas_kernels.products.epilogues.attention import AttentionQueries, Heads
from pallas_kernels.products.epilogues.both import BothQueries
from pallas_kernels.products.epilogues.indexer import IndexerQueries
from pallas_kernels.products.epilogues.store import AddTo, Store
from pallas_kernels.products.experts.beside import Beside, beside
from pallas_kernels.products.experts.epilogues import ExpertEpilogue
from pallas_kernels.products.experts.launch import OfExperts
from pallas_kernels.products.experts.layout import kind_of, layouts_of, unserved
from pallas_kernels.products.few.launch import (
    Few,
    Pair,
    fastest_layout,
    fastest_pair,
    layout_of_both,
    layout_of_heads,
)
from pallas_kernels.products.many.launch import Many
from pallas_kernels.products.many.tiling import OUTPUTS, fastest_tiling, fastest_tiling_in_order, tiling_of_heads
from pallas_kernels.products.problem import (
    ACTIVATIONS,
    Epilogue,
    ExpertsSpec,
    Needed,
    Problem,
    RowsSpec,
    Unsupported,
    WeightSpec,
)
from pallas_kernels.products.weights import CHUNK_BYTES, ROWS, SCALE_INPUTS, SCALE_ROWS, TILE
from pallas_kernels.tuned.h200 import THRESHOLDS, Thresholds

_WIDE_QUERIES = Unsupported(kind="no kernel", reason="queries are made in products with FP8 weights")
_BOTH_DIM = 128  # outputs of the indexer's heads that have tiles beside those of attention
_ANY = 1 << 62  # rows, or numbers of a weight
_INVARIANT = dataclasses.replace(
    THRESHOLDS, few_rows=_ANY, few_rounded_rows=_ANY, many_rows=_ANY, small_weight=_ANY, medium_weight=_ANY
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a problem is solved."""

    problem: Problem
    gpu: GPU
    kernel: Few | Pair | Many | OfExperts
    rounds: bool = False  # whether the result, in bf16, is rounded by a launch of its own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """How a product with experts and one with the shared expert are solved in one launch, each with rows of its own."""

    experts: Plan  # of a launch of its own
    shared: Plan
    kernel: Beside


def together(experts: Plan, shared: Plan) -> Together | Unsupported:
    """Return how two products are solved in one launch, bit for bit as by their own plans; or why better not."""
    one, other = experts.kernel, shared.kernel
    if not isinstance(one, OfExperts) or not isinstance(other, Few) or shared.rounds or experts.gpu != shared.gpu:
        return Unsupported(kind="no kernel", reason="a product with experts and one of few rows can be one launch")
    of_experts, *others = one.layouts
    if others:
        return Unsupported(kind="no kernel", reason="tiles of experts that may be of two sizes take a launch each")
    kernel = beside(of_experts, other.layout)
    return kernel if isinstance(kernel, Unsupported) else Together(experts=experts, shared=shared, kernel=kernel)


def plan(problem: Problem, gpu: GPU | None = None, *, invariant: bool = False) -> Plan | Unsupported:
    """Return how a problem is solved, or why it is not.

    Args:
      problem: to be solved.
      gpu: that solves it; None for the one that is compiled for.
      invariant: whether a row's results must be the same bit for bit whatever the number of rows. Then that number does
        not matter for whether there is a plan, either.
    """
    limits = _INVARIANT if invariant else THRESHOLDS
    return _plan(problem, target.gpu_or_first() if gpu is None else gpu, limits)


def rows_taken(problem: Problem, gpu: GPU | None = None, *, invariant: bool = False) -> RowsSpec:
    """Return the rows that a product takes best: the problem's own, in the class that its kernel reads fastest.

    ``gpu`` and ``invariant`` are as for ``plan``.
    """
    if isinstance(epilogue := problem.epilogues[0], ExpertEpilogue):
        return dataclasses.replace(problem.rows, kind=kind_of(epilogue))
    classes = (dataclasses.replace(problem.rows, kind=kind) for kind in (OperandRows, RoundedRows))

    def is_served(rows: RowsSpec) -> bool:
        return isinstance(plan(dataclasses.replace(problem, rows=rows), gpu, invariant=invariant), Plan)

    return next(filter(is_served, classes), problem.rows)


def _together(rows: RowsSpec, weight: WeightSpec, limits: Thresholds) -> int:
    """Return of how many rows an epilogue is asked: of few, whatever their number, if they have that kernel."""
    return rows.count if rows.count > limits.few(weight.activations) else min(rows.count, ROWS)


@functools.cache
def _plan(problem: Problem, gpu: GPU, limits: Thresholds) -> Plan | Unsupported:
    if any(isinstance(weight, ExpertsSpec) for weight in problem.weights):
        return _experts(problem, gpu)
    found = [_of_weight(problem.rows, weight) for weight in problem.weights]
    found += [_of_class(problem.rows, weight, gpu, limits) for weight in problem.weights]
    reason = next((one for one in found if one is not None), None)
    if reason is not None:
        return reason
    if len(problem.weights) == 1:
        return _single(problem, gpu, limits)
    if len(problem.weights) == 2:
        return _two(problem, gpu, limits)
    return Unsupported(
        kind="no kernel", reason=f"a launch multiplies by one or two weights, got {len(problem.weights)}"
    )


def _of_weight(rows: RowsSpec, weight: WeightSpec) -> Unsupported | None:
    """Return why no kernel serves a weight, or None if that of few rows does."""
    (outputs, inputs), block, form = weight.shape, weight.block, weight.activations
    chunk = CHUNK_BYTES if block is not None else CHUNK_BYTES // 2
    if form not in ACTIVATIONS:
        return Unsupported(kind="impossible", reason=f"activations must be one of {ACTIVATIONS}, got {form!r}")
    if block is None and form != "bf16":
        return Unsupported(kind="impossible", reason="activations are rounded to FP8 only for FP8 weights")
    if outputs % (weight.groups * TILE) or inputs % chunk:
        sizes = f"a multiple of {TILE} outputs and {chunk} inputs"
        reason = f"each of {weight.groups} groups must have {sizes}, got {weight.shape}"
        return Unsupported(kind="no kernel", reason=reason)
    least = CHUNK_BYTES if form == "fp8" else SCALE_INPUTS
    if block is not None and (block[0] % SCALE_ROWS or block[1] % least):
        reason = f"blocks must be multiples of {SCALE_ROWS} x {least} with activations={form!r}, got {block}"
        return Unsupported(kind="no kernel", reason=reason)
    for name, dtype in (("rows", rows.dtype), ("a weight without scales", weight.dtype)):
        if jnp.dtype(dtype) != jnp.bfloat16:
            return Unsupported(kind="no kernel", reason=f"{name} must be bfloat16, got {jnp.dtype(dtype)}")
    return None


def _of_class(rows: RowsSpec, weight: WeightSpec, gpu: GPU, limits: Thresholds) -> Unsupported | None:
    """Return why no kernel takes rows of this class, or None if one does."""
    is_few = rows.count <= limits.few(weight.activations)
    takes = {
        PlainRows: True,
        OperandRows: is_few and weight.block is not None and weight.activations == "bf16",
        RoundedRows: not is_few and weight.activations == "fp8" and _not_of_many(weight, gpu) is None,
    }
    if takes[rows.kind]:
        return None
    reason = f"no kernel takes {rows.count} rows of {rows.kind.__name__} for {weight}"
    return Unsupported(kind="no kernel", reason=reason)


def _not_of_many(weight: WeightSpec, gpu: GPU) -> str | None:
    """Return why the kernels of many rows do not serve a weight that the kernel of few rows serves, or None."""
    if gpu.architecture != "sm90":
        return "the GPU is no Hopper"
    if weight.block is None and weight.groups == 1:
        return None
    if weight.outputs % OUTPUTS:
        return f"a group does not have a multiple of {OUTPUTS} outputs"
    if weight.activations == "fp8" and weight.block is not None and weight.block[0] % OUTPUTS:
        return f"blocks of a scale do not have a multiple of {OUTPUTS} outputs with activations='fp8'"
    return None


def _single(problem: Problem, gpu: GPU, limits: Thresholds) -> Plan | Unsupported:
    (weight,), (epilogue,), rows = problem.weights, problem.epilogues, problem.rows.count
    if (reason := epilogue.unsupported(_together(problem.rows, weight, limits), weight)) is not None:
        return reason
    if isinstance(epilogue, Heads):
        return _queries(problem, epilogue, gpu, limits)
    only_few = _not_of_many(weight, gpu)
    made, is_rounded = epilogue, isinstance(epilogue, Store) and epilogue.kind is RoundedRows
    in_bf16 = Store(dtype=jnp.bfloat16) if is_rounded else epilogue
    if rows <= limits.few(weight.activations) or only_few is not None:
        layout = fastest_layout(problem.rows, weight, in_bf16, gpu)
        kernel: Few | Many = Few(layout=layout)
        is_in_order = weight.block is None or problem.rows.kind is OperandRows
        is_many = is_in_order and rows >= limits.many_rows_in_order and only_few is None
        if is_many and isinstance(epilogue, Store | AddTo):
            tiling = fastest_tiling_in_order(rows, weight, in_bf16, gpu, layout.split.all_parts)
            kernel = Many(tiling=tiling)
    else:
        tiling = fastest_tiling(rows, weight, in_bf16, gpu)
        if is_rounded and tiling.is_rounded and tiling.parts == 1:
            tiling, is_rounded = dataclasses.replace(tiling, epilogue=made), False
        kernel = Many(tiling=tiling)
    found = Plan(problem=problem, gpu=gpu, kernel=kernel, rounds=is_rounded)
    reason = _faster_without(problem, only_few, limits)
    return found if reason is None else Unsupported(kind="slower", reason=reason, plan=found)


def _faster_without(problem: Problem, only_few: str | None, limits: Thresholds) -> str | None:
    """Return why a product is faster without its kernel, or None."""
    (weight,), rows = problem.weights, problem.rows.count
    if rows > limits.few_rows and only_few is not None:
        return f"for more than {limits.few_rows} rows, got {rows}, it is faster to widen the weight where {only_few}"
    if weight.block is not None:
        return None
    if not isinstance(problem.epilogues[0], Store):
        return "a product with a wide weight was timed only where its sums are stored"
    if rows >= limits.many_rows and problem.needed is Needed.MASK:
        most = limits.medium_weight
    elif rows > limits.few_rows:
        most = 0
    else:
        most = limits.medium_weight if rows > 1 else limits.small_weight
    size = weight.shape[0] * weight.shape[1]
    return None if size <= most else f"of {rows} rows, XLA is faster with a wide weight of more than {most} numbers"


def _queries(problem: Problem, epilogue: Epilogue, gpu: GPU, limits: Thresholds) -> Plan | Unsupported:
    """Return the plan of a product whose outputs are heads that become queries."""
    (weight,), rows = problem.weights, problem.rows
    only_few = _not_of_many(weight, gpu)
    if weight.block is None:
        return _WIDE_QUERIES
    if rows.count > (few := limits.few(weight.activations)):
        if only_few is not None:
            reason = f"products of more than {few} rows have no kernel where {only_few}"
            return Unsupported(kind="no kernel", reason=reason)
        if weight.activations != "fp8":
            reason = f"queries of more than {few} rows are made in products with activations='fp8'"
            return Unsupported(kind="no kernel", reason=reason)
        kernel = Many(tiling=tiling_of_heads(rows.count, weight, epilogue, gpu))
        return Plan(problem=problem, gpu=gpu, kernel=kernel)
    layout = layout_of_heads(rows, weight, epilogue, gpu)
    if isinstance(layout, Unsupported):
        return layout
    return Plan(problem=problem, gpu=gpu, kernel=Few(layout=layout))


def _two(problem: Problem, gpu: GPU, limits: Thresholds) -> Plan | Unsupported:
    """Return the plan of two products in one launch."""
    (first, second), (one, other), rows = problem.weights, problem.epilogues, problem.rows
    if rows.count > (few := limits.few(first.activations)):
        reason = f"two products are one launch for at most {few} rows, got {rows.count}"
        return Unsupported(kind="slower", reason=reason)
    for weight, epilogue in zip(problem.weights, problem.epilogues, strict=True):
        if (reason := epilogue.unsupported(_together(rows, weight, limits), weight)) is not None:
            return reason
    if isinstance(one, AttentionQueries) and isinstance(other, IndexerQueries):
        return _both(problem, BothQueries(attention=one, indexer=other), gpu)
    if not all(isinstance(each, Store) and each.kind is PlainRows for each in problem.epilogues):
        return Unsupported(kind="no kernel", reason=f"no launch makes {one} and {other}")
    if first.block is not None or second.block is None:
        return Unsupported(kind="slower", reason="two products were timed only with a wide weight and one of FP8")
    pair = fastest_pair(rows, (first, second), (one, other), gpu)
    return pair if isinstance(pair, Unsupported) else Plan(problem=problem, gpu=gpu, kernel=pair)


def _both(problem: Problem, both: BothQueries, gpu: GPU) -> Plan | Unsupported:
    """Return the plan of the queries of attention and of the indexer in one launch."""
    (first, second), rows = problem.weights, problem.rows
    if dataclasses.replace(first, shape=second.shape) != second:
        return Unsupported(kind="no kernel", reason="both weights must be stored in the same way")
    if first.block is None:
        return _WIDE_QUERIES
    if (
        second.inputs != first.inputs
        or second.shape[0] // both.indexer.dim != first.shape[0] // both.attention.head_dim
    ):
        shapes = first.shape, second.shape
        reason = f"attention and the indexer must have as many heads and inputs, got weights {shapes}"
        return Unsupported(kind="no kernel", reason=reason)
    alone = layout_of_heads(rows, second, both.indexer, gpu)
    if isinstance(alone, Unsupported):
        return alone
    if both.indexer.dim != _BOTH_DIM:
        reason = f"heads of the indexer must have {_BOTH_DIM} outputs, got {both.indexer.dim}"
        return Unsupported(kind="no kernel", reason=reason)
    if both.attention.rope_dim != both.indexer.rope_dim:
        return Unsupported(kind="no kernel", reason="attention and the indexer must rotate as many channels")
    layout = layout_of_both(rows, first, both, gpu)
    if isinstance(layout, Unsupported):
        return layout
    return Plan(problem=problem, gpu=gpu, kernel=Few(layout=layout))


def _experts(problem: Problem, gpu: GPU) -> Plan | Unsupported:
    """Return the plan of a product with the experts of a mixture."""
    (weight, *others), (epilogue, *_) = problem.weights, problem.epilogues
    if others or not isinstance(weight, ExpertsSpec) or not isinstance(epilogue, ExpertEpilogue):
        return Unsupported(kind="no kernel", reason="experts have a launch of their own, with an epilogue for experts")
    if (impossible := epilogue.unsupported(problem.rows.count, weight)) is not None:
        return impossible
    if (reason := unserved(problem, weight, epilogue, gpu)) is not None:
        return Unsupported(kind="no kernel", reason=reason)
    return Plan(problem=problem, gpu=gpu, kernel=OfExperts(layouts=layouts_of(weight, epilogue, gpu)))
