"""What a batch is granted row by row, and why a row is refused. ``prepare_forward`` grants all rows or none."""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.allocation import allocate
from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.shards import is_spread, on_shards
from dsv4jax.cache.tables import Needs, has_twin, is_admitted
from dsv4jax.checks import check_batch, check_one_shard
from dsv4jax.reprs import compact, values_of


class Refusal(enum.IntEnum):
    """Why a row of a batch is granted nothing. If several reasons hold, the first of them is given."""

    NONE = 0  # the row is granted its tokens
    PADDING = 1  # it asks for nothing: its slot is -1, or num_new is 0
    NEGATIVE = 2  # num_new is below 0
    NOT_ADMITTED = 3  # its slot is free, or there is no such slot
    TWIN = 4  # another row that asks for tokens names the same slot
    TOO_LONG = 5  # the request would become longer than the plan's ``max_context``
    NO_BLOCKS = 6  # too few blocks are left after those of earlier rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Grants:
    """What ``prepare_rows`` grants each row of a batch."""

    refusal: jax.Array  # int32 [B] a ``Refusal``; 0 if the row is granted its tokens
    missing_blocks: jax.Array  # int32 [B] blocks that the row must be given; 0 where it is refused for another reason
    free_blocks: jax.Array  # int32 [] blocks that are free before the call; of a cache with a mesh int32 [shards]

    def __repr__(self) -> str:
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return compact(self, **values_of(**arrays))

    @property
    def granted(self) -> jax.Array:
        """Which rows are granted their tokens, bool [B]. Rows that ask for nothing are not."""
        return self.refusal == Refusal.NONE

    @property
    def ok(self) -> jax.Array:
        """Whether no row is refused, so that ``prepare_forward`` would grant the whole batch. bool [], or [shards]."""
        rows = self.refusal.reshape(*self.free_blocks.shape, -1)
        return jnp.all(rows <= Refusal.PADDING, axis=-1)


@jax.jit
def explain_forward(cache: KVCache, slots: jax.Array, num_new: jax.Array) -> Grants:
    """Say what ``prepare_rows`` would grant, and why it would refuse the other rows. Changes nothing.

    The arguments and errors are those of ``prepare_forward``. ``.ok`` of the result is what ``prepare_forward`` would
    return.
    """
    check_cache("explain_forward", cache)
    check_batch(slots=slots, num_new=num_new)
    if is_spread(cache):
        return on_shards(lambda cache, *rows: (cache, explain_forward(cache, *rows)), cache, (slots, num_new), 1)[1]
    tables = cache.tables
    check_one_shard(tables.num_free, "explain_forward")
    needs = Needs.of(tables, slots, num_new, cache.plan)
    fits = needs.legal & needs.fits
    free = tables.num_free[0]
    reasons = {
        Refusal.PADDING: ~needs.asking,
        Refusal.NEGATIVE: num_new < 0,
        Refusal.NOT_ADMITTED: ~is_admitted(tables, slots),
        Refusal.TWIN: has_twin(slots, needs.asking),
        Refusal.TOO_LONG: ~needs.fits,
        Refusal.NO_BLOCKS: ~_first_come(needs.missing, fits, free),
    }
    refusal = jnp.select(list(reasons.values()), [jnp.int32(reason) for reason in reasons], jnp.int32(Refusal.NONE))
    return Grants(refusal=refusal, missing_blocks=needs.missing, free_blocks=free)


@jax.jit
def prepare_rows(cache: KVCache, slots: jax.Array, num_new: jax.Array) -> tuple[KVCache, jax.Array]:
    """Do what ``prepare_forward`` does, but refuse single rows instead of the batch.

    Rows are served in order: each is granted its tokens if it is valid and the blocks that earlier rows have left are
    enough. So put the rows first that must not wait. Go on with ``num_new = jnp.where(granted, num_new, 0)``: a refused
    row may still hold an earlier grant that ``advance`` has not used.

    The arguments and errors are those of ``prepare_forward``.

    Returns:
      (cache, granted bool [B]), False for rows that are refused and for those that ask for nothing.
      ``explain_forward`` of the same arguments says why.
    """
    check_cache("prepare_rows", cache)
    check_batch(slots=slots, num_new=num_new)
    if is_spread(cache):
        return on_shards(prepare_rows, cache, (slots, num_new), 1)
    granted = explain_forward(cache, slots, num_new).granted
    tables, _ = allocate(cache.tables, slots, jnp.where(granted, num_new, 0), cache.plan)
    return dataclasses.replace(cache, tables=tables), granted


def _first_come(missing: jax.Array, asking: jax.Array, free: jax.Array) -> jax.Array:
    """Return which asking rows get their missing blocks int32 [B], if each takes them where enough are left. bool [B].

    One turn of the loop settles all rows before the first that gets none, and refuses every later row that needs more
    than is left there. So decode, where a row needs a block at most, takes one turn, and a batch that fits takes none.
    """

    def taken(served: jax.Array) -> jax.Array:
        return jnp.cumsum(jnp.where(served, missing, 0), dtype=jnp.int32)

    def turn(served: jax.Array) -> jax.Array:
        after = taken(served)
        late = after > free
        left = free - jnp.max(jnp.where(late, 0, after), initial=0)
        return served & ~(late & (missing > left))

    return lax.while_loop(lambda served: jnp.any(taken(served) > free), turn, asking)
