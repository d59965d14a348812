"""Cases of indexer scores: queries and keys of every kind, block tables, and the results of XLA."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.cache.pool import PagedPool, PooledLayer
from dsv4jax.formats import INDEXER_FORMATS, KeyRows, KVRows
from dsv4jax.layer.indexer import scores

HEADS, DIM, PAGE_ENTRIES = 64, 128, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleBytes:
    """What a format's scale bytes mean."""

    groups: int  # number per row
    one: int
    binade: int  # steps of the byte between powers of two
    largest: int
    nan: int


SCALE_BYTES = {
    "mxfp4": ScaleBytes(groups=4, one=127, binade=1, largest=254, nan=0xFF),  # UE8M0
    "nvfp4": ScaleBytes(groups=8, one=0x38, binade=8, largest=0x7E, nan=0x7F),  # E4M3
}
FORMATS = tuple(SCALE_BYTES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(kw_only=True)
class Rows:
    """Encoded rows that a test may change."""

    codes: Any
    scale: Any


@dataclasses.dataclass(kw_only=True)
class Case:
    """A batch whose requests hold ``max_blocks`` pages each, scattered over a pool whose free pages contain NaN.

    Every array may be changed before the case is run.
    """

    key_format: str
    visible: np.ndarray  # [B, T]
    max_blocks: int
    seed: int = 0
    spread: int = 3  # range of the scales, in binades up and down

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        batch, tokens = self.visible.shape
        requests = batch + 2
        num_blocks = requests * self.max_blocks + 3
        self.queries, self.keys = self._rows(batch, tokens, HEADS), self._rows(2, num_blocks, PAGE_ENTRIES)
        self.weights = self.rng.standard_normal((batch, tokens, HEADS)).astype(np.float32)
        order = self.rng.permutation(num_blocks).astype(np.int32)
        self.block_table = order[3:].reshape(requests, self.max_blocks)
        self.keys.scale[:, order[:3]] = self.scale_bytes.nan
        self.keys.scale[0] = self.scale_bytes.nan  # the other layer
        self.slots = self.rng.permutation(requests)[:batch].astype(np.int32)

    @property
    def scale_bytes(self) -> ScaleBytes:
        return SCALE_BYTES[self.key_format]

    def _rows(self, *shape: int) -> Rows:
        """Return codes of every kind, with scales around 1."""
        form, reach = self.scale_bytes, self.spread * self.scale_bytes.binade
        scale = form.one + self.rng.integers(-reach, reach + 1, (*shape, form.groups))
        codes = self.rng.integers(0, 256, (*shape, DIM // 2))
        return Rows(codes=codes.astype(np.uint8), scale=np.clip(scale, 1, form.largest).astype(np.uint8))

    def inputs(self) -> pk.ScoreInputs:
        """Return the inputs for the pool's second layer."""
        inputs = pk.ScoreInputs(
            queries=self.queries,
            weights=self.weights,
            keys=self.keys,
            layer=np.ones(1, np.int32),
            block_table=self.block_table,
            slots=self.slots,
            visible=self.visible,
        )
        return jax.device_put(inputs)

    def run(self, simulate: bool, **options: Any) -> np.ndarray:
        call = functools.partial(pk.indexer_scores, key_format=self.key_format, simulate=simulate, **options)
        return np.asarray(jax.jit(call)(self.inputs()))

    @property
    def seen(self) -> np.ndarray:
        """Return whether a query sees an entry, bool [B, T, max_entries]."""
        return np.arange(self.max_blocks * PAGE_ENTRIES) < self.visible[..., None]

    def xla(self) -> np.ndarray:
        """Return the scores of XLA, f32 [B, T, max_entries]."""
        return np.array(_xla(self.key_format, self.inputs()))

    def magnitude(self) -> np.ndarray:
        """Return sum_h |w_h| |q_h| |k_s|, f64 [B, T, max_entries]."""
        decode = jax.jit(INDEXER_FORMATS[self.key_format].decode)
        queries, keys = (np.asarray(decode(KeyRows(codes=x.codes, scale=x.scale))) for x in (self.queries, self.keys))
        norms = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in (queries, keys[1])]
        heads = np.sum(np.abs(self.weights) * norms[0], -1)
        return heads[..., None] * norms[1][self.block_table[self.slots]].reshape(len(heads), 1, -1)

    def check(self, got: np.ndarray, tolerance: float) -> None:
        """Check the scores that are seen, with an error of ``tolerance`` relative to their magnitude.

        Others may be anything.
        """
        seen = self.seen
        error = np.abs(got[seen] - self.xla()[seen]) / self.magnitude()[seen]
        assert np.max(error, initial=0.0) < tolerance


@functools.cache
def _plan(key_format: str) -> d4.CachePlan:
    return d4.plan_cache(
        d4.DSV4Config.flash(), max_requests=1, max_context=128, num_blocks=1, indexer_format=key_format
    )


@functools.partial(jax.jit, static_argnums=0)
def _xla(key_format: str, inputs: pk.ScoreInputs) -> jax.Array:
    queries, keys = (KeyRows(codes=rows.codes, scale=rows.scale) for rows in (inputs.queries, inputs.keys))
    # Of the entries only their number per page is used.
    pool = PagedPool(entries=KVRows(nope=keys.codes, rope=keys.codes, scale=None), indexer_keys=keys)
    layer = PooledLayer(
        pool=pool,
        index=inputs.layer[0],
        block_table=inputs.block_table,
        slots=inputs.slots,
        plan=_plan(key_format),
    )
    return scores(INDEXER_FORMATS[key_format].decode(queries), inputs.weights, layer, inputs.visible)


def visible(seed: int, batch: int, tokens: int, most: int) -> np.ndarray:
    """Return random numbers of entries that queries see, [B, T]."""
    return np.random.default_rng(seed).integers(0, most + 1, (batch, tokens)).astype(np.int32)
