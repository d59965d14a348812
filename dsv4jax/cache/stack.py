"""Layers of one kind stacked along a leading axis, and the stacks of all kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import jax

from dsv4jax.cache.pool import PagedPool
from dsv4jax.cache.state import StateCache
from dsv4jax.kinds import AttentionType


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """All layers of one kind. The leading axis of every leaf is [layers of that kind]."""

    state: StateCache
    pool: PagedPool | None  # None for SWA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of all kinds, each in the field named after its kind; None for a kind that the model does not have."""

    swa: LayerStack | None
    csa: LayerStack | None
    hca: LayerStack | None

    def stack(self, kind: AttentionType | str) -> LayerStack:
        """Return the layers of a kind. Raises ValueError if the model has none."""
        stack = getattr(self, AttentionType(kind))
        if stack is None:
            raise ValueError(f"the model has no {AttentionType(kind).upper()} layer")
        return stack

    def with_stack(self, kind: AttentionType | str, stack: LayerStack) -> Self:
        """Return a copy with another stack for a kind."""
        return dataclasses.replace(self, **{AttentionType(kind).value: stack})

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        """The kinds of layers that the model has."""
        return tuple(kind for kind in AttentionType if getattr(self, kind) is not None)

    def map_stacks(self, function: Callable[[AttentionType, LayerStack], LayerStack]) -> Self:
        """Return a copy with each stack that the model has replaced by ``function(kind, stack)``."""
        return dataclasses.replace(self, **{kind.value: function(kind, self.stack(kind)) for kind in self.kinds})
