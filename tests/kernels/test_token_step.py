"""The kernel of a decode step's token parts and cache update, compared with the two launches that do the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.tails import num_touched_blocks
from tests.support.cases import first_of
from tests.support.kernel_cases import (
    BF16_TAIL,
    FLASH,
    LAYER,
    LONG,
    ODD,
    Batch,
    Case,
    csa,
    hca,
    make_batch,
    make_stack,
    same_bytes,
    swa,
)
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)

# Each kind and each format; tails of bf16; blocks of the published length; sizes that are no powers of two.
CASES = [
    csa(1, "fp8_row", "mxfp4"),
    hca("online", 1, "fp8_tile64", cfg=LONG, max_context=500),
    swa(1, "fp8_row", cfg=ODD),
    csa(1, "fp8_tile64", "nvfp4", cfg=ODD, **BF16_TAIL),
    hca("online", 1, "bf16", cfg=ODD, **BF16_TAIL),
    csa(1, "f32", "f32", **BF16_TAIL),
    csa(1, "bf16", "bf16"),
    hca("online", 1, "f32"),
    swa(1, "fp8_tile64"),
    *(
        dataclasses.replace(case, cfg=FLASH, requests=13, max_context=512)
        for case in (csa(1, "fp8_row", "mxfp4"), hca("online", 1, "fp8_row", **BF16_TAIL), swa(1, "fp8_row"))
    ),
]


def make_products(case: Case, batch: Batch, dtype: Any) -> pk.TokenProducts:
    """Products of all magnitudes; those of tokens that do not exist are NaN. Norms and biases of ``dtype``."""
    rng, cfg, kind, lead = np.random.default_rng(case.seed + 3), case.cfg, case.kind, (case.batch, case.tokens)
    entry = (1 + kind.overlaps) * cfg.head_dim if kind.compresses else 0
    key, heads = (2 * cfg.indexer_head_dim, cfg.indexer_heads) if kind.is_indexed else (0, 0)
    token = np.arange(case.tokens)
    is_real = (token < batch.num_new[:, None]) & (batch.num_new[:, None] <= case.tokens)

    def rows(size: int) -> jax.Array:
        x = rng.standard_normal((*lead, size)) * 2.0 ** rng.integers(-3, 4, (*lead, 1))
        x[~is_real] = np.nan
        return jnp.asarray(x, jnp.float32)

    def weight(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype) if all(shape) else None

    positions = jnp.asarray(np.where(is_real, batch.start[:, None] + token, -1), jnp.int32)
    return pk.TokenProducts(
        q_a_kv=rows(cfg.q_lora_rank + cfg.head_dim),
        compress=rows(2 * (entry + key) + heads) if entry else None,
        q_norm=weight(cfg.q_lora_rank),
        kv_norm=weight(cfg.head_dim),
        entry_ape=weight(case.ratio, entry),
        key_ape=weight(case.ratio, key),
        angles=packed_angles(positions, rope_frequencies(cfg, kind)),
        positions=positions,
    )


def make_tokens(case: Case, batch: Batch, products: pk.TokenProducts) -> pk.NewTokens:
    """Where the tokens go, and their streams as columns of the product."""
    rng, cfg, rope = np.random.default_rng(case.seed + 4), case.cfg, None
    if case.kind.compresses:
        touched = batch.start[:, None] // case.ratio + np.arange(num_touched_blocks(case.tokens, case.ratio))
        rope = packed_angles(jnp.asarray(touched * case.ratio, jnp.int32), rope_frequencies(cfg, case.kind))

    def streams(dim: int, first: int, ape: jax.Array | None) -> pk.ProductStreams | None:
        norm, is_bf16 = jnp.asarray(1 + 0.1 * rng.standard_normal(dim), jnp.float32), case.tail_dtype == "bfloat16"
        if ape is None:
            return None
        assert products.compress is not None
        return pk.ProductStreams(product=products.compress, ape=ape, norm=norm, first=first, is_bf16=is_bf16)

    return pk.NewTokens(
        layer=jnp.full(1, LAYER, jnp.int32),
        slots=jnp.asarray(batch.slots),
        start=jnp.asarray(batch.start),
        num_new=jnp.asarray(batch.num_new),
        block_table=jnp.asarray(batch.block_table) if case.kind.compresses else None,
        kv=None,
        entry=streams(cfg.head_dim, 0, products.entry_ape),
        key=streams(cfg.indexer_head_dim, 2 * products.widths[0], products.key_ape),
        rope=rope,
    )


def with_streams(tokens: pk.NewTokens, parts: pk.TokenParts) -> pk.NewTokens:
    """The tokens with the streams that ``token_parts`` has made."""

    def separate(streams: pk.Streams | None, columns: tuple[Any, Any] | None) -> pk.Streams | None:
        if streams is None:
            return None
        assert columns is not None
        return pk.Streams(k=columns[0], z=columns[1], norm=streams.norm)

    entry, key = separate(tokens.entry, parts.entry), separate(tokens.key, parts.key)
    return dataclasses.replace(tokens, entry=entry, key=key)


def rounding_of(case: Case, dtype: Any) -> pk.TokenRounding:
    stream_dtype = jnp.dtype(case.tail_dtype)
    return pk.TokenRounding(
        eps=1e-6, latent_dtype=dtype, stream_dtype=stream_dtype, head_factor=0.37, kv_format=case.kv_format
    )


def check_bytes(got: Any, want: Any, before: Any) -> None:
    """Check that all leaves are the same bytes, and that some are not those from before."""
    changed, leaves = 0, (jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), jax.tree.leaves(before))
    for (path, new), expected, old in zip(*leaves, strict=True):
        new, expected = np.asarray(new), np.asarray(expected)
        assert new.dtype == expected.dtype
        same_bytes(jax.tree_util.keystr(path), new, expected)
        changed += new.tobytes() != np.asarray(old).tobytes()
    assert changed >= 2, "window rows and their positions, or tails, or entries"


@machines
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", first_of(CASES, count=3), ids=str)
def test_it_gives_the_bytes_of_two_launches(case, dtype, simulate):
    batch = make_batch(case)
    stack, products, rounding = make_stack(case, batch), make_products(case, batch, dtype), rounding_of(case, dtype)
    tokens = make_tokens(case, batch, products)
    options: dict[str, Any] = dict(key_format=case.indexer_format, ratio=case.ratio or None, simulate=simulate)

    def in_two(stack: Any, tokens: pk.NewTokens, products: pk.TokenProducts) -> tuple[Any, pk.TokenParts]:
        parts = pk.token_parts(products, dataclasses.replace(rounding, kv_format=None), simulate=simulate)
        tokens = dataclasses.replace(with_streams(tokens, parts), kv=parts.kv)
        stack = pk.cache_step(stack, tokens, kv_format=case.kv_format, eps=rounding.eps, **options)
        return stack, dataclasses.replace(parts, kv=None, entry=None, key=None)

    def in_one(stack: Any, tokens: pk.NewTokens, products: pk.TokenProducts) -> tuple[Any, pk.TokenParts]:
        return pk.token_step(stack, tokens, products, rounding, **options)

    got = jax.jit(in_one)(stack, tokens, products)
    want = jax.jit(in_two)(stack, tokens, products)
    check_bytes(got, want, (stack, want[1]))


# Chunks within a block, across one, and longer than the window; drafts, which leave the tails alone; every tail.
CHUNKS = [
    csa(5, "fp8_row", "mxfp4"),
    csa(33, "f32", "f32", cfg=ODD, **BF16_TAIL),
    hca("ring", 33, "fp8_tile64", **BF16_TAIL),
    hca("online", 40, "f32"),
    hca("ring", 1, "f32"),
    csa(8, "bf16", "nvfp4", **BF16_TAIL),
    hca("online", 5, "bf16", cfg=ODD, **BF16_TAIL),
    hca("ring", 150, "f32", cfg=LONG, max_context=500),
    *(
        dataclasses.replace(case, cfg=FLASH, requests=13, max_context=512)
        for case in (csa(20, "fp8_row", "mxfp4"), hca("online", 20, "fp8_row", **BF16_TAIL))
    ),
]


@machines
@pytest.mark.parametrize("keep_tails", [False, True], ids=["", "draft"])
@pytest.mark.parametrize("case", first_of(CHUNKS), ids=str)
def test_an_update_loads_streams_from_their_product(case, keep_tails, simulate):
    """With the bytes of the same update from streams that ``token_parts`` has made."""
    batch = make_batch(case)
    stack, products = make_stack(case, batch), make_products(case, batch, jnp.bfloat16)
    tokens, rounding = make_tokens(case, batch, products), rounding_of(case, jnp.bfloat16)
    options: dict[str, Any] = dict(key_format=case.indexer_format, ratio=case.ratio, kv_format=case.kv_format)
    options |= dict(keep_tails=keep_tails, eps=1e-6, simulate=simulate)
    update = jax.jit(lambda stack, tokens: pk.append_chunk(stack, tokens, **options))
    separate = dataclasses.replace(rounding, kv_format=None)
    parts = jax.jit(lambda products: pk.token_parts(products, separate, simulate=simulate))(products)
    check_bytes(update(stack, tokens), update(stack, with_streams(tokens, parts)), stack)


@machines
def test_parts_without_streams(simulate):
    case = csa(5, "f32", "f32")
    products, rounding = make_products(case, make_batch(case), jnp.bfloat16), rounding_of(case, jnp.bfloat16)
    options: dict[str, Any] = dict(row_spec=case.plan.row_spec, simulate=simulate)
    found, want = (pk.token_parts(products, rounding, has_streams=there, **options) for there in (False, True))
    assert found.entry is None
    assert found.key is None
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(dataclasses.replace(want, entry=None, key=None)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_it_does_not_support_is_named():
    def reason(case: Case) -> str | None:
        batch = make_batch(case)
        return pk.unsupported_token_step(make_stack(case, batch).state.tail, make_products(case, batch, jnp.float32))

    assert reason(csa(1, "f32", "f32")) is None
    assert reason(swa(1, "f32")) is None
    ring = reason(hca("ring", 1, "f32"))
    assert ring is not None
    assert "HCARingUpdate" in ring
    case = csa(1, "f32", "f32")
    products, tail = make_products(case, make_batch(case), jnp.float32), make_stack(case, make_batch(case)).state.tail
    assert "one token" in str(
        pk.unsupported_token_step(tail, dataclasses.replace(products, positions=jnp.zeros((3, 2))))
    )
    assert products.compress is not None
    odd = dataclasses.replace(products, compress=jnp.zeros((12, 1, products.compress.shape[-1] + 2)))
    assert "multiples of 4" in str(pk.unsupported_token_step(tail, odd))
    stack, tokens = make_stack(case, make_batch(case)), make_tokens(case, make_batch(case), products)
    rounding = pk.TokenRounding(eps=1e-6, kv_format="f32")
    with pytest.raises(ValueError, match="multiples of 4"):
        pk.token_step(stack, tokens, odd, rounding, key_format="f32", ratio=4)
    with pytest.raises(ValueError, match="format of the window"):
        pk.token_step(stack, tokens, products, dataclasses.replace(rounding, kv_format=None), key_format="f32", ratio=4)
