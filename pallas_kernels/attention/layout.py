"""How a launch shares the queries of decode attention among blocks, and what it writes."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.target import GPU

CLUSTERS = (1, 2, 4, 8)  # blocks, among which the channels of a head are divided


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Where the blocks of a cluster leave their parts of an output, each share of channels for one block.

    In device memory, which stays in L2: twice as fast as through the blocks' shared memory.
    """

    stats: Any  # f32 [queries, groups of heads, cluster, heads, 2] peak and total of each block
    parts: Any  # f16 [queries, groups of heads, cluster, cluster, ...] to, from; in the order of the kernel

    @classmethod
    def of(cls, layout: AttentionLayout, queries: int, groups: int, part: tuple[int, ...]) -> Scratch:
        """For parts of a shape."""
        lead = queries, groups, layout.cluster
        return cls(
            stats=jax.ShapeDtypeStruct((*lead, layout.heads, 2), jnp.float32),
            parts=jax.ShapeDtypeStruct((*lead, layout.cluster, *part), jnp.float16),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What decode attention writes."""

    out: Any  # bf16 or f32 [B, T, H, 512]
    scratch: Scratch | None  # None where a block has a query's heads to itself


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout(abc.ABC):
    """A kernel, and how its blocks share a query: its heads by groups, its keys by the blocks of a cluster."""

    heads: int  # of a block
    cluster: int  # blocks that share the keys

    gpu: ClassVar[GPU]  # whose kernel it is

    @property
    @abc.abstractmethod
    def warpgroups(self) -> int:
        """Of a block."""

    @property
    @abc.abstractmethod
    def shared_bytes(self) -> int:
        """Of a block, besides what every launch has."""

    def check(self, heads: int, tiles: int) -> None:
        """ValueError where it does not share a query of so many heads and tiles of keys."""
        if heads % self.heads:
            raise ValueError(f"{self} does not share {heads} heads")
        if self.cluster not in CLUSTERS:
            raise ValueError(f"{self} does not share {HEAD_DIM} channels: a cluster has 1, 2, 4 or 8 blocks")

    def grid(self, queries: int, groups: int) -> Grid:
        """The blocks for so many queries and groups of heads."""
        return Grid(
            blocks=(queries, groups),
            warpgroups=self.warpgroups,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
        )

    @abc.abstractmethod
    def scratch(self, queries: int, groups: int) -> Scratch | None:
        """Shapes for so many queries and groups of heads; None without clusters."""

    @abc.abstractmethod
    def body(self, machine: Any, inputs: AttentionInputs, outputs: Outputs, *, form: AttendedFormat) -> None:
        """The kernel, on ``grid(B * T, H // heads)``."""
