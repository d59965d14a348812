"""How a launch of decode attention divides queries among blocks, and what it writes."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.activations import OperandRows, RoundedRows
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs, QueryOrder
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.lanes import Buffer, Shaped
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.target import GPU
from pallas_kernels.language.tensor_memory import TensorMemory
from pallas_kernels.trees import Tree

CLUSTERS = (1, 2, 4, 8)  # blocks in a cluster, among which the channels of a head are divided


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scratch[Array: Shaped]:
    """Memory through which the blocks of a cluster exchange their parts of an output.

    Each block gets a share of channels.

    The memory is device memory, which stays in L2. This was twice as fast as exchanging parts through shared memory.
    """

    stats: Array  # f32 [queries, groups of heads, cluster, heads, 2] peak and total of each block
    parts: Array  # f16 [queries, groups of heads, to block, from block, ...] in the kernel's own order

    @classmethod
    def of(
        cls, layout: AttentionLayout, queries: int, groups: int, part: tuple[int, ...]
    ) -> Scratch[jax.ShapeDtypeStruct]:
        """Return the shapes for parts of this shape."""
        lead = queries, groups, layout.cluster
        return Scratch(
            stats=jax.ShapeDtypeStruct((*lead, layout.heads, 2), jnp.float32),
            parts=jax.ShapeDtypeStruct((*lead, layout.cluster, *part), jnp.float16),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs[Array: Shaped]:
    """What decode attention writes."""

    # bf16 or f32 [B, T, H, 512], RoundedRows [B T, H 512] without clusters, or OperandRows [B T, H 512].
    out: Array | RoundedRows[Array] | OperandRows[Array]
    scratch: Tree  # what the layout asks for, through which blocks exchange parts; None if it asks for nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout(abc.ABC):
    """A kernel, and how it divides a query: its heads into groups, and its keys among the blocks of a cluster."""

    heads: int  # the most heads of a block
    cluster: int  # number of blocks that share the keys

    gpu: ClassVar[GPU]  # the GPU that the kernel is for
    reduces: ClassVar[bool] = True  # whether it reduces over a block

    @property
    @abc.abstractmethod
    def warpgroups(self) -> int:
        """Number of warpgroups in a block."""

    @property
    @abc.abstractmethod
    def shared_bytes(self) -> int:
        """Shared memory of a block, besides what every launch uses."""

    def check(self, heads: int, tiles: int) -> None:
        """Raise ValueError if the layout does not support queries with so many heads and tiles of keys."""
        if self.cluster not in CLUSTERS:
            raise ValueError(f"{self} does not share {HEAD_DIM} channels: a cluster has 1, 2, 4 or 8 blocks")

    def groups(self, heads: int) -> int:
        """Return into how many groups, of a block each, a query's heads are divided."""
        return -(-heads // self.heads)

    def grid(self, queries: int, groups: int) -> Grid:
        """Return the grid for so many queries and groups of heads."""
        return Grid(
            blocks=(queries, groups),
            warpgroups=self.warpgroups,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            reduces=self.reduces,
        )

    def arguments(self, inputs: AttentionInputs[jax.Array]) -> AttentionInputs[jax.Array]:
        """Return the inputs in the shapes and dtypes in which the kernel reads them."""
        return inputs

    def order(self, inputs: AttentionInputs[jax.Array]) -> QueryOrder[jax.Array] | None:
        """Return a ``QueryOrder`` of ``inputs.needed``, or None if the kernel computes all queries."""
        return None

    @abc.abstractmethod
    def scratch(self, queries: int, groups: int) -> Tree:
        """Return the shapes of device memory for so many queries and groups of heads; None without clusters."""

    @abc.abstractmethod
    def body(
        self, machine: TensorMemory, inputs: AttentionInputs[Buffer], outputs: Outputs[Buffer], *, form: AttendedFormat
    ) -> None:
        """Run the kernel, on ``grid(B * T, groups(H))``."""
