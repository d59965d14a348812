"""What all implementations of ops that call ``pallas_kernels`` have in common."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.checks import Tree
from dsv4jax.derivatives import refuse_derivative
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import PALLAS, SIMULATED, Op
from dsv4jax.plan import CachePlan
from pallas_kernels.language import target

_FEW_TOKENS = 8  # of a request, up to which nobody looks for padding


def layer_number(index: jax.Array | int) -> jax.Array:
    """Return a layer's index in its stack as the kernels expect it, int32 [1]."""
    return jnp.asarray(index, jnp.int32).reshape(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The kernels of one backend."""

    backend: str
    load: Callable[[], ModuleType]  # the module that has their functions, which may be an extra
    unsupported: Callable[[], str | None]  # why they do not run on the device that is compiled for, or None
    missing: Callable[[], str | None] = lambda: None  # what the module needs that is not installed, or None
    options: tuple[tuple[str, bool], ...] = ()  # what their functions are told beside their arguments


ON_GPU = Family(backend=PALLAS, load=lambda: pk, unsupported=target.unsupported, options=(("simulate", False),))
ON_SIMULATOR = Family(backend=SIMULATED, load=lambda: pk, unsupported=lambda: None, options=(("simulate", True),))


@dataclasses.dataclass(frozen=True)
class OfFamily(abc.ABC):
    """What calls the kernels of one op, of one family."""

    family: Family
    invariant: bool = False  # whether no other row may change the order of a row's sums

    @property
    def kernels(self) -> Tree:
        """The module that has the kernels."""
        return self.family.load()

    @property
    def options(self) -> dict[str, bool]:
        """What its functions are told beside their arguments."""
        return dict(self.family.options)

    def without_derivative[T](self, op: Op, tree: T) -> T:
        """The tree as it is; differentiating by any part of it is a ValueError."""
        return refuse_derivative(
            f"backend={self.family.backend!r} cannot serve a derivative of {op.name}: kernels have none. "
            "Differentiate with backend='xla'",
            tree,
        )

    def unchecked_order(self) -> str | None:
        """Return why kernels do not promise the order of sums on the device that is compiled for, if they must."""
        gpu = target.gpu_or_first()
        if not self.invariant or gpu is target.HOPPER:
            return None
        return f"the order of sums was not checked for kernels of {gpu.architecture}"


class Kernels(OfFamily):
    """The kernels of one op of a layer, of one family."""

    def unsupported(self, plan: CachePlan | None, kind: AttentionType) -> str | None:
        reason = self.family.missing()
        if reason is None and plan is not None:
            reason = self.unserved(plan, kind)
        return reason or self.family.unsupported() or self.unchecked_order()

    @abc.abstractmethod
    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        """Return why no kernel serves a plan's formats and sizes, or None if one does."""


def of_chunk(needed: jax.Array | None) -> jax.Array | None:
    """Return which tokens [B, T] are needed, as kernels are told it, or None.

    In decode and in drafts there is little padding, and looking for it takes longer than computing it.
    """
    return None if needed is None or needed.shape[1] <= _FEW_TOKENS else needed


def register(op: Op, make: Callable[[Family], Tree]) -> None:
    """Register what is made of a family for an op: on a GPU and simulated."""
    for family in (ON_GPU, ON_SIMULATOR):
        op.register(family.backend, make(family))


def register_invariant(op: Op, make: Callable[[Family], Tree]) -> None:
    """Register what is made of a family as the op's form whose sums do not depend on the batch."""
    for family in (ON_GPU, ON_SIMULATOR):
        op.register_invariant(family.backend, make(family))
