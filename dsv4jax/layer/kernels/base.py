"""What all implementations of ops that call ``pallas_kernels`` have in common."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.derivatives import refuse_derivative
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import PALLAS, SIMULATED, Op
from dsv4jax.layer.ops import RowForm
from dsv4jax.plan import CachePlan
from dsv4jax.weights.stored import CODES
from pallas_kernels.language import target

_FEW_TOKENS = 8  # of a request, up to which nobody looks for padding


def layer_number(index: jax.Array | int) -> jax.Array:
    """Return a layer's index in its stack as the kernels expect it, int32 [1]."""
    return jnp.asarray(index, jnp.int32).reshape(1)


@dataclasses.dataclass(frozen=True)
class Kernels(abc.ABC):
    """The kernels of one op, on a GPU or simulated."""

    simulate: bool

    @property
    def backend(self) -> str:
        return SIMULATED if self.simulate else PALLAS

    @property
    def kernels(self) -> Any:
        """The module that has the kernels."""
        return pk

    @property
    def options(self) -> dict[str, Any]:
        """What its functions are told beside their arguments."""
        return {"simulate": self.simulate}

    def unsupported(self, plan: CachePlan | None, kind: AttentionType) -> str | None:
        reason = None if plan is None else self.unserved(plan, kind)
        return reason if reason is not None or self.simulate else target.unsupported()

    def without_derivative[T](self, op: Op, tree: T) -> T:
        """The tree as it is; differentiating by any part of it is a ValueError."""
        return refuse_derivative(
            f"backend={self.backend!r} cannot serve a derivative of {op.name}: kernels have none. Differentiate with "
            f"backend='xla'",
            tree,
        )

    @abc.abstractmethod
    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        """Return why no kernel serves a plan's formats and sizes, or None if one does."""


def form_options(form: RowForm, dtype: Any) -> dict[str, Any]:
    """Return how kernels are told to give rows in a form, or in the plain one as ``dtype``."""
    if form == "plain":
        return {"dtype": dtype}
    return {"dtype": CODES} if form == "rounded" else {"dtype": jnp.bfloat16, "is_operand": True}


def of_chunk(needed: jax.Array | None) -> jax.Array | None:
    """Return which tokens [B, T] are needed, as kernels are told it, or None.

    In decode and in drafts there is little padding, and looking for it takes longer than computing it.
    """
    return None if needed is None or needed.shape[1] <= _FEW_TOKENS else needed


def register(op: Op, make: Callable[[bool], Any]) -> None:
    """Register ``make(simulate)`` for an op: on a GPU and simulated."""
    for name, simulate in ((PALLAS, False), (SIMULATED, True)):
        op.register(name, make(simulate))
