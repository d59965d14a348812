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
        dataclasses.replace(case, cfg=FLASH, batch=64, requests=70, max_context=2048)
        for case in (csa(1, "fp8_row", "mxfp4"), hca("online", 1, "fp8_row", **BF16_TAIL), swa(1, "fp8_row"))
    ),
]


def make_products(case: Case, batch: Batch, dtype: Any) -> pk.TokenProducts:
    """Products of all magnitudes; those of requests without a token are NaN. Norms and biases of ``dtype``."""
    rng, cfg, kind = np.random.default_rng(case.seed + 3), case.cfg, case.kind
    entry = (1 + kind.overlaps) * cfg.head_dim if kind.compresses else 0
    key, heads = (2 * cfg.indexer_head_dim, cfg.indexer_heads) if kind.is_indexed else (0, 0)
    is_real = batch.num_new == 1

    def rows(size: int) -> jax.Array:
        x = rng.standard_normal((case.batch, 1, size)) * 2.0 ** rng.integers(-3, 4, (case.batch, 1, 1))
        x[~is_real] = np.nan
        return jnp.asarray(x, jnp.float32)

    def weight(*shape: int) -> jax.Array | None:
        return jnp.asarray(rng.standard_normal(shape), dtype) if all(shape) else None

    positions = jnp.asarray(np.where(is_real, batch.start, -1)[:, None], jnp.int32)
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


def make_tokens(case: Case, batch: Batch) -> pk.NewTokens:
    """Where the tokens go, and the norms of their entries."""
    rng, cfg, rope = np.random.default_rng(case.seed + 4), case.cfg, None
    if case.kind.compresses:
        touched = batch.start[:, None] // case.ratio + np.arange(num_touched_blocks(1, case.ratio))
        rope = packed_angles(jnp.asarray(touched * case.ratio, jnp.int32), rope_frequencies(cfg, case.kind))

    def streams(dim: int) -> pk.Streams:
        return pk.Streams(k=None, z=None, norm=jnp.asarray(1 + 0.1 * rng.standard_normal(dim), jnp.float32))

    return pk.NewTokens(
        layer=jnp.full(1, LAYER, jnp.int32),
        slots=jnp.asarray(batch.slots),
        start=jnp.asarray(batch.start),
        num_new=jnp.asarray(batch.num_new),
        block_table=jnp.asarray(batch.block_table) if case.kind.compresses else None,
        kv=None,
        entry=streams(cfg.head_dim) if case.kind.compresses else None,
        key=streams(cfg.indexer_head_dim) if case.kind.is_indexed else None,
        rope=rope,
    )


def in_two_launches(
    stack: Any, tokens: pk.NewTokens, products: pk.TokenProducts, rounding: pk.TokenRounding, **options: Any
) -> tuple[Any, pk.TokenParts]:
    """What ``token_step`` does. The window's format is passed to the second launch alone."""
    parts_rounding, options = dataclasses.replace(rounding, kv_format=None), dict(options)
    parts = pk.token_parts(products, parts_rounding, simulate=options["simulate"])

    def filled(streams: pk.Streams | None, columns: tuple[Any, Any] | None) -> pk.Streams | None:
        if streams is None:
            return None
        assert columns is not None
        return dataclasses.replace(streams, k=columns[0], z=columns[1])

    tokens = dataclasses.replace(
        tokens, kv=parts.kv, entry=filled(tokens.entry, parts.entry), key=filled(tokens.key, parts.key)
    )
    assert rounding.kv_format is not None
    stack = pk.cache_step(stack, tokens, kv_format=rounding.kv_format, eps=rounding.eps, **options)
    return stack, dataclasses.replace(parts, kv=None, entry=None, key=None)


@machines
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", first_of(CASES, count=5), ids=str)
def test_it_gives_the_bytes_of_two_launches(case, dtype, simulate):
    batch = make_batch(case)
    stack, tokens, products = make_stack(case, batch), make_tokens(case, batch), make_products(case, batch, dtype)
    rounding = pk.TokenRounding(
        eps=1e-6,
        latent_dtype=dtype,
        stream_dtype=jnp.dtype(case.tail_dtype),
        head_factor=0.37,
        kv_format=case.kv_format,
    )
    options = dict(key_format=case.indexer_format, ratio=case.ratio or None, simulate=simulate)
    got, want = (
        jax.jit(lambda *given, run=run: run(*given, rounding, **options))(stack, tokens, products)
        for run in (pk.token_step, in_two_launches)
    )
    changed = 0
    for (path, new), expected, old in zip(
        jax.tree_util.tree_leaves_with_path(got), *map(jax.tree.leaves, (want, (stack, want[1]))), strict=True
    ):
        new, expected = np.asarray(new), np.asarray(expected)
        assert new.dtype == expected.dtype
        same_bytes(jax.tree_util.keystr(path), new, expected)
        changed += new.tobytes() != np.asarray(old).tobytes()
    assert changed >= 4, "window rows, their positions, and tails or entries"


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
    odd = dataclasses.replace(products, compress=jnp.zeros((12, 1, products.compress.shape[-1] + 2)))
    assert "multiples of 4" in str(pk.unsupported_token_step(tail, odd))
    stack, tokens = make_stack(case, make_batch(case)), make_tokens(case, make_batch(case))
    rounding = pk.TokenRounding(eps=1e-6, kv_format="f32")
    with pytest.raises(ValueError, match="multiples of 4"):
        pk.token_step(stack, tokens, odd, rounding, key_format="f32", ratio=4)
    with pytest.raises(ValueError, match="format of the window"):
        pk.token_step(stack, tokens, products, dataclasses.replace(rounding, kv_format=None), key_format="f32", ratio=4)
