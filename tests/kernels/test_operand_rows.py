"""Operand rows: attention and latents are written as ``OperandRows.of`` makes them of their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.activations import OperandRows
from pallas_kernels.attention import sm90
from pallas_kernels.attention.call import decode_attention
from tests.kernels.test_token_parts import SIZES
from tests.kernels.test_token_step import make_products, make_tokens, rounding_of
from tests.support.attention_cases import ONE_BLOCK, Case, make
from tests.support.cases import first_of
from tests.support.kernel_cases import FLASH, csa, make_batch, make_stack, same_bytes
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)


def assert_same(found: Any, want: OperandRows) -> None:
    assert isinstance(found, OperandRows)
    np.testing.assert_array_equal(found.values, want.values)


def test_each_segment_is_permuted_as_documented():
    x = jnp.arange(2 * 192, dtype=jnp.float32).reshape(2, 192).astype(jnp.bfloat16)
    rows = OperandRows.of(x)
    pairs, stored = (np.asarray(a).reshape(2, 3, 32, 2) for a in (x, rows.values))
    for quarter in range(4):
        for pair in range(8):
            np.testing.assert_array_equal(stored[:, :, 4 * pair + quarter], pairs[:, :, 8 * quarter + pair])
    np.testing.assert_array_equal(rows.in_order(), x)
    with pytest.raises(ValueError, match="multiple of 64 numbers, got 96"):
        OperandRows.of(x[:, :96])


def test_operand_rows_are_of_bf16():
    inputs, _ = make(Case(lengths=(5,), entries=None))
    with pytest.raises(ValueError, match="operand rows are bfloat16, got float32"):
        pk.decode_attention(inputs, kv_format="fp8_row", dtype=jnp.float32, is_operand=True, simulate=True)
    products = SIZES["swa"].draw(jnp.float32)
    rounding = pk.TokenRounding(eps=1e-6, latent_dtype=jnp.float32, latent_is_operand=True)
    with pytest.raises(ValueError, match="operand rows are bfloat16, got latent_dtype float32"):
        pk.token_parts(products, rounding, simulate=True)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            # Queries that are padding; blocks that store several segments of a head, or half of one.
            Case(lengths=(300, -1), layout=sm90.Layout(cluster=2)),
            Case(lengths=(5, 9), entries=None, n_win=64, heads=8, layout=ONE_BLOCK),
            Case(lengths=(5, -1), tokens=4, entries=None, n_win=64, heads=128, layout=ONE_BLOCK),
            Case(lengths=(700,), layout=sm90.Layout(cluster=4)),
            Case(lengths=(900,), layout=sm90.Layout(cluster=8)),
            Case(lengths=(5, -1), tokens=3, entries=None),
            Case(lengths=(5, 9), entries=None, heads=32, layout=sm90.Layout(cluster=2)),
            Case(lengths=(5, -1), tokens=3, entries=None, heads=16),
        ],
        count=2,
    ),
    ids=["two blocks", "8 heads", "one block", "four blocks", "eight blocks", "few queries", "32 heads", "16 heads"],
)
def test_attention_writes_operand_rows(case, simulate):
    inputs, _ = make(case)

    def attend(inputs: pk.AttentionInputs, *, is_operand: bool) -> Any:
        options: dict[str, Any] = dict(is_operand=is_operand, layout=case.layout, simulate=simulate)
        return decode_attention(inputs, kv_format=case.kv_format, dtype=jnp.bfloat16, **options)

    attend = jax.jit(attend, static_argnames="is_operand")
    in_order = attend(inputs, is_operand=False)
    assert np.isfinite(np.asarray(in_order, np.float32)).all()
    queries = in_order.shape[0] * in_order.shape[1]
    assert_same(attend(inputs, is_operand=True), OperandRows.of(in_order.reshape(queries, -1)))


@machines
@pytest.mark.parametrize("size", [SIZES[name] for name in ("csa", "hca")], ids=["csa", "hca"])
def test_latents_are_operand_rows(size, simulate):
    products = size.draw(jnp.bfloat16)

    def run(products: pk.TokenProducts, *, is_operand: bool) -> Any:
        rounding = pk.TokenRounding(eps=1e-6, latent_is_operand=is_operand)
        return pk.token_parts(products, rounding, simulate=simulate).latent

    run = jax.jit(run, static_argnames="is_operand")
    assert_same(run(products, is_operand=True), OperandRows.of(run(products, is_operand=False)))


@machines
@pytest.mark.parametrize("case", [csa(1, "fp8_row", "mxfp4", requests=13)], ids=str)
def test_latents_of_a_step_are_operand_rows(case, simulate):
    case = dataclasses.replace(case, cfg=FLASH, max_context=512)
    batch = make_batch(case)
    products = make_products(case, batch, jnp.bfloat16)
    stack, tokens = make_stack(case, batch), make_tokens(case, batch, products)
    options: dict[str, Any] = dict(key_format=case.indexer_format, ratio=case.ratio, simulate=simulate)

    def run(stack: Any, products: pk.TokenProducts, tokens: pk.NewTokens, *, is_operand: bool) -> Any:
        rounding = dataclasses.replace(rounding_of(case, jnp.bfloat16), latent_is_operand=is_operand)
        return pk.token_step(stack, tokens, products, rounding, **options)

    run = jax.jit(run, static_argnames="is_operand")
    (found, parts), (want, plain) = (run(stack, products, tokens, is_operand=is_it) for is_it in (True, False))
    assert_same(parts.latent, OperandRows.of(plain.latent))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        same_bytes("cache", np.asarray(one), np.asarray(other))
