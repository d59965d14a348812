"""Low-rank deltas on a model's weights: adding, taking off, merging. ``dsv4jax.weights.deltas`` has their products.

params = with_deltas(params, {"q_b": 8, "experts": 4}, key)
deltas, rest = partition(params, "deltas")                      # what an optimiser takes, and what it does not
grads = jax.grad(lambda deltas: loss(combine(deltas, rest)))(deltas)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv4jax.cache.shards import placed
from dsv4jax.checks import FLOATS, Tree, check_dtype, check_key, check_type, integer, real
from dsv4jax.config import layer_kind
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.inside.devices import place_of
from dsv4jax.model.params import ModelParams, StoredExperts, check_model
from dsv4jax.weights.deltas import Delta, has_delta, split_delta, with_delta
from dsv4jax.weights.load import NAMINGS
from dsv4jax.weights.params import COMPRESS, named_shapes
from dsv4jax.weights.stored import StoredWeight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A linear weight that can have a delta: some rows of a weight of the model."""

    name: str  # as ``with_deltas`` takes it
    layer: int | None  # None for the head
    path: tuple[str | int, ...]  # of the weight in ModelParams
    first: int  # row of that weight at which it begins
    shape: tuple[int, ...]  # (rows, in), or (E, rows, in)
    module: str  # its name in transformers' model, after "model.layers.N." if it is of a layer

    @property
    def full_module(self) -> str:
        return self.module if self.layer is None else f"model.layers.{self.layer}.{self.module}"

    def is_of(self, name: str) -> bool:
        """Whether a name stands for this target: its own, or its first parts, such as "experts"."""
        return self.name == name or self.name.startswith(f"{name}.")


@functools.cache
def targets_of(cfg: ModelConfig) -> tuple[Target, ...]:
    """Return all linear weights of a model that can have a delta, those of the block for drafts aside."""
    head = Target(
        name="head",
        layer=None,
        path=("head",),
        first=0,
        shape=(cfg.vocab_size, cfg.hidden_size),
        module="lm_head",
    )
    return (*(target for layer in range(cfg.num_layers) for target in _targets_of_layer(cfg, layer)), head)


# The weights of a block that have linear weights of a checkpoint side by side, or one alone.
_ATTENTION = {
    "q_a_kv": ("q_a", "kv"),
    "q_b": ("q_b",),
    "o_a": ("o_a",),
    "o_b": ("o_b",),
    "compress": COMPRESS,
    "index_q_b": ("indexer.q_b",),
}


def _targets_of_layer(cfg: ModelConfig, layer: int) -> list[Target]:
    h, wide, experts = cfg.hidden_size, cfg.expert_width, cfg.num_experts
    shapes = named_shapes(cfg.attention, layer_kind(cfg.attention, layer))
    parts = [
        (
            ("attention", field),
            [(name, shapes[name], f"self_attn.{NAMINGS['hf'][name]}") for name in names if name in shapes],
        )
        for field, names in _ATTENTION.items()
    ]
    shared, routed = "mlp.shared_experts", "mlp.experts"
    gate_up = [("gate", (wide, h), f"{shared}.gate_proj"), ("up", (wide, h), f"{shared}.up_proj")]
    parts += [
        (("router", "gate"), [("router", (experts, h), "mlp.gate")]),
        (("experts", "gate_up"), [("experts.gate_up", (experts, 2 * wide, h), f"{routed}.gate_up_proj")]),
        (("experts", "down"), [("experts.down", (experts, h, wide), f"{routed}.down_proj")]),
        (("experts", "shared_gate_up"), [(f"shared_experts.{name}", *rest) for name, *rest in gate_up]),
        (("experts", "shared_down"), [("shared_experts.down", (h, wide), f"{shared}.down_proj")]),
    ]
    found = []
    for path, of_weight in parts:
        first = 0
        for name, shape, module in of_weight:
            found.append(
                Target(
                    name=name,
                    layer=layer,
                    path=("blocks", layer, *path),
                    first=first,
                    shape=shape,
                    module=module.removesuffix(".weight"),
                )
            )
            first += shape[-2]
    return found


def with_deltas(
    params: ModelParams,
    ranks: Mapping[str, int],
    key: jax.Array,
    alpha: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> ModelParams:
    """Return a model whose weights have low-rank deltas beside them, which add nothing yet.

    ``x W'`` becomes ``x W' + alpha / rank (x down') up'`` in every pass, cached or not, whatever the backend. The
    weights themselves are shared with ``params``, and stay as they are: FP8, FP4 or wide. ``partition(params,
    "deltas")`` gives what is to be trained.

    Args:
      params: the model's weights, which may have deltas on other weights.
      ranks: the rank by a weight's name, in all layers that have one: "q_a", "q_b", "kv", "o_a", "o_b",
        "compressor.kv", "compressor.gate", "indexer.q_b", "indexer.head_weights", "indexer.compressor.kv",
        "indexer.compressor.gate", "router", "experts.gate_up", "experts.down" (a delta for every expert),
        "shared_experts.gate", "shared_experts.up", "shared_experts.down", "head". The first parts of a name stand for
        all that begin with them: "compressor", "indexer", "experts", "shared_experts".
      key: a random key. ``down`` is drawn as PEFT draws it, uniform within 1 / sqrt(in); ``up`` is 0.
      alpha: the factor of all these deltas is alpha / rank; None = 1.
      dtype: of the factors, f32 or bf16.

    Raises:
      ValueError: no weight has that name, a rank is not positive, the key is none, or a weight has a delta already.
    """
    check_type("params", params, ModelParams)
    check_dtype("dtype", dtype, FLOATS)
    check_key(key)
    given: dict[Target, Delta] = {}
    for number, (target, rank) in enumerate(ranks_of(params.cfg, ranks).items()):
        *lead, rows, inputs = target.shape
        bound = inputs**-0.5
        down = jax.random.uniform(jax.random.fold_in(key, number), (*lead, rank, inputs), dtype, -bound, bound)
        scale = rank if alpha is None else real("alpha", alpha)
        given[target] = Delta(
            down=down, up=jnp.zeros((*lead, rows, rank), dtype), first=target.first, alpha=float(scale)
        )
    return add_deltas(params, given)


def ranks_of(cfg: ModelConfig, ranks: Mapping[str, int]) -> dict[Target, int]:
    """Return the rank of each target that the names of ``with_deltas`` stand for.

    Raises ValueError where a name stands for none, or two for the same, or a rank is not positive.
    """
    check_type("ranks", ranks, Mapping)
    found: dict[Target, int] = {}
    for name, rank in ranks.items():
        rank = integer(f"ranks[{name!r}]", rank, 1)
        targets = [target for target in targets_of(cfg) if target.is_of(name)]
        if not targets:
            known = list(dict.fromkeys(target.name for target in targets_of(cfg)))
            raise ValueError(f"ranks: no weight of this model is named {name!r}; known are {known}")
        if twice := [target.name for target in targets if target in found]:
            raise ValueError(f"ranks: {name!r} stands for {twice[0]!r}, which another name gives a rank already")
        found |= dict.fromkeys(targets, rank)
    return found


def add_deltas(params: ModelParams, deltas: Mapping[Target, Delta]) -> ModelParams:
    """Return a model with these deltas. ValueError where a target has one already."""
    taken = deltas_of(params)
    for target, delta in deltas.items():
        if target in taken:
            raise ValueError(f"{target.full_module} has a delta already: merge_deltas or without_deltas first")
        name = ".".join(map(str, target.path))
        up, down = (
            placed(leaf, params.mesh, place_of(f"{name}.deltas.0.{factor}"))
            for factor, leaf in (("up", delta.up), ("down", delta.down))
        )
        delta = dataclasses.replace(delta, up=up, down=down)
        params = _replaced(params, target.path, with_delta(_at(params, target.path), [delta]))
    check_model(params)
    return params


def deltas_of(params: ModelParams) -> dict[Target, Delta]:
    """Return the deltas of a model by the weight that they are for."""
    found: dict[Target, Delta] = {}
    for target in targets_of(params.cfg):
        for delta in split_delta(_at(params, target.path))[1]:
            if delta.first == target.first:
                found[target] = delta
    return found


def without_deltas[T](params: T) -> T:
    """Return the weights without deltas, as they were before. Any tree that holds weights may be given."""
    return jax.tree.map(lambda node: split_delta(node)[0], params, is_leaf=has_delta)


def merge_deltas[T](params: T, widen: DTypeLike | None = None) -> T:
    """Return the weights with their deltas added to them: weight + alpha / rank * up @ down, rounded once.

    A weight that is f32 or bf16 keeps its dtype. One that is stored as FP8 or FP4 cannot hold the sum: it becomes an
    array of ``widen``, all experts of a layer included, which takes up to 4 times (f32: 8 times) the memory.

    Args:
      params: the weights of a model, or any tree that holds weights.
      widen: dtype of merged weights that were stored, f32 or bf16; None refuses to merge into them.

    Raises:
      ValueError: a stored weight has a delta, and ``widen`` is None; the message names it.
    """
    if widen is not None:
        check_dtype("widen", widen, FLOATS)

    def merged(path: jax.tree_util.KeyPath, node: Tree) -> Tree:
        base, deltas = split_delta(node)
        if not deltas:
            return base
        if isinstance(base, StoredWeight | StoredExperts):
            if widen is None:
                name = jax.tree_util.keystr(path).removeprefix(".")
                form = "FP4" if isinstance(base, StoredExperts) and base.is_fp4 else "FP8"
                remedy = "give widen=jnp.bfloat16 or jnp.float32 to make it wide, or leave its delta beside it"
                raise ValueError(f"{name} is stored as {form}, which cannot hold the sum: {remedy}")
            base = wide_form(base, widen)
        return node.merged(base)

    return jax.tree_util.tree_map_with_path(merged, params, is_leaf=has_delta)


def wide_form(weight: StoredWeight | StoredExperts, dtype: DTypeLike) -> jax.Array:
    """Return a stored weight as one array, of all experts if it is theirs."""
    if isinstance(weight, StoredExperts):
        return weight.widened(jnp.arange(weight.shape[0], dtype=jnp.int32), dtype)
    return weight.widened(dtype)


def numbers_of(cfg: ModelConfig, ranks: Mapping[str, int]) -> int:
    """Return how many numbers the deltas of these ranks have."""
    return sum(
        math.prod(target.shape[:-2]) * rank * sum(target.shape[-2:]) for target, rank in ranks_of(cfg, ranks).items()
    )


def _at(tree: Tree, path: tuple[str | int, ...]) -> Tree:
    for step in path:
        tree = tree[step] if isinstance(step, int) else getattr(tree, step)
    return tree


def _replaced(tree: Tree, path: tuple[str | int, ...], value: Tree) -> Tree:
    if not path:
        return value
    step, *rest = path
    if isinstance(step, int):
        return (*tree[:step], _replaced(tree[step], tuple(rest), value), *tree[step + 1 :])
    return dataclasses.replace(tree, **{step: _replaced(getattr(tree, step), tuple(rest), value)})
