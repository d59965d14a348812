"""Which experts each token goes to, with what weight, and the tiles that the experts multiply.

    score   = sqrt(softplus(x gate^T)), f32
    picks   = the experts of the k largest scores plus bias, or those of a table by the token's id; in ascending order
    weights = the scores of the picks, without bias, over their sum, times a factor

On Hopper one launch does it for few tokens: its blocks multiply, and mail scores to those that pick. For up to 64
tokens or so these are of one cluster, and send one of them the picks, which it sorts. For more, all pick and meet, and
one of them sorts. Otherwise XLA multiplies, and picks and tiles are made by a launch each. A token's picks and weights
depend on whether XLA multiplies, and on no other token. ``route_in_parts`` has one launch for each part of the tokens
instead.

Of equal sums of score and bias the expert with the lower number is picked. NaN is above all numbers, as in
``lax.top_k``, and makes all weights of its token NaN. So does a sum of scores of 0, as where all logits are -inf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.language import target
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer, Mailbox
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Step, Value, select
from pallas_kernels.router.lists import Lists
from pallas_kernels.router.picks import MAX_PICKS, LoadScores, Pick, Picked, Picker, PickInputs, Place, Token
from pallas_kernels.router.product import Layout, logits
from pallas_kernels.router.scores import sqrt_softplus
from pallas_kernels.router.tiles import OwnExperts, RoutedTiles, tile_rows

MAX_EXPERTS = 512
_WARPS = WARPGROUP // WARP
_NEAR = 2  # tokens of a warp of the first cluster, up to which it picks alone: all blocks would take long to meet
_SORTED_ALONE = 1024  # pairs that one block sorts
_SORTING_CLUSTER, _SORTING_WARPGROUPS = 8, 4  # blocks that sort more, and warpgroups of each
_ORDERING_BYTES = 200 << 10  # that such a block may have in all, if it is to order its pairs: some less than there are


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
    own: OwnExperts | None = None,
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
      own: the experts that this device has, whose tiles alone are made; None for all.
      simulate: as for ``launch``.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernels do not serve these sizes or this target, or ``inputs`` has both a bias and a table.
    """
    _check(x, gate, inputs, picks)
    tokens, experts = x.shape[0], gate.shape[0]
    if own is not None:
        chex.assert_shape(own.first, (1,))
        chex.assert_type(own.first, jnp.int32)
        chex.assert_scalar_in(own.count, 1, experts)
    rows = tile_rows(tokens, picks, experts) if rows is None else rows
    router = Router(tokens=tokens, experts=experts, picks=picks, scale=scale, rows=rows, simulate=simulate)
    if (layout := _one_launch(x.shape[1], experts, tokens, picks)) is not None:
        return router.together(x, gate, inputs, layout, own)
    product = lax.dot_general(
        x, gate, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    picked = router.pick(product, inputs)
    return Routed(experts=picked.experts, weights=picked.weights, tiles=router.sort(picked.experts, own))


def most_of_a_part(*, hidden: int, experts: int, picks: int) -> int:
    """Return for how many tokens one launch does it all on the device that is compiled for; 0 if there is none."""
    counts = range(_SORTED_ALONE // picks, 0, -1)
    return next((tokens for tokens in counts if _one_launch(hidden, experts, tokens, picks) is not None), 0)


def route_in_parts(
    x: jax.Array, gate: jax.Array, inputs: PickInputs, *, picks: int, scale: float = 1.0, simulate: bool = False
) -> Routed:
    """Do what ``route`` does, so that a token's picks and weights have the same bits among any number of others.

    Raises:
      AssertionError, ValueError: as ``route``; or one launch does not do it all, not even for one token.
    """
    _check(x, gate, inputs, picks)
    (tokens, hidden), experts = x.shape, gate.shape[0]
    most = most_of_a_part(hidden=hidden, experts=experts, picks=picks)
    if not most:
        raise ValueError(f"no launch routes tokens of {hidden} numbers to {experts} experts by itself")
    if tokens <= most:
        return route(x, gate, inputs, picks=picks, scale=scale, simulate=simulate)
    parts = []
    for first in range(0, tokens, most):
        some = slice(first, min(first + most, tokens))
        ids = None if inputs.ids is None else inputs.ids[some]
        of_part = dataclasses.replace(inputs, real=inputs.real[some], ids=ids)
        parts.append(route(x[some], gate, of_part, picks=picks, scale=scale, simulate=simulate))
    found = jnp.concatenate([part.experts for part in parts])
    rows = tile_rows(tokens, picks, experts)
    router = Router(tokens=tokens, experts=experts, picks=picks, scale=scale, rows=rows, simulate=simulate)
    weights = jnp.concatenate([part.weights for part in parts])
    return Routed(experts=found, weights=weights, tiles=router.sort(found))


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
    layout = Layout.of(hidden, experts, tokens, _beside(experts, tokens * picks)) if tokens else None
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

    def _tiles(self, own: OwnExperts | None) -> RoutedTiles:
        experts = self.experts if own is None else own.count
        return RoutedTiles.shapes(self.tokens * self.picks, experts, self.rows)

    def together(
        self, x: jax.Array, gate: jax.Array, inputs: PickInputs, layout: Layout, own: OwnExperts | None
    ) -> Routed:
        """Do it all in one launch."""
        pairs, size = self.tokens * self.picks, layout.clusters * layout.cluster
        shared = layout.shared_bytes + _beside(self.experts, pairs)
        is_trivial = self.tokens == 1 and inputs.table is None  # whose picks are of different experts, a tile of each
        is_near = not is_trivial and layout.cluster > 1 and self.tokens <= _NEAR * layout.cluster * _WARPS
        pickers = layout.cluster if is_near else size

        def body(machine: TensorCores, arrays: Any, state: Any) -> None:
            x, gate, inputs, own = arrays
            picked, tiles = state
            mail = Mailbox.open(machine, (self.tokens, self.experts + self.experts % 2))
            rank = machine.rank if layout.cluster > 1 else machine.constant(0, "i32")
            block = (machine.block(1) * layout.blocks[0] + machine.block(0)) * layout.cluster + rank
            picker = self._picker(machine, functools.partial(_received, mail), inputs, picked)
            tokens = []
            for first in range(0, self.tokens, pickers * _WARPS):
                number = block * _WARPS + machine.thread // WARP + first
                tokens.append(picker.token(number, (number < self.tokens) & (block < pickers)))
            gathered = Shared.take(machine, (pairs,), "f32") if is_near else None
            arrived = Barrier.take(machine, 1, scope="cluster")
            found = logits(machine, x, gate, layout, [arrived] if is_near else [])
            for logit, token, expert, exists in found:
                mail.send_floats([sqrt_softplus(machine, logit)], token, expert, where=exists)
            mail.close()
            lists = Lists.take(machine, self.experts, _WARPS)
            if is_near:
                with machine.when((block == 0) & (machine.thread < WARP)):
                    arrived.expect(pairs * 4)
            lists.clear()
            with machine.when(tokens[0].here):
                picks = picker.pick(tokens)
                for token, pick in zip(tokens, picks, strict=True):
                    if is_trivial:
                        with machine.when(token.here):
                            _store_alone(picker, token, pick, tiles, own)
                    elif gathered is not None:
                        expert = machine.from_bits(picker.expert(token, pick))
                        at = token.number * self.picks + pick.place
                        arrived.send_floats([expert], gathered, at, rank=0, where=picker.has_pick & token.here)
                for token, pick in zip(tokens, picks, strict=True):
                    picker.store(token, pick)
            if is_trivial:
                return
            if gathered is None:
                machine.barrier("grid")
            with machine.when(block == 0):
                if gathered is None:
                    lists.sort(pairs, _flat(picked.experts), tiles, own)
                else:
                    arrived.wait(0)
                    of_pairs = gathered.view((pairs,), "i32")
                    lists.sort(pairs, lambda pair, there: of_pairs.load_int(select(there, pair, 0)), tiles, own)

        picked, tiles = launch(
            body,
            name="router",
            grid=Grid(blocks=layout.blocks, cluster=layout.cluster, shared_bytes=shared),
            inputs=(x, gate, inputs, own),
            state=(self._shapes, self._tiles(own)),
            simulate=self.simulate,
        )
        return Routed(experts=picked.experts, weights=picked.weights, tiles=tiles)

    def pick(self, product: jax.Array, inputs: PickInputs) -> Picked:
        """Pick from logits f32 [M, E]."""

        def body(machine: TensorCores, arrays: tuple[Buffer, PickInputs], picked: Picked) -> None:
            product, inputs = arrays
            picker = self._picker(machine, functools.partial(_computed, machine, product), inputs, picked)
            number = machine.block(0) * _WARPS + machine.thread // WARP
            with machine.when(number < self.tokens):
                token = picker.token(number, True)
                (pick,) = picker.pick([token])
                picker.store(token, pick)

        return launch(
            body,
            name="router_picks",
            grid=(-(-self.tokens // _WARPS),),
            inputs=(product, inputs),
            state=self._shapes,
            simulate=self.simulate,
        )

    def sort(self, experts: jax.Array, own: OwnExperts | None = None) -> RoutedTiles:
        """Put picks int32 [M, k] in tiles."""
        cluster, warpgroups = (1, 1) if experts.size <= _SORTED_ALONE else (_SORTING_CLUSTER, _SORTING_WARPGROUPS)
        warps = warpgroups * _WARPS
        of_block = Lists.of_block(experts.size, warps, cluster)
        has_room = Lists.shared_bytes(self.experts, warps, cluster, of_block) <= _ORDERING_BYTES
        ordered = of_block if cluster > 1 and has_room else 0

        def body(machine: Machine, arrays: tuple[Buffer, OwnExperts | None], tiles: RoutedTiles) -> None:
            experts, own = arrays
            lists = Lists.take(machine, self.experts, warps, cluster, ordered)
            lists.clear()
            lists.sort(experts.shape[0] * experts.shape[1], _flat(experts), tiles, own)

        shared = Lists.shared_bytes(self.experts, warps, cluster, ordered)
        return launch(
            body,
            name="router_tiles",
            grid=Grid(blocks=(1,), warpgroups=warpgroups, cluster=cluster, shared_bytes=shared),
            inputs=(experts, own),
            state=self._tiles(own),
            simulate=self.simulate,
        )

    def _picker(self, machine: TensorCores, load_scores: LoadScores, inputs: PickInputs, out: Picked) -> Picker:
        return Picker(
            machine=machine, load_scores=load_scores, experts=self.experts, inputs=inputs, out=out, scale=self.scale
        )


def _received(mail: Mailbox, places: Sequence[Place], count: int) -> list[Step]:
    """Return scores that blocks send."""
    width = min(count, 2)
    pairs = [(token, expert + i, there) for token, expert, there in places for i in range(0, count, width)]
    found = mail.receive_floats([at[:2] for at in pairs], count=width, where=[there for *_, there in pairs])
    each = count // width
    return [[x for pair in found[n : n + each] for x in pair] for n in range(0, len(found), each)]


def _computed(machine: TensorCores, product: Buffer, places: Sequence[Place], count: int) -> list[Step]:
    """Return scores of logits [M, E]."""
    loaded = [product.load_floats(token, expert, count=count, where=there) for token, expert, there in places]
    return [[sqrt_softplus(machine, logit) for logit in logits] for logits in loaded]


def _beside(experts: int, pairs: int) -> int:
    """Return the bytes of shared memory that one launch needs beside the product's: lists, picks and a barrier."""
    return Lists.shared_bytes(experts, _WARPS) + pairs * 4 + 32


def _flat(experts: Buffer) -> Callable[[Value, Condition], Value]:
    """Return what loads a pair's expert from picks [M, k]."""
    flat = dataclasses.replace(experts, shape=(experts.shape[0] * experts.shape[1],))
    return lambda pair, there: flat.load_int(pair, where=there)


def _store_alone(picker: Picker, token: Token, pick: Pick, tiles: RoutedTiles, own: OwnExperts | None) -> None:
    """Store the tiles of the only token, whose picks are of different experts."""
    machine, lane, one = picker.machine, picker.lane, picker.machine.constant(1, "i32")
    tiles.pairs.store_int(lane, lane, where=picker.has_pick)
    expert, at, count = pick.mine, pick.place, machine.constant(picker.picks, "i32")
    is_tile = picker.has_pick & (token.real != 0)
    if own is not None:
        begin = own.first.load_int(0)
        is_lower, is_own = expert < begin, (expert >= begin) & (expert < begin + own.count)
        expert, at = expert - begin, at - machine.reduce_warp("add", select(picker.has_pick & is_lower, one, 0))
        count = machine.reduce_warp("add", select(picker.has_pick & is_own, one, 0))
        is_tile = is_tile & is_own
    for n, value in enumerate((expert, pick.place, one)):
        tiles.tiles.store_int(value, at, n, where=is_tile)
    no_large, smalls = machine.constant(0, "i32"), select(token.real != 0, count, 0)
    tiles.count.store_words([no_large, smalls], 0, where=lane == 0)
