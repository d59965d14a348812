"""The kernel that allocates pages, compared with the XLA form on both machines, all tables whole."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.allocation import grow_by_kernel
from dsv4jax.cache.tables import Tables, grow
from tests.support.cases import first_of
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)
TINY = d4.DSV4Config.tiny()
# Jitted once, so that calls of the same plan share a program.
GROW = jax.jit(grow, static_argnames="plan")
GROW_BY_KERNEL = jax.jit(grow_by_kernel, static_argnames=("plan", "simulate"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A cache with requests of many lengths, and a batch that asks for tokens."""

    requests: int
    batch: int
    most: int  # tokens that a row asks for
    context: int = 512
    blocks: int = 64
    ratios: tuple[int, ...] = (0, 4, 128)
    seed: int = 0

    @property
    def plan(self) -> d4.CachePlan:
        cfg = dataclasses.replace(TINY, compress_ratios=self.ratios)
        return d4.plan_cache(cfg, max_requests=self.requests, max_context=self.context, num_blocks=self.blocks)

    def draw(self) -> tuple[Tables, jax.Array, jax.Array]:
        """Tables in which half of the requests hold something; each row asks for another request, some for none."""
        rng, plan = np.random.default_rng(self.seed), self.plan
        tables = d4.init_cache(plan).tables
        slots = rng.permutation(self.requests).astype(np.int32)
        admitted = np.zeros(self.requests, bool)
        admitted[slots[: self.batch]] = True
        tables = dataclasses.replace(
            tables,
            admitted=jnp.asarray(admitted),
            free_blocks=jnp.asarray(rng.permutation(plan.num_blocks), jnp.int32),
        )
        half = jnp.asarray(slots[: self.batch // 2])
        lengths = jnp.asarray(rng.integers(1, self.context // 4, half.size), jnp.int32)
        tables, ok = GROW(tables, half, lengths, plan=plan)
        assert ok or not half.size
        tables = dataclasses.replace(tables, seq_lens=tables.seq_lens.at[half].set(lengths))
        asked, num_new = slots[: self.batch].copy(), rng.integers(1, self.most + 1, self.batch).astype(np.int32)
        num_new[rng.random(self.batch) < 0.2] = 0
        asked[rng.random(self.batch) < 0.1] = -1
        return tables, jnp.asarray(asked), jnp.asarray(num_new)


def check(case: Case, given: tuple[Tables, jax.Array, jax.Array], *, simulate: bool) -> bool:
    """Compare with XLA. Returns whether the batch was granted."""
    want = GROW(*given, plan=case.plan)
    got = GROW_BY_KERNEL(*given, plan=case.plan, simulate=simulate)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))
    return bool(got[1])


CASES = {
    "decode": Case(requests=9, batch=7, most=1, blocks=200),
    "a chunk of one request": Case(requests=1, batch=1, most=500),
    "many requests": Case(requests=1000, batch=900, most=70, blocks=9000, seed=1),
    "windows alone": Case(requests=4, batch=3, most=9, ratios=(0,)),
    "full blocks": Case(requests=40, batch=40, most=300, blocks=2000, seed=2),
}


@machines
@pytest.mark.parametrize("case", first_of(CASES.values(), count=2), ids=list(CASES))
def test_grants_are_those_of_the_xla_form(case, simulate):
    tables, slots, num_new = case.draw()
    assert check(case, (tables, slots, num_new), simulate=simulate)


@machines
@pytest.mark.parametrize(
    "fault",
    first_of(["too few blocks", "too long", "overflow", "twice", "not admitted", "out of range", "negative"], count=3),
)
def test_a_batch_is_granted_whole_or_not_at_all(fault, simulate):
    case = Case(requests=9, batch=7, most=3, blocks=60)
    tables, slots, num_new = case.draw()
    num_new = num_new.at[:3].set(2)
    slots = jnp.asarray(np.flatnonzero(tables.admitted)[:7], jnp.int32)
    assert check(case, (tables, slots, num_new), simulate=simulate)
    if fault == "too few blocks":
        tables = dataclasses.replace(tables, num_free=jnp.asarray([1], jnp.int32))
        num_new = num_new.at[2].set(300)
    elif fault in ("too long", "overflow", "negative"):
        num_new = num_new.at[2].set({"too long": case.context + 1, "overflow": 2**31 - 1, "negative": -5}[fault])
    else:
        other = {"twice": slots[0], "not admitted": np.flatnonzero(~tables.admitted)[0], "out of range": 9}[fault]
        slots = slots.at[2].set(int(other))
    assert not check(case, (tables, slots, num_new), simulate=simulate)


def test_a_batch_that_is_too_large_is_refused():
    case = Case(requests=4, batch=4, most=1)
    tables, _, _ = case.draw()
    many = jnp.full(1025, -1, jnp.int32)
    with pytest.raises(ValueError, match="a batch may have 1 to 1024 rows, got 1025"):
        grow_by_kernel(tables, many, many, case.plan, simulate=True)
