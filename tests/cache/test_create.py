"""An empty cache is made by one program, and can be donated."""

from typing import Any

import jax
import pytest

import dsv4jax as d4
from dsv4jax.cache.create import _empty_cache


@pytest.mark.parametrize("hca_tail", ["ring", "online"])
def test_an_empty_cache_can_be_donated(hca_tail):
    """Many of its leaves are equal, and one buffer in two leaves cannot be donated."""
    plan = d4.plan_cache(d4.DSV4Config.tiny(), max_requests=3, max_context=256, hca_tail=hca_tail)
    cache = d4.init_cache(plan)
    leaves = jax.tree.leaves(cache)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    jax.block_until_ready(jax.jit(lambda cache: cache, donate_argnums=0)(cache))
    assert all(leaf.is_deleted() for leaf in leaves)


def test_caches_of_one_plan_are_made_by_one_program():
    plan = d4.plan_cache(d4.DSV4Config.tiny(), max_requests=5, max_context=256)
    program: Any = _empty_cache
    before = program._cache_size()
    for _ in range(2):
        d4.init_cache(plan)
    assert program._cache_size() == before + 1
