"""The tails that the cache update supports. To add a kind of layer, write a module like ``csa`` and list it here."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.update.csa import CSAUpdate
from pallas_kernels.update.hca import HCAOnlineUpdate, HCARingUpdate
from pallas_kernels.update.tail_update import TailUpdate

TAIL_UPDATES: tuple[type[TailUpdate], ...] = (CSAUpdate, HCARingUpdate, HCAOnlineUpdate)


def update_of(tail: Any) -> type[TailUpdate]:
    """Return the update that serves a tail, given as a pytree of arrays or buffers.

    Raises:
      ValueError: no update serves a tail with these leaves.
    """
    names = {jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(tail)}
    for update in TAIL_UPDATES:
        if names == set(update.leaves):
            return update
    known = " or ".join(str(update.leaves) for update in TAIL_UPDATES)
    raise ValueError(f"a tail must have the leaves {known}, got {tuple(sorted(names))}")
