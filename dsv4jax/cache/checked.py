"""A debug mode that raises where an ordinary program skips a row in silence.

Layers and ``advance`` skip rows that were not granted their tokens, so that a refused batch does no harm. A program
that forgets a call then computes zeros. Under ``checked`` such a row is an error that names the row, its slot, and the
call that is missing.

The checks are traced only under ``checked``. Ordinary programs do not contain them and cost the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import checkify

from dsv4jax.cache.stack import LayerStack, Stacks
from dsv4jax.cache.tables import Tables, granted_tokens, has_twin, is_admitted, is_asking

# Whether checks are traced. It is part of jit's cache key, so that a jitted function is traced anew under ``checked``.
_CHECKING = jax.make_user_context(False)


def checked[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Return the function in a debug mode, in which mistakes that are otherwise skipped in silence raise.

        step = d4.checked(step)    # a function under jit, or one that calls such functions
        y, cache = step(params, x, cache, slots, num_new)

    It is an error if a layer gets a row

    - whose tokens ``prepare_forward`` did not grant, because it was not called or refused the batch,
    - whose num_new exceeds T, or is negative,
    - whose slot is not admitted, or is named by another row too,
    - whose tokens this layer has stored already, so that ``advance`` is missing,

    or if ``advance`` gets a row that was not granted, or whose tokens some layer has not stored.

    A step that goes on as it is after a refusal does no harm in the ordinary mode and is an error here: let it go on
    with ``num_new = jnp.where(ok, num_new, 0)``.

    The function must be one that jit can trace. It is compiled once more, with checks inside its loops, branches and
    maps (``jax.experimental.checkify``), and each call waits for its result. Call the checked function outside of jit,
    or give it to ``checkify`` in turn. Where it uses ``jax.shard_map``, rows and slots are counted within a shard. Only
    these checks are made. ``checkify`` with ``index_checks`` cannot be used on a cache: it takes a write that JAX
    drops, as those of padding are, for an error.

    Raises:
      ValueError: ``function`` is none.
      jax.experimental.checkify.JaxRuntimeError: (a ValueError) the first mistake that a call makes.
    """
    if not callable(function):
        raise ValueError(f"checked: expected a function, got {function!r}")
    with_errors = checkify.checkify(function, errors=checkify.user_checks)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _CHECKING(True):
            error, result = with_errors(*args, **kwargs)
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(error)):
            error = jax.device_get(error)  # over explicit axes of a mesh JAX cannot look for the first one itself
        error.throw()
        return result

    return run


def check_layer(
    tables: Tables, stack: LayerStack, index: jax.Array | int, slots: jax.Array, num_new: jax.Array, num_tokens: int
) -> None:
    """Under ``checked``, check that a layer may store what the rows of a call with T tokens ask for.

    Args:
      tables: the cache's tables.
      stack: the layers of the layer's kind, before the call.
      index: the layer's index in its stack.
      slots, num_new: int32 [B].
      num_tokens: T.
    """
    check_fitting(slots, num_new, num_tokens)
    check_granted(tables, slots, num_new)
    if not _CHECKING.value:
        return
    start, count = granted_tokens(tables, slots, num_new)
    pos = stack.state.pos
    again = pos[index, slots, start % pos.shape[2]] == start
    _check_rows(
        ~again | (count == 0),
        "this layer has stored token {start} already: run each layer once, then call advance(cache, slots, num_new)",
        slots=slots,
        start=start,
    )


def check_advance(tables: Tables, stacks: Stacks, slots: jax.Array, num_new: jax.Array) -> None:
    """Under ``checked``, check that every layer has stored the tokens that ``advance`` is about to count.

    Args:
      tables: the cache's tables, before the call.
      stacks: the cache.
      slots, num_new: int32 [B].
    """
    check_granted(tables, slots, num_new)
    if not _CHECKING.value:
        return
    start, count = granted_tokens(tables, slots, num_new)
    last = start + count - 1
    for kind in stacks.kinds:
        pos = stacks.stack(kind).state.pos
        stored = pos[:, slots, last % pos.shape[2]] == last[None]
        layer = jnp.argmin(stored, axis=0)
        _check_rows(
            jnp.all(stored, axis=0) | (count == 0),
            "layer {layer} of the " + kind.upper() + " layers has not stored token {last}: run every layer between "
            "prepare_forward and advance",
            slots=slots,
            layer=layer,
            last=last,
        )


def check_granted(tables: Tables, slots: jax.Array, num_new: jax.Array) -> None:
    """Under ``checked``, check that all rows that ask for tokens were granted them."""
    if not _CHECKING.value:
        return
    asking = is_asking(slots, num_new)
    _, count = granted_tokens(tables, slots, num_new)
    granted = tables.prepared.at[slots].get(mode="clip") - tables.seq_lens.at[slots].get(mode="clip")
    _check_rows(~asking | (num_new > 0), "num_new is {num_new}", slots=slots, num_new=num_new)
    _check_rows(~asking | is_admitted(tables, slots), "the slot is not admitted: call admit first", slots=slots)
    _check_rows(~has_twin(slots, asking), "another row of the batch names the same slot", slots=slots)
    _check_rows(
        ~asking | (count > 0),
        "{granted} of its {num_new} tokens are granted: call prepare_forward(cache, slots, num_new) before the layers, "
        "and where its ok is False go on with num_new = jnp.where(ok, num_new, 0)",
        slots=slots,
        num_new=num_new,
        granted=granted,
    )


def check_fitting(slots: jax.Array, num_new: jax.Array, num_tokens: int) -> None:
    """Under ``checked``, check that no row of a call with T tokens names more."""
    if not _CHECKING.value:
        return
    mistake = f"of {{num_new}} tokens the call brings T = {num_tokens}, so that it stores none: give num_new at most T"
    _check_rows((num_new <= num_tokens) | (slots == -1), mistake, slots=slots, num_new=num_new)


def _check_rows(right: jax.Array, mistake: str, *, slots: jax.Array, **values: jax.Array) -> None:
    """Check that all rows are right, and name the first that is not. ``mistake`` has a field for each of the values."""
    if not slots.shape[0]:
        return
    row = jnp.argmin(right)
    at_row = {name: value[row] for name, value in values.items()}
    mistake = "row {row} (slot {slot}): " + mistake
    checkify.check(jnp.all(right), mistake, debug=False, row=row, slot=slots[row], **at_row)
