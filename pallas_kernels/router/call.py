"""Which experts each token goes to, with what weight, and the tiles that the experts multiply.

    score   = sqrt(softplus(x gate^T)), f32
    picks   = the experts of the k largest scores plus bias, or those of a table by the token's id; in ascending order
    weights = the scores of the picks, without bias, over their sum, times a factor

On Hopper one launch does it for few tokens: its blocks multiply, meet, pick, meet, and one of them sorts. Otherwise XLA
multiplies, and picks and tiles are made by a launch each.

Of equal sums of score and bias the expert with the lower number is picked. NaN is above all numbers, as in
``lax.top_k``, and makes all weights of its token NaN. So does a sum of scores of 0, as where all logits are -inf.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.language import target
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.router.lists import Lists
from pallas_kernels.router.picks import MAX_PICKS, Picked, Picker, PickInputs
from pallas_kernels.router.product import Layout, logits
from pallas_kernels.router.scores import sqrt_softplus
from pallas_kernels.router.tiles import RoutedTiles, tile_rows

MAX_EXPERTS = 512
_WARPS = WARPGROUP // WARP
_ALONE = _WARPS  # tokens for which one block picks: the others would take longer to meet again
_SORTED_ALONE = 1024  # pairs that one block sorts
_SORTING_CLUSTER, _SORTING_WARPGROUPS = 8, 4  # blocks that sort more, and warpgroups of each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What the router gives."""

    experts: Any  # int32 [M, k] in ascending order; E on padding
    weights: Any  # f32 [M, k]; 0 on padding
    tiles: RoutedTiles


def unsupported_route(*, experts: int, picks: int) -> str | None:
    """Return why the kernels do not serve so many experts and picks of a token, or None where they do."""
    if not 1 <= experts <= MAX_EXPERTS:
        return f"the router takes 1 to {MAX_EXPERTS} experts, got {experts}"
    if not 1 <= picks <= min(MAX_PICKS, experts):
        return f"the router picks 1 to {min(MAX_PICKS, experts)} of {experts} experts, got {picks}"
    return None


def route(
    x: jax.Array,
    gate: jax.Array,
    inputs: PickInputs,
    *,
    picks: int,
    scale: float = 1.0,
    rows: int | None = None,
    simulate: bool = False,
) -> Routed:
    """Pick experts for tokens, and put the pairs of tokens and experts in tiles.

    Args:
      x: bf16 [M, h].
      gate: bf16 [E, h], E at most MAX_EXPERTS.
      inputs: the bias or the table, and which tokens are real.
      picks: experts of a token, at most MAX_PICKS.
      scale: a factor of all weights.
      rows: the most pairs of a tile; None for ``tile_rows``.
      simulate: as for ``launch``.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernels do not serve these sizes or this target, or ``inputs`` has both a bias and a table.
    """
    _check(x, gate, inputs, picks)
    tokens, experts = x.shape[0], gate.shape[0]
    rows = tile_rows(tokens, picks, experts) if rows is None else rows
    router = Router(tokens=tokens, experts=experts, picks=picks, scale=scale, rows=rows, simulate=simulate)
    if (layout := _one_launch(x.shape[1], experts, tokens, picks)) is not None:
        return router.together(x, gate, inputs, layout)
    product = lax.dot_general(
        x, gate, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    picked = router.pick(product, inputs)
    return Routed(experts=picked.experts, weights=picked.weights, tiles=router.sort(picked.experts))


def _check(x: jax.Array, gate: jax.Array, inputs: PickInputs, picks: int) -> None:
    chex.assert_rank([x, gate], 2)
    chex.assert_type([x, gate], jnp.bfloat16)
    chex.assert_equal(x.shape[1], gate.shape[1])
    (tokens, _), (experts, _) = x.shape, gate.shape
    if (reason := unsupported_route(experts=experts, picks=picks)) is not None:
        raise ValueError(reason)
    chex.assert_shape(inputs.real, (tokens,))
    chex.assert_type(inputs.real, jnp.bool_)
    if (inputs.bias is None) == (inputs.table is None) or (inputs.table is None) != (inputs.ids is None):
        raise ValueError("inputs: expected a bias, or a table and ids, and not both")
    if inputs.bias is not None:
        chex.assert_shape(inputs.bias, (experts,))
        chex.assert_type(inputs.bias, jnp.float32)
    else:
        chex.assert_shape(inputs.table, (None, picks))
        chex.assert_shape(inputs.ids, (tokens,))
        chex.assert_type([inputs.table, inputs.ids], jnp.int32)


def _one_launch(hidden: int, experts: int, tokens: int, picks: int) -> Layout | None:
    """Return how few tokens' product is divided, if one launch does it all; all its clusters must run at once."""
    gpu = target.gpu_or_first()
    layout = Layout.of(hidden, experts, tokens, Lists.shared_bytes(experts, _WARPS)) if tokens else None
    if gpu.architecture != "sm90" or layout is None or tokens * picks > _SORTED_ALONE:
        return None
    room = gpu.clusters[layout.cluster] if layout.cluster > 1 else gpu.multiprocessors
    return layout if layout.clusters <= room else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The launches of a router."""

    tokens: int
    experts: int
    picks: int
    scale: float
    rows: int  # of a tile
    simulate: bool

    @property
    def _shapes(self) -> Picked:
        shape = self.tokens, self.picks
        return Picked(experts=jax.ShapeDtypeStruct(shape, jnp.int32), weights=jax.ShapeDtypeStruct(shape, jnp.float32))

    @property
    def _tiles(self) -> RoutedTiles:
        return RoutedTiles.shapes(self.tokens * self.picks, self.experts, self.rows)

    def together(self, x: jax.Array, gate: jax.Array, inputs: PickInputs, layout: Layout) -> Routed:
        """Do it all in one launch."""
        shared = layout.shared_bytes + Lists.shared_bytes(self.experts, _WARPS)

        def body(machine: TensorCores, arrays: tuple[Buffer, Buffer, PickInputs], state: Any) -> None:
            scores, picked, tiles = state
            is_alone = self.tokens <= _ALONE  # the first block has a warp for each token
            rank = machine.rank if layout.cluster > 1 else machine.constant(0, "i32")
            block = (machine.block(1) * layout.blocks[0] + machine.block(0)) * layout.cluster + rank
            warp = machine.thread // WARP
            warps = _WARPS if is_alone else layout.clusters * layout.cluster * _WARPS
            picker = self._picker(machine, scores, arrays[2], picked, of_logits=False)
            mine = []
            for first in range(0, self.tokens, warps):
                token = (warp if is_alone else block * _WARPS + warp) + first
                here = (token < self.tokens) & ((block == 0) if is_alone else True)
                mine.append((token, here, picker.know(token, here)))
            for logit, token, expert, exists in logits(machine, arrays[0], arrays[1], layout):
                score = sqrt_softplus(machine, logit)
                scores.store_floats([score], token, expert, where=exists)
            lists = Lists.take(machine, self.experts, _WARPS)
            lists.clear()
            machine.barrier("grid")
            zero = machine.constant(0, "i32")
            nothing = zero, zero
            found = [
                machine.branch(here, lambda _, token=token, known=known: picker.pick(token, known), nothing)
                for token, here, known in mine
            ]
            machine.barrier("block" if is_alone else "grid")
            with machine.when(block == 0):
                lists.sort(picked.experts, tiles)
            for (token, here, known), pick in zip(mine, found, strict=True):
                with machine.when(here):
                    picker.weigh(token, known, *pick)

        _, picked, tiles = launch(
            body,
            name="router",
            grid=Grid(blocks=layout.blocks, cluster=layout.cluster, shared_bytes=shared),
            inputs=(x, gate, inputs),
            state=(jax.ShapeDtypeStruct((self.tokens, self.experts), jnp.float32), self._shapes, self._tiles),
            simulate=self.simulate,
        )
        return Routed(experts=picked.experts, weights=picked.weights, tiles=tiles)

    def pick(self, product: jax.Array, inputs: PickInputs) -> Picked:
        """Pick from logits f32 [M, E]."""

        def body(machine: Machine, arrays: tuple[Buffer, PickInputs], picked: Picked) -> None:
            picker = self._picker(machine, *arrays, picked, of_logits=True)
            token = machine.block(0) * _WARPS + machine.thread // WARP
            with machine.when(token < self.tokens):
                known = picker.know(token)
                picker.weigh(token, known, *picker.pick(token, known))

        return launch(
            body,
            name="router_picks",
            grid=(-(-self.tokens // _WARPS),),
            inputs=(product, inputs),
            state=self._shapes,
            simulate=self.simulate,
        )

    def sort(self, experts: jax.Array) -> RoutedTiles:
        """Put picks int32 [M, k] in tiles."""
        cluster, warpgroups = (1, 1) if experts.size <= _SORTED_ALONE else (_SORTING_CLUSTER, _SORTING_WARPGROUPS)
        warps = warpgroups * _WARPS

        def body(machine: Machine, experts: Buffer, tiles: RoutedTiles) -> None:
            lists = Lists.take(machine, self.experts, warps, cluster)
            lists.clear()
            lists.sort(experts, tiles)

        shared = Lists.shared_bytes(self.experts, warps, cluster)
        return launch(
            body,
            name="router_tiles",
            grid=Grid(blocks=(1,), warpgroups=warpgroups, cluster=cluster, shared_bytes=shared),
            inputs=experts,
            state=self._tiles,
            simulate=self.simulate,
        )

    def _picker(self, machine: Machine, scores: Buffer, inputs: PickInputs, out: Picked, *, of_logits: bool) -> Picker:
        score = functools.partial(sqrt_softplus, machine) if of_logits else lambda score: score
        return Picker(machine=machine, scores=scores, inputs=inputs, out=out, scale=self.scale, score=score)
