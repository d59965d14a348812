"""The tables of ``prepare_forward``: in plain JAX, and by a kernel on GPUs that have one."""

from __future__ import annotations

import dataclasses
import functools

import jax

import pallas_kernels as pk
from dsv4jax.cache.tables import Tables, grow, has_twin, is_asking
from dsv4jax.checks import Tree, check_one_shard
from dsv4jax.plan import CachePlan
from pallas_kernels.language import target


def allocate(tables: Tables, slots: jax.Array, num_new: jax.Array, plan: CachePlan) -> tuple[Tables, jax.Array]:
    """Do what ``tables.grow`` describes: on a GPU with kernels in one launch, where XLA needs ten."""
    rows = slots.shape[0]
    is_served = isinstance(rows, int) and pk.unsupported_grants(rows=rows) is None and tables.block_refs.size
    if not is_served or target.unsupported() is not None:
        return grow(tables, slots, num_new, plan)

    @jax.custom_batching.custom_vmap
    def granted(tables: Tables, slots: jax.Array, num_new: jax.Array) -> tuple[Tables, jax.Array]:
        return grow_by_kernel(tables, slots, num_new, plan)

    @granted.def_vmap
    def _(axis_size: int, is_mapped: Tree, *args: Tree) -> Tree:  # kernels cannot be mapped
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, tuple(is_mapped))
        result = jax.vmap(functools.partial(grow, plan=plan), in_axes=axes, axis_size=axis_size)(*args)
        return result, jax.tree.map(lambda _: True, result)

    return granted(tables, slots, num_new)


def grow_by_kernel(
    tables: Tables, slots: jax.Array, num_new: jax.Array, plan: CachePlan, *, simulate: bool = False
) -> tuple[Tables, jax.Array]:
    """Do what ``tables.grow`` describes in one launch, in place if the caller's jit donates the tables."""
    check_one_shard(tables.num_free, "prepare_forward")
    asked = pk.Asked(
        slots=slots,
        num_new=num_new,
        shared=has_twin(slots, is_asking(slots, num_new)),  # which layers ask too: XLA computes it once for all
        admitted=tables.admitted,
        seq_lens=tables.seq_lens,
        free_blocks=tables.free_blocks,
    )
    held = pk.Grants(
        prepared=tables.prepared,
        block_table=tables.block_table,
        block_lens=tables.block_lens,
        block_refs=tables.block_refs,
        num_free=tables.num_free,
    )
    ratio = plan.min_ratio
    per_page = plan.cfg.block_tokens // ratio if ratio else 1
    sizes = pk.PageSizes(max_context=plan.max_context, ratio=ratio, per_page=per_page)
    held, ok = pk.grant_tokens(asked, held, sizes, simulate=simulate)
    changed = {field.name: getattr(held, field.name) for field in dataclasses.fields(held)}
    return dataclasses.replace(tables, **changed), ok.reshape(())
