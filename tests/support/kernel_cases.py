"""Cases for the cache update: plans, ragged batches, stacks full of garbage; and what may differ between backends."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import dsv4jax as d4
from dsv4jax.cache.stack import LayerStack
from dsv4jax.indexing import Batch as Rows
from dsv4jax.kinds import AttentionType
from dsv4jax.layer import update
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.compressor import project_tokens
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.tails import EMPTY_GATE, CSATail, HCAOnlineTail, HCATail
from dsv4jax.weights.params import param_shapes

F32, BF16 = np.float32, ml_dtypes.bfloat16
LAYERS, LAYER = 2, 1  # layers of a kind in the stack, and the index of the one that is updated

# Two layers of each kind. In the second configuration, only the indexer's size is a power of two.
EVEN = d4.DSV4Config.tiny(compress_ratios=(0, 0, 4, 4, 16, 16), hca_compression_ratio=16)
ODD = d4.DSV4Config.tiny(
    compress_ratios=(0, 0, 3, 3, 10, 10),
    csa_compression_ratio=3,
    hca_compression_ratio=10,
    head_dim=204,
    rope_dim=12,
    sliding_window=11,
    indexer_head_dim=64,
)
# HCA blocks have the published length, so that several thread blocks share one.
LONG = d4.DSV4Config.tiny(compress_ratios=(0, 0, 4, 4, 128, 128))
# The published sizes, except for the hidden size, which kernels do not see.
FLASH = dataclasses.replace(d4.DSV4Config.flash(), hidden_size=256, compress_ratios=(0, 0, 4, 4, 128, 128))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of ``update.store``, and the projections before it."""

    kind: AttentionType
    tokens: int  # T
    batch: int = 12
    requests: int = 15
    max_context: int = 160
    cfg: d4.DSV4Config = EVEN
    kv_format: str = "f32"
    indexer_format: str = "f32"
    hca_tail: str = "ring"
    tail_dtype: str = "float32"
    seed: int = 0

    @property
    def plan(self) -> d4.CachePlan:
        return d4.plan_cache(
            self.cfg,
            max_requests=self.requests,
            max_context=self.max_context,
            kv_format=self.kv_format,
            indexer_format=self.indexer_format,
            hca_tail=self.hca_tail,
            tail_dtype=jnp.dtype(self.tail_dtype),
        )

    @property
    def ratio(self) -> int:
        return self.cfg.ratio(self.kind)

    def __str__(self) -> str:
        parts = [self.kind.value, f"T{self.tokens}", self.kv_format]
        if self.kind == AttentionType.CSA:
            parts.append(self.indexer_format)
        if self.kind == AttentionType.HCA:
            parts.append(self.hca_tail)
        if self.tail_dtype != "float32" and self.kind != AttentionType.SWA:
            parts.append("bf16 tail")
        return " ".join(parts + {id(ODD): ["odd"], id(LONG): ["long"], id(FLASH): ["flash"]}.get(id(self.cfg), []))


BF16_TAIL: dict[str, Any] = dict(tail_dtype="bfloat16")


def swa(tokens: int, kv_format: str, **options: Any) -> Case:
    return Case(kind=AttentionType.SWA, tokens=tokens, kv_format=kv_format, **options)


def csa(tokens: int, kv_format: str, indexer_format: str, **options: Any) -> Case:
    return Case(kind=AttentionType.CSA, tokens=tokens, kv_format=kv_format, indexer_format=indexer_format, **options)


def hca(hca_tail: str, tokens: int, kv_format: str, **options: Any) -> Case:
    return Case(kind=AttentionType.HCA, tokens=tokens, kv_format=kv_format, hca_tail=hca_tail, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one call, as NumPy arrays."""

    slots: np.ndarray
    start: np.ndarray
    num_new: np.ndarray
    block_table: np.ndarray

    def live(self, case: Case) -> np.ndarray:
        return (self.slots >= 0) & (self.num_new > 0) & (self.num_new <= case.tokens)


NO_SLOT, NOTHING_NEW, TOO_MANY, NO_BLOCK, BAD = 4, 5, 6, 7, 8  # rows of a batch with a special purpose


def make_batch(case: Case) -> Batch:
    """Return requests at every phase, in permuted slots and blocks, with the special rows above.

    Others are full or partial.
    """
    rng = np.random.default_rng(case.seed)
    size, tokens, plan = case.batch, case.tokens, case.plan
    slots = rng.permutation(case.requests)[:size].astype(np.int32)
    longest = case.max_context - tokens
    ratio = max(1, case.ratio)
    start = rng.integers(0, longest + 1, size)
    # Odd rows go through all phases in turn, as far as there are rows. Even rows complete a block, at any of the
    # tokens.
    phase = (np.arange(size) // 2 * max(1, 2 * ratio // size) + 1) % ratio
    phase[::2] = ratio - 1 - rng.integers(0, min(tokens, ratio), len(phase[::2]))
    start = np.minimum(start // ratio * ratio + phase, longest)
    start[2] = 0  # a request's first tokens
    start[3] = longest // ratio * ratio  # at the start of a block
    num_new = np.where(rng.random(size) < 0.3, rng.integers(1, tokens + 1, size), tokens)
    num_new[[0, 1, NO_SLOT, NO_BLOCK, BAD]] = tokens
    slots[NO_SLOT], num_new[NOTHING_NEW], num_new[TOO_MANY] = -1, 0, tokens + 1
    # There are enough blocks for every row, drawn from all over the pool, except that one request has none.
    table = rng.permutation(max(plan.num_blocks, case.requests * plan.max_blocks))
    table = table[: case.requests * plan.max_blocks].reshape(case.requests, -1).astype(np.int32)
    table[table >= plan.num_blocks] = -1
    table[slots[NO_BLOCK]] = -1
    int32 = {name: np.asarray(x, np.int32) for name, x in dict(slots=slots, start=start, num_new=num_new).items()}
    return Batch(**int32, block_table=table)


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return arbitrary values of a dtype, including NaN and infinity."""
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    if dtype == np.int32:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    x = rng.standard_normal(shape).astype(F32)
    x[rng.random(shape) < 0.1] = np.nan
    x[rng.random(shape) < 0.05] = np.inf
    return x.astype(dtype)


def make_stack(case: Case, batch: Batch) -> LayerStack:
    """Return a stack with garbage wherever nothing may be read: all of window and pool, other layers, other requests.

    What a request's tails hold is finite: the rows of its unfinished block, CSA's block before, the running softmax.
    """
    rng = np.random.default_rng(case.seed + 1)
    empty = jax.eval_shape(functools.partial(d4.init_cache, case.plan)).stack(case.kind)
    stack = jax.tree.map(lambda leaf: garbage(rng, leaf.shape, leaf.dtype), empty)
    for slot, start in zip(batch.slots, batch.start, strict=True):
        if slot < 0:
            continue
        for tail in (stack.state.tail, stack.state.indexer_tail):
            for name, rows in held_rows(tail, start % max(1, case.ratio)).items():
                leaf = getattr(tail, name)
                fresh = rng.standard_normal(leaf[LAYER, slot, rows].shape).astype(F32)
                if name == "total":
                    fresh = np.abs(fresh) + F32(1)
                if isinstance(tail, HCAOnlineTail) and start % case.ratio == 0:  # as a reset leaves it
                    fresh = np.full_like(fresh, EMPTY_GATE if name == "peak" else 0)
                leaf[LAYER, slot, rows] = fresh
    return jax.device_put(stack)  # jnp.asarray would compile a program for each shape


def held_rows(tail: Any, phase: int) -> dict[str, Any]:
    """Return which rows of a request's tail an update may read."""
    if isinstance(tail, CSATail):
        current, before = slice(0, phase), slice(None)
        return dict(ka=current, za=current, kb_next=current, zb_next=current, kb=before, zb=before)
    if isinstance(tail, HCATail):
        return dict.fromkeys(("ka", "za"), slice(0, phase))
    if isinstance(tail, HCAOnlineTail):
        return dict.fromkeys(("peak", "total", "weighted"), Ellipsis)
    return {}


def on_grid(rng: np.random.Generator, shape: tuple[int, ...], step: float, largest: int) -> np.ndarray:
    """Return random multiples of a step.

    Their products and sums are exact in f32, in whatever order they are computed.
    """
    return (rng.integers(-largest, largest + 1, shape) * step).astype(F32)


@functools.cache
def make_params(cfg: d4.DSV4Config, kind: AttentionType) -> Any:
    """Return (compressor, indexer) whose projections are exact, so that two programs feed the very same streams."""
    rng = np.random.default_rng(17)
    shapes = param_shapes(cfg, kind)

    def draw(path: Any, leaf: Any) -> jax.Array:
        if jax.tree_util.keystr(path).endswith("norm"):
            return jax.device_put(1 + 0.1 * rng.standard_normal(leaf.shape).astype(F32))
        return jax.device_put(on_grid(rng, leaf.shape, 2.0**-7, 32))

    return jax.tree_util.tree_map_with_path(draw, (shapes.compressor, shapes.indexer))


def make_inputs(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return (x [B, T, hidden], kv [B, T, head_dim])."""
    rng = np.random.default_rng(case.seed + 2)
    x = on_grid(rng, (case.batch, case.tokens, case.cfg.hidden_size), 2.0**-3, 16)
    return x, rng.standard_normal((case.batch, case.tokens, case.cfg.head_dim)).astype(F32)


def store(
    case: Case, batch: Batch, stack: LayerStack, x: np.ndarray, kv: np.ndarray, backend: str, *, window: bool = True
) -> LayerStack:
    """Run ``update.store`` for layer ``LAYER`` under jit. The result's leaves are NumPy arrays."""
    rows = batch.block_table, batch.slots, batch.start, batch.num_new
    given = kv if window else None
    params = make_params(case.cfg, case.kind)
    stack = _store(params, x, given, stack, np.int32(LAYER), *rows, case=case, backend=backend)
    return jax.tree.map(np.asarray, stack)


@functools.partial(jax.jit, static_argnames=("case", "backend"))
def _store(params: Any, x: Any, kv: Any, stack: Any, layer: Any, *rows: Any, case: Case, backend: str) -> LayerStack:
    compressor, indexer = params
    table, slots, start, num_new = rows
    batch = Rows(slots=slots, start=start, num_new=num_new).fitting(x.shape[1])
    call = LayerCall(stack=stack, index=layer, block_table=table, batch=batch, kind=case.kind, plan=case.plan)
    new = project_tokens(compressor, indexer, x, start, case.plan, case.kind)
    return update.store(call, dataclasses.replace(new, kv=kv), CACHE_UPDATE[backend])


# ---- what may differ ------------------------------------------------------------------------------------------------


def written_entries(case: Case, batch: Batch) -> np.ndarray:
    """Return where the batch's new entries go, bool [num_blocks, entries_per_block]."""
    per_block = case.plan.entries_per_block(case.kind)
    written = np.zeros((case.plan.num_blocks, per_block), bool)
    for b in np.flatnonzero(batch.live(case)):
        begin, end = batch.start[b], batch.start[b] + batch.num_new[b]
        for entry in range(begin // case.ratio, end // case.ratio):
            block = batch.block_table[batch.slots[b], entry // per_block]
            if block >= 0:
                assert not written[block, entry % per_block]
                written[block, entry % per_block] = True
    return written


def written_window(case: Case, batch: Batch) -> np.ndarray:
    """Return the position of the token whose row is written to each window row, int [requests, n_win]; -1 = none."""
    n_win = case.cfg.sliding_window
    position = np.full((case.requests, n_win), -1)
    for b in np.flatnonzero(batch.live(case)):
        for p in range(batch.start[b], batch.start[b] + batch.num_new[b]):
            position[batch.slots[b], p % n_win] = p
    return position


def same_bytes(name: str, got: np.ndarray, want: np.ndarray, *, nan_bits: bool = True) -> None:
    """Check that bytes are equal. Without ``nan_bits``, all NaN are considered equal."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    if not nan_bits and got.dtype in (F32, BF16):
        nan = np.isnan(want)
        assert np.array_equal(np.isnan(got), nan), f"{name}: NaN in other places"
        got, want = np.where(nan, np.zeros_like(got), got), np.where(nan, np.zeros_like(want), want)
    if got.tobytes() != want.tobytes():
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
        at = np.argwhere(got.view(bits) != want.view(bits))
        raise AssertionError(f"{name}: {len(at)} of {got.size} values differ, the first at {at[0].tolist()}")


def code_order(stored: np.ndarray, dtype: Any) -> np.ndarray:
    """Map the codes of a float format to integers in increasing order, so that adjacent codes differ by 1."""
    bits, width = stored.astype(np.int64), 8 * np.dtype(dtype).itemsize
    magnitude = bits & ((1 << (width - 1)) - 1)
    return np.where(bits >> (width - 1), -magnitude, magnitude)


# Two sums of at most 2 m' rows, in another order and with exponentials off by an ulp or two, differ by some 2^-22 of
# the row's largest value. Norm, rope and Hadamard transform add errors of their own.
ROUNDING = 2e-6
# A change of 2^-22 moves a value to another code with a probability of about 2^-22 divided by the spacing of codes:
# once in 2^13 values of bf16, once in 2^18 of E4M3, and less often in E2M1. If a scale changes, so does its whole
# group.
MOVED = 1 / 500


def near_entries(case: Case, got: Any, want: Any, *, name: str) -> None:
    """Compare two sets of encoded rows (KVRows or KeyRows, leaves [rows, ...]) up to the rounding of sums."""
    for field in dataclasses.fields(want):
        a, b = getattr(got, field.name), getattr(want, field.name)
        label = f"{name}.{field.name}"
        if b is None:
            assert a is None, label
            continue
        if b.dtype == F32:
            largest = np.abs(b) if field.name == "scale" else np.abs(b).max(-1, keepdims=True)
            assert np.all(np.abs(a - b) <= ROUNDING * largest), f"{label}: off by {np.abs(a - b).max()}"
            continue
        if b.dtype == BF16:
            order = [code_order(x.view(np.uint16), BF16) for x in (a, b)]
            # Near 0, codes are closer together than the rounding error of a sum.
            small = np.abs(b.astype(F32)) < 2.0**-6 * np.abs(b.astype(F32)).max(-1, keepdims=True)
        elif label.endswith("codes"):  # two E2M1 codes to a byte
            order = [code_order(np.stack([x & 15, x >> 4]) << 4, np.uint8) >> 4 for x in (a, b)]
            small = np.zeros(order[0].shape, bool)
        else:  # E4M3 codes, or a scale byte
            order = [code_order(x, np.uint8) for x in (a, b)]
            small = np.zeros(b.shape, bool)
        step = np.abs(order[0] - order[1])
        moved = np.count_nonzero(step)
        assert np.all(step[~small] <= 1), f"{label}: a code moved by {step[~small].max()} steps"
        assert moved <= 4 + MOVED * step.size, f"{label}: {moved} of {step.size} codes moved"


def rows_at(tree: Any, where: np.ndarray) -> Any:
    """Select rows of layer ``LAYER`` where a mask over the next axes is True: [layers, ...] -> [rows, ...]."""
    return jax.tree.map(lambda leaf: leaf[LAYER][where], tree)


def assert_updated_alike(case: Case, batch: Batch, before: LayerStack, got: LayerStack, want: LayerStack) -> None:
    """Check that two updated stacks agree: byte for byte, except for new entries and running sums.

    Everything that the batch does not name must have its previous bytes.
    """
    before = jax.tree.map(np.asarray, before)
    slots = batch.slots[batch.live(case)]
    named = np.zeros(case.requests, bool)
    named[slots] = True

    # Window rows and positions.
    position = written_window(case, batch)
    stored = position >= 0
    for stack in (got, want):
        np.testing.assert_array_equal(stack.state.pos[LAYER][stored], position[stored])
    for part in ("window", "pos"):
        leaves = [jax.tree.leaves(getattr(stack.state, part)) for stack in (before, got, want)]
        for old, a, b in zip(*leaves, strict=True):
            same_bytes(part, a, b)
            same_bytes(f"{part}, other layers", np.delete(a, LAYER, 0), np.delete(old, LAYER, 0))
            same_bytes(f"{part}, other rows", a[LAYER][~stored], old[LAYER][~stored])

    # Tails.
    for part in ("tail", "indexer_tail"):
        old_tail, a_tail, b_tail = (getattr(stack.state, part) for stack in (before, got, want))
        if b_tail is None:
            assert a_tail is None
            continue
        for field in dataclasses.fields(b_tail):
            old, a, b = (getattr(tail, field.name) for tail in (old_tail, a_tail, b_tail))
            label = f"{part}.{field.name}"
            same_bytes(f"{label}, other layers", np.delete(a, LAYER, 0), np.delete(old, LAYER, 0))
            same_bytes(f"{label}, other requests", a[LAYER][~named], old[LAYER][~named])
            if isinstance(b_tail, HCAOnlineTail) and field.name != "peak":  # running sums
                a, b = a[LAYER, slots], b[LAYER, slots]
                # Terms of a weighted sum may cancel. Its error is relative to its largest terms.
                largest = np.abs(b) if field.name == "total" else np.abs(b).max(-1, keepdims=True)
                assert np.all(np.abs(a - b) <= ROUNDING * largest), f"{label}: off by {np.abs(a - b).max()}"
            else:
                same_bytes(label, a, b)

    # Pool.
    if want.pool is None:
        assert got.pool is None
        return
    written = written_entries(case, batch)
    for part in ("entries", "indexer_keys"):
        old_rows, a_rows, b_rows = (getattr(stack.pool, part) for stack in (before, got, want))
        if b_rows is None:
            assert a_rows is None
            continue
        for old, a, b in zip(*map(jax.tree.leaves, (old_rows, a_rows, b_rows)), strict=True):
            for leaf in (a, b):
                same_bytes(f"{part}, other layers", np.delete(leaf, LAYER, 0), np.delete(old, LAYER, 0))
                same_bytes(f"{part}, other rows", leaf[LAYER][~written], old[LAYER][~written])
        if written.any():
            near_entries(case, rows_at(a_rows, written), rows_at(b_rows, written), name=part)
