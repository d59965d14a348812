"""What is looked at in a pass, and what is changed in it: a value that is passed down to where things are computed.

A site is a place in a layer where something is computed, such as "streams" or "inputs.experts"; the name before its dot
covers it, too. A function that computes it calls ``tap`` there, and goes on with what that returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv4jax.checks import Tree, check_array
from dsv4jax.layer.indexer import PICKS

Patch = Callable[[Tree, int], Tree]  # (value, number of the layer) -> what the pass goes on with
Seen = dict[str, Tree]  # what was captured in a layer, by site


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is captured, patched and chosen in a layer. Of an empty one nothing is left when a pass is compiled."""

    captures: frozenset[str] = dataclasses.field(default=frozenset(), metadata={"static": True})
    patches: tuple[tuple[str, Patch], ...] = dataclasses.field(default=(), metadata={"static": True})
    # For patches. None where nothing is patched, so that all layers of a kind are traced once.
    layer: int | None = dataclasses.field(default=None, metadata={"static": True})
    experts: jax.Array | None = None  # int [B, T, k] to use in place of choosing, -1 = none
    entries: jax.Array | None = None  # int [B, T, K] the same, of entries that queries read

    def check_entries(self, x: jax.Array) -> None:
        """Require that entries, if any are chosen, are of the tokens of x [B, T, hidden]. AssertionError otherwise."""
        if self.entries is not None:
            check_array("chosen entries", self.entries, {"B": x.shape[0], "T": x.shape[1], "K": None}, PICKS)

    def within(self, *names: str) -> Probe:
        """Return the part that concerns the sites of these names, and nothing that was chosen."""
        patches = tuple(each for each in self.patches if each[0].split(".")[0] in names)
        return Probe(
            captures=frozenset(name for name in self.captures if name.split(".")[0] in names),
            patches=patches,
            layer=self.layer if patches else None,
        )

    def sees(self, *sites: str) -> bool:
        """Whether something is captured or patched at one of the sites."""
        return self.patched(*sites) or any(_covers(name, site) for name in self.captures for site in sites)

    def patched(self, *sites: str) -> bool:
        """Whether something is patched at one of the sites."""
        return any(_covers(name, site) for name, _ in self.patches for site in sites)

    def tap[T](self, site: str, value: T, seen: Seen) -> T:
        """Return what a pass goes on with at a site, and note it in ``seen`` if it is captured.

        Raises:
          ValueError: a patch returns something of another form.
        """
        for name, patch in self.patches:
            if _covers(name, site):
                assert self.layer is not None
                value = _checked(patch(value, self.layer), value, f"intervene[{name!r}], of layer {self.layer}")
        if any(_covers(name, site) for name in self.captures):
            seen[site] = value
        return value


NOTHING = Probe()


def _covers(name: str, site: str) -> bool:
    return name in (site, site.split(".")[0])


def _checked[T](new: T, old: T, name: str) -> T:
    """The new value, which must have the form of the old one."""
    wanted, given = (jax.tree.map(lambda leaf: _form(leaf), tree) for tree in (old, new))
    if wanted != given:
        raise ValueError(f"{name}: expected a value like the one it is given, {wanted}, got {given}")
    return jax.tree.map(jnp.asarray, new)


def _form(leaf: Tree) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
