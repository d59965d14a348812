"""What can be captured of a pass and patched in it, by name.

Of a layer; the second axis of what a layer has twice is its sublayer, attention and then experts:

    streams    the streams after the layer                              [L, B, T, n, hidden]
    mixing     how each sublayer mixes the streams: ``Mixing``          [L, 2, B, T, ...]
    inputs     of each sublayer, after its norm                         [L, 2, B, T, hidden]
    outputs    of each sublayer, before they are added to the streams   [L, 2, B, T, hidden]
    entries    that the tokens complete: ``CompletedEntries``           by kind, [layers of it, B, E, ...]
    picks      entries that queries of CSA layers read                  int32 [CSA layers, B, T, K], -1 = none
    attention  outputs of the heads, before W_oa                        [L, B, T, H, head_dim]
    experts    that tokens go to, and their weights: ``Picks``          [L, B, T, k]

And of the whole pass, captured only, and of the head as if it were one more layer:

    choices    the experts and entries that it uses: ``Choices``
    head       what the product with the head takes                     [B, T, hidden]

"inputs.attention" is a name, too, for the attention's alone, [L, B, T, hidden]; and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Required, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsv4jax.cache.shards import DATA
from dsv4jax.checks import Named, Tree, check_type
from dsv4jax.config import layer_schedule
from dsv4jax.layer.stages.probe import Patch, Probe, Seen
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.inside.choices import Choices, choices_of_layer, record

SUBLAYERS = ("attention", "experts")
TWICE = ("mixing", "inputs", "outputs")
IN_ATTENTION = ("entries", "picks", "attention")
NAMES = ("streams", *TWICE, *IN_ATTENTION, "experts", "head", "choices")


class Patching(TypedDict, total=False):
    """What a pass is told to compute otherwise."""

    intervene: Mapping[str, Patch]  # name -> function(value, layer) -> value, inside jit
    choices: Choices | None  # used in place of choosing


class Looking(Patching, total=False):
    """The same, and what it captures."""

    capture: Required[Sequence[str]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelProbe:
    """What is captured, patched and chosen in a pass."""

    captures: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    patches: tuple[tuple[str, Patch], ...] = dataclasses.field(default=(), metadata={"static": True})
    choices: Choices | None = None

    @classmethod
    def of(
        cls,
        capture: Sequence[str] = (),
        intervene: Mapping[str, Patch] | None = None,
        choices: Choices | None = None,
        **unknown: object,
    ) -> ModelProbe:
        """Check the arguments of a pass.

        Raises:
          TypeError: there is no such argument.
          ValueError: a name is unknown, or a patch is no function, or none that can be a static argument.
        """
        if unknown:
            known = "beside its own arguments a pass takes capture, intervene and choices"
            raise TypeError(f"unexpected keyword argument {next(iter(unknown))!r}: {known}")
        if isinstance(capture, str) or not isinstance(capture, Iterable):
            example = capture if isinstance(capture, str) else "streams"
            raise ValueError(f"capture must be names, such as ({example!r},), got {capture!r}")
        capture = tuple(capture)
        intervene = {} if intervene is None else intervene
        check_type("intervene", intervene, Mapping)
        for argument, names in (("capture", capture), ("intervene", intervene)):
            for name in names:
                _check_name(argument, name)
        for name, patch in intervene.items():
            _check_patch(name, patch)
        if choices is not None and not isinstance(choices, Choices):
            raise ValueError(f"choices must be Choices, got {type(choices).__name__}")
        return cls(captures=capture, patches=tuple(intervene.items()), choices=choices)

    def without_cache(self) -> ModelProbe:
        """Return the same for a pass without a cache. ValueError where a name is of what such a pass does not have."""
        for argument, names in (("capture", self.captures), ("intervene", dict(self.patches))):
            for name in names:
                if name in (*IN_ATTENTION, "choices"):
                    raise ValueError(f"{argument}: {name!r} is of a pass over a cache, such as forward")
        return self

    @property
    def looks(self) -> bool:
        """Whether anything is captured, patched or chosen. Then each device computes all tokens of its requests."""
        return bool(self.captures or self.patches or self.choices is not None)

    def of_layer(self, layer: int, cfg: ModelConfig) -> Probe:
        """Return the probe of a layer; that of the head has the number after the last one."""
        captures = set(self.captures)
        if "choices" in captures:
            captures = captures - {"choices"} | {"experts", "picks"}
        experts = entries = None
        if self.choices is not None and layer < cfg.num_layers:
            experts, entries = choices_of_layer(self.choices, layer, cfg)
        return Probe(
            captures=frozenset(captures),
            patches=self.patches,
            layer=layer if self.patches else None,
            experts=experts,
            entries=entries,
        )

    def captured(self, seen: Sequence[Seen], cfg: ModelConfig, max_entries: int) -> Named:
        """Return what was captured by name: ``seen`` is that of each layer, and of the head."""
        return {name: _stacked(name, seen, cfg, max_entries) for name in self.captures}

    @property
    def specs(self) -> Named:
        """The specs over a mesh of what is captured. The axis of requests follows those of layer and sublayer."""
        return {name: P(*[None] * (0 if name == "head" else 2 if name in TWICE else 1), DATA) for name in self.captures}


NOTHING = ModelProbe()
CHOICES_SPEC = P(None, DATA)  # of what a probe is given


def _check_name(argument: str, name: str) -> None:
    check_type(f"a name in {argument}", name, str)
    family, _, sublayer = name.partition(".")
    if family not in NAMES or (sublayer and (family not in TWICE or sublayer not in SUBLAYERS)):
        raise ValueError(f"{argument}: {name!r} is none of {', '.join(NAMES)}; nor is it such as 'inputs.attention'")
    if argument == "intervene" and name == "choices":
        raise ValueError("intervene: choices are given as choices=, or patched as 'experts' and 'picks'")


def _check_patch(name: str, patch: object) -> None:
    found = type(patch).__name__
    if not callable(patch):
        raise ValueError(f"intervene[{name!r}] must be a function of (value, layer), got {found}")
    try:
        hash(patch)
    except TypeError:
        static = "because it is a static argument of the pass"
        raise ValueError(f"intervene[{name!r}] must be hashable, {static}; {found} is not") from None


def _stacked(name: str, seen: Sequence[Seen], cfg: ModelConfig, max_entries: int) -> Tree:
    *layers, of_head = seen
    if name == "head":
        return of_head[name]
    if name in TWICE:
        return _stack([_stack([of_layer[f"{name}.{sublayer}"] for sublayer in SUBLAYERS]) for of_layer in layers])
    if name == "picks":
        found = [of_layer[name] for of_layer in layers if name in of_layer]
        return _stack(found) if found else None
    if name == "choices":
        experts, picks = (_stacked(each, seen, cfg, max_entries) for each in ("experts", "picks"))
        return record(experts, picks, max_entries, cfg)
    if name == "entries":
        of_kinds: dict[str, list[Tree]] = {}
        for spec, of_layer in zip(layer_schedule(cfg.attention), layers, strict=True):
            if name in of_layer:
                of_kinds.setdefault(spec.attn.value, []).append(of_layer[name])
        return {kind: _stack(entries) for kind, entries in of_kinds.items()}
    return _stack([of_layer[name] for of_layer in layers])


def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@dataclasses.dataclass(frozen=True, slots=True)
class Taps:
    """The probe of a layer, and what it has seen."""

    probe: Probe
    seen: Seen = dataclasses.field(default_factory=dict)

    def tap[T](self, site: str, value: T) -> T:
        """Return what a pass goes on with at a site."""
        return self.probe.tap(site, value, self.seen)

    def sees(self, site: str) -> bool:
        return self.probe.sees(site)

    def patched(self, site: str) -> bool:
        return self.probe.patched(site)
