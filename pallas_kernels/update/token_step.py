"""What the tokens of a decode step contribute to a layer, and its cache update, in one launch.

This is ``token_parts`` and then ``cache_step``, without what goes to the cache ever being in memory in between: a
compressor loads its streams from the product, and a window row is stored where it belongs. The grid is [B, units]:

    compressor   of entries, straight from its columns of the product
    small parts  the indexer's compressor, on a warp, and the head weights
    latent       of the queries
    window row   norm, rope, encode
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.values import VECTOR
from pallas_kernels.token_parts import (
    Token,
    TokenParts,
    TokenProducts,
    TokenRounding,
    check_products,
    latent_shapes,
    store_keys_and_heads,
    store_latent,
    window_row,
)
from pallas_kernels.update.batch import Block, NewTokens, Stack
from pallas_kernels.update.call import check_compressors, checked_call, update_of
from pallas_kernels.update.tail_update import TailUpdate


def unsupported_token_step[Array: Shaped](tail: object, products: TokenProducts[Array]) -> str | None:
    """Return why this is not one launch, or None if it is. It then takes two, if each of them is supported.

    Args:
      tail: of the layers of a kind, None for SWA.
      products: arrays or their shapes.
    """
    if (tokens := products.positions.shape[-1]) != 1:
        return f"a request must bring one token, got {tokens}"
    if tail is not None and not update_of(tail).is_one_warpgroup:
        return f"the update of {update_of(tail).__name__} is done by several warpgroups"
    if products.compress is not None and not products.has_aligned_streams:
        return f"columns and streams must be multiples of {VECTOR}, got {products.compress.shape} and {products.widths}"
    return None


def token_step[Layers: Stack[jax.Array]](
    stack: Layers,
    tokens: NewTokens[jax.Array],
    products: TokenProducts[jax.Array],
    rounding: TokenRounding,
    *,
    key_format: str,
    ratio: int | None,
    simulate: bool = False,
) -> tuple[Layers, TokenParts[jax.Array]]:
    """Split the products of one token of each request into parts, and update the cache of one layer with them.

    The bytes are those of ``token_parts`` followed by ``cache_step``.

    Args:
      stack: as for ``cache_step``. Updated in place if the caller's jit donates it.
      tokens: where the tokens go. ``kv`` is None, and streams are ``ProductStreams`` of ``products.compress``.
      products: as for ``token_parts``, with T = 1.
      rounding: the formats and constants. ``kv_format`` is that of the window.
      key_format, ratio: as for ``cache_step``.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      The updated stack, and the parts that are not stored: ``latent`` and ``head_weights``.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not support this (``unsupported_token_step``), or these sizes, formats or dtypes.
    """
    window, tail = stack.state.window, stack.state.tail
    update = None if tokens.entry is None else update_of(tail)
    if (reason := unsupported_token_step(None if update is None else tail, products)) is not None:
        raise ValueError(reason)
    kv_format = rounding.kv_format
    if kv_format is None:
        raise ValueError("rounding.kv_format must be the format of the window, got None")
    batch = len(products.positions)
    call = checked_call(
        stack, tokens, (batch, 1), kv_format=kv_format, key_format=key_format, ratio=ratio, eps=rounding.eps
    )
    check_products(products, rounding, window)
    chex.assert_shape(products.kv_norm, (window.nope.shape[-1] + window.rope.shape[-1],))
    if update is not None:
        check_compressors(stack, tokens, call, update)
    units = [_store_latent, _store_window_row]
    if tokens.key is not None or products.widths[2]:
        units.insert(0, _do_small_parts)
    if update is not None:
        units.insert(0, _compress)

    def body(
        machine: Machine,
        given: tuple[NewTokens[Buffer], TokenProducts[Buffer]],
        state: tuple[Stack[Buffer], TokenParts[Buffer]],
    ) -> None:
        (tokens, products), (stack, parts) = given, state
        block = Block.load(machine, call, tokens, stack)
        work = _Work(block, Token.of(machine, products, reads_padding=True), parts, rounding, update)
        for number, unit in enumerate(units):
            with machine.when(machine.block(1) == number):
                unit(work)

    heads = products.widths[2]
    parts = TokenParts(
        latent=latent_shapes(batch, products.q_norm.shape[0], rounding),
        kv=None,
        stored=None,
        entry=None,
        key=None,
        head_weights=jax.ShapeDtypeStruct((batch, heads), jnp.float32) if heads else None,
    )
    given, grid = (tokens, products.flat), (batch, len(units))
    stack, parts = launch(body, name="token_step", grid=grid, inputs=given, state=(stack, parts), simulate=simulate)
    return stack, jax.tree.map(lambda leaf: leaf[:, None], parts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A block's request, of which each unit does a share."""

    block: Block
    token: Token
    parts: TokenParts[Buffer]
    rounding: TokenRounding
    update: type[TailUpdate] | None


def _compress(work: _Work) -> None:
    assert work.update is not None
    work.update.of_block(work.block).run(work.block.machine.constant(0, "i32"))


def _do_small_parts(work: _Work) -> None:
    machine, update = work.block.machine, work.update
    jobs = () if update is None else update.jobs(work.block.call, work.block.tokens)
    for number, some in enumerate(jobs):
        assert some.count == 1, "a token is one job"
        with machine.when(machine.thread // WARP == number):
            some.run(work.block, Row(Team(machine, WARP), some.dim), machine.constant(0, "i32"))
    store_keys_and_heads(work.token, work.parts, work.rounding)


def _store_latent(work: _Work) -> None:
    store_latent(work.token, work.parts, work.rounding)


def _store_window_row(work: _Work) -> None:
    block, request, state = work.block, work.block.request, work.block.stack.state
    row, values, amax = window_row(work.token, work.rounding)
    at = request.layer, request.slot, request.start % state.pos.shape[2]
    with block.machine.when(request.live):
        block.call.kv_format.store(row, values, state.window, *at, where=True, amax=amax)
        state.pos.store_int(request.start, *at, where=row.team.lane == 0)
