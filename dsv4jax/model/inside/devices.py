"""A model on several devices: where each weight lives, and what devices send to one another.

A mesh has two axes. Requests are divided over ``data``; the devices of ``model`` hold the same requests. Attention and
all else that is not in ``PLACES`` is computed where the tokens are, with weights that every device holds. The routed
experts are divided over all devices by their number, embedding and head by vocabulary.

Of a long chunk, the devices of ``model`` have a share of each request's tokens each: its streams, and the queries of
its attention. What tokens contribute to the cache, and the router's picks, are computed for all of them everywhere.

What is sent, and nothing else is:

    gather_tokens      ids and counts of all requests, once a pass          over data
    sum_of_embedding   rows of the embedding, once a pass                   over both
    gather_inputs      what experts take, in each layer; and the head's     over data
    gather_chunk       what each sublayer takes of a long chunk             over model
    gather_outputs     those of each pick, of few tokens, in each layer     over model, if data = 1
    sum_of_experts     the outputs of experts otherwise, in each layer      over both
    gather_logits      once a pass                                          over both
    any_of             flags, once a pass of the loop that generates        over data

On one shard of requests, ``data`` = 1, what is over data costs nothing, and one gather or sum of a layer remains, or of
a long chunk two gathers and a sum. On one device of each shard, ``model`` = 1, there is a gather before experts and a
sum after them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.shards import DATA, EVERYWHERE, MODEL, automatic, check_rows, is_inside, over_mesh
from dsv4jax.checks import Tree
from dsv4jax.layer.tiles import own_share
from dsv4jax.model.config import ModelConfig

_ALL = (MODEL, DATA)  # in this order the logits of a shard's requests come out in the vocabulary's order
EXPERTS_PLACE = P(_ALL)
MOST_GATHERED = 1 << 19  # bytes of picks' outputs, up to which little but latency is sent
SHARE = 128  # tokens of a request that kernels multiply and round together: a device's share is a multiple of it
# Where each weight lives, by the end of its name, and its low-rank deltas. What has no place here is on every device.
PLACES = (
    (re.compile(r"(^|\.)(embedding|head)(\.base|\.deltas\.\d+\.up)?$"), P(_ALL)),  # [V, ...]
    (re.compile(r"(^|\.)experts\.(gate_up|down)(\.\w+)*$"), EXPERTS_PLACE),  # [E, ...]
)


def weight_specs(tree: Tree, mesh: Mesh | None = None) -> Tree:
    """Return the place of each leaf of a model's weights, or of a part of them under the same names.

    They are ``PartitionSpec``; or with a mesh, ``NamedSharding``.
    """

    def place(path: jax.tree_util.KeyPath, _: object) -> Tree:
        spec = place_of(jax.tree_util.keystr(path, simple=True, separator="."))
        return spec if mesh is None else NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def place_of(name: str) -> P:
    """Return the place of a weight by its name in a model's, such as "blocks.3.experts.down.codes"."""
    return next((spec for pattern, spec in PLACES if pattern.search(name)), EVERYWHERE)


def run_on_devices[**A, R](
    step: Callable[A, R],
    mesh: Mesh | None,
    cache: KVCache,
    rows: int,
    specs: Callable[[], tuple[Tree, Tree]],
) -> Callable[A, R]:
    """Return a function of whole arrays that computes a step on the devices of the weights' mesh, each its part.

    It is the step itself on one device, and for a caller that is inside ``jax.shard_map``. ``specs`` returns those of
    what it takes and of what it returns.

    Raises:
      ValueError: weights and cache do not lie over the same mesh, or rows do not divide by its shards of requests, or
        there are none.
    """
    check_meshes(mesh, cache)
    if mesh is None or is_inside(mesh):
        return step
    check_rows(rows, mesh)
    if rows == 0:
        raise ValueError("a batch of 0 rows has nothing to divide over a mesh: give each shard a row of slot -1")
    return over_mesh(mesh, step, *specs())


def check_meshes(mesh: Mesh | None, cache: KVCache) -> None:
    """Require that a cache lies over the mesh of the weights. Raises ValueError."""
    check_cache("a model's forward pass", cache)
    if cache.mesh != mesh:
        raise ValueError(
            f"the weights lie over {_said(mesh)}, the cache over {_said(cache.mesh)}: make it by "
            "init_caches(..., mesh=params.mesh)"
        )


def _said(mesh: Mesh | None) -> str:
    return "one device" if mesh is None else f"the mesh {dict(mesh.shape)}"


def model_mesh(mesh: Mesh, cfg: ModelConfig) -> Mesh:
    """Return a mesh as a model keeps it.

    Raises:
      ValueError: the axes are others than "data" and "model", or experts or vocabulary do not divide by the devices.
    """
    mesh = automatic(mesh)
    for name in ("num_experts", "vocab_size"):
        if (count := getattr(cfg, name)) % mesh.size:
            raise ValueError(
                f"{name}={count} must be divisible by the {mesh.size} devices of the mesh {dict(mesh.shape)}"
            )
    return mesh


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """The devices that compute a pass together, as one of them sees it inside ``jax.shard_map``.

    Without a mesh it is one device, and what is sent is what is given.
    """

    mesh: Mesh | None = None
    # Whether each device of ``model`` has a share of the tokens of a request, [B, T / model, ...] of [B, T, ...].
    has_share: bool = False

    @classmethod
    def of(cls, mesh: Mesh | None) -> Devices:
        """Return the devices of weights that lie over a mesh; one if the caller sees all of them as whole arrays."""
        return cls(mesh if mesh is not None and is_inside(mesh) else None)

    def of_chunk(self, tokens: int) -> Devices:
        """Return the devices as they compute so many tokens of each request: with a share each, of long chunks."""
        return dataclasses.replace(self, has_share=self.model > 1 and tokens % (self.model * SHARE) == 0)

    @property
    def token_axis(self) -> str | None:
        """The axis over which tokens are divided."""
        return MODEL if self.has_share else None

    @property
    def data(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @property
    def model(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape[MODEL]

    @property
    def count(self) -> int:
        return self.data * self.model

    def first(self, count: int) -> jax.Array | int:
        """Return the number of the first of this device's share of ``count`` experts or tokens of the vocabulary."""
        if self.count == 1:
            return 0
        return (lax.axis_index(MODEL) * self.data + lax.axis_index(DATA)) * (count // self.count)

    def own_experts(self, count: int) -> pk.OwnExperts | None:
        """Return which of ``count`` experts this device has; None for all."""
        if self.count == 1:
            return None
        return pk.OwnExperts(first=jnp.reshape(self.first(count), 1), count=count // self.count)

    def own_rows[T](self, tree: T) -> T:
        """Cut the rows of this device's requests from those of all."""
        return own_share(tree, DATA if self.data > 1 else None, 0)

    def own_tokens[T](self, tree: T) -> T:
        """Cut this device's tokens from all of its requests."""
        return own_share(tree, self.token_axis, 1)

    def gather_tokens(self, ids: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return ids int32 [B, T] and counts int32 [B] of all requests."""
        if self.data == 1:
            return ids, count
        both = _gather(jnp.concatenate([ids, count[:, None]], axis=1))
        return both[:, :-1], both[:, -1]

    def gather_inputs[T](self, tree: T) -> T:
        """Return arrays [B, ...] of all requests from those of each shard, [B / data, ...]."""
        return tree if self.data == 1 else jax.tree.map(_gather, tree)

    def gather_chunk(self, x: jax.Array) -> jax.Array:
        """Return x [B, T, ...] of all tokens from that of each device's own."""
        return lax.all_gather(x, MODEL, axis=1, tiled=True) if self.has_share else x

    def sum_of_embedding(self, rows: jax.Array) -> jax.Array:
        """Add up rows [B, T, h] that each device has found for all requests: those of its own. All but one are 0."""
        return self._sum(rows)

    def gather_outputs(self, outputs: jax.Array) -> jax.Array:
        """Return the outputs of all devices [model, ...] from those of this one. There is one shard of requests."""
        return lax.all_gather(outputs, MODEL)

    def sum_of_experts(self, outputs: jax.Array) -> jax.Array:
        """Add up what each device's experts give all requests, f32 [B, T, h]: that of this device's own tokens.

        Each device has summed its own experts' outputs in the order of their numbers.
        """
        return self._sum(outputs)

    def gather_logits(self, logits: jax.Array) -> jax.Array:
        """Return logits [B / data, ..., V] from those of each device's share of the vocabulary, [B, ..., V / all]."""
        if self.data > 1:
            logits = lax.all_to_all(logits, DATA, split_axis=0, concat_axis=logits.ndim - 1, tiled=True)
        if self.model > 1:
            logits = lax.all_gather(logits, MODEL, axis=logits.ndim - 1, tiled=True)
        return logits

    def any_of(self, *flags: jax.Array) -> list[jax.Array]:
        """Return, for each flag bool [], whether it is set on any shard of requests."""
        if self.data == 1:
            return list(flags)
        return list(lax.pmax(jnp.stack(flags).astype(jnp.int32), DATA) > 0)

    def _sum(self, rows: jax.Array) -> jax.Array:
        if self.data > 1:
            rows = lax.psum_scatter(rows, DATA, scatter_dimension=0, tiled=True)
        if self.has_share:
            return lax.psum_scatter(rows, MODEL, scatter_dimension=1, tiled=True)
        return lax.psum(rows, MODEL) if self.model > 1 else rows


ONE = Devices()


def gathers_outputs(data: int, model: int, size: int) -> bool:
    """Return whether devices of a mesh gather the outputs of picks, of which each has so many bytes.

    They are added up in the order of one device then, and no device adds them up before.
    """
    return data == 1 and model * size <= MOST_GATHERED


def _gather(rows: jax.Array) -> jax.Array:
    return lax.all_gather(rows, DATA, tiled=True)
