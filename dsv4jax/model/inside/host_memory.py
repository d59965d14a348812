"""Routed experts in the host's memory, of which a pass fetches what it picks.

A model that is a little larger than a device keeps the experts of some layers in pinned memory of the host. The type of
an array says where it is, as in ``uint8<host>[256, 4096, 2048]``, so weights there are weights like all others: in
front of the experts of a layer, ``fetched`` copies those that are needed, inside of the compiled pass and without the
host's help. A few tokens fetch the experts of each pick, and more of them the whole layer's. The first layers are moved
first: they pick by the token's id, so what they need is known when a pass begins.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, SingleDeviceSharding

from dsv4jax.checks import integer
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import Picks
from dsv4jax.model.params import Block, Experts, ModelParams

FEW = 48  # picks whose experts are fetched one by one, in a copy for each of their arrays


def check_host_experts(layers: int, cfg: ModelConfig, mesh: Mesh | None) -> None:
    """Check how many layers are to have their experts in the host's memory.

    Raises:
      ValueError: there are fewer layers, or there are several devices.
    """
    if layers and mesh is not None:
        raise ValueError("host_experts is for one device: a mesh divides experts over its devices")
    if integer("host_experts", layers, 0) > cfg.num_layers:
        raise ValueError(f"host_experts: the model has {cfg.num_layers} layers, got {layers}")


def placed(block: Block, *, on_host: bool) -> Block:
    """Return a layer with its routed experts in the host's memory, or as it is.

    What is moved is freed on the device once nothing else holds it.
    """
    if not on_host:
        return block

    def moved(leaf: jax.Array) -> jax.Array:
        (device,) = leaf.devices()
        return jax.device_put(leaf, SingleDeviceSharding(device, memory_kind="pinned_host"))

    experts = block.experts
    gate_up, down = jax.tree.map(moved, (experts.gate_up, experts.down))
    return dataclasses.replace(block, experts=dataclasses.replace(experts, gate_up=gate_up, down=down))


def is_on_host(array: jax.Array) -> bool:
    """Whether an array, traced or not, is in the host's memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def bound_like[T](params: ModelParams, tree: T) -> T:
    """Return arrays bound to the device that weights are bound to, as those in the host's memory are.

    What is computed with such weights is bound. So programs that take it again would be compiled twice. Weights may be
    NumPy's arrays, which are bound to nothing.
    """
    leaves = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    devices = next((leaf.devices() for leaf in leaves if leaf.committed), set())
    return jax.device_put(tree, *devices) if len(devices) == 1 else tree


def fetched(experts: Experts, picks: Picks, cfg: ModelConfig) -> tuple[Experts, Picks, ModelConfig]:
    """Return experts on the device, picks among them, and the sizes with their number; all as given if they are there.

    The picks of a token keep their order, and so its sum keeps its bits.
    """
    weights = experts.gate_up, experts.down
    if not any(map(is_on_host, jax.tree.leaves(weights))):
        return experts, picks, cfg
    count = picks.experts.size
    if count > FEW:
        # Picks come from the layer before, and a copy waits for them. Otherwise several layers' copies begin at once.
        weights, picks = lax.optimization_barrier((weights, picks))
        weights = jax.tree.map(_on_device, weights)
        return dataclasses.replace(experts, gate_up=weights[0], down=weights[1]), picks, cfg
    numbers = picks.experts.reshape(-1)
    weights = jax.tree.map(lambda leaf: _of_each(leaf, jnp.minimum(numbers, cfg.num_experts - 1)), weights)
    places = jnp.where(numbers < cfg.num_experts, jnp.arange(count, dtype=jnp.int32), count)
    picks = Picks(experts=places.reshape(picks.experts.shape), weights=picks.weights)
    experts = dataclasses.replace(experts, gate_up=weights[0], down=weights[1])
    return experts, picks, dataclasses.replace(cfg, num_experts=count)


def _of_each(leaf: jax.Array, numbers: jax.Array) -> jax.Array:
    """The rows [N, ...] of an array of experts [E, ...], on the device.

    Each is a slice of its own: XLA has no gather across memories.
    """
    if not is_on_host(leaf):
        return leaf[numbers]
    slices = [lax.dynamic_slice_in_dim(leaf, numbers[i], 1) for i in range(numbers.size)]
    return jnp.concatenate([_on_device(each) for each in slices])


def _on_device(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Device)
