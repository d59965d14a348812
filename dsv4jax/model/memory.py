"""The memory that a model's weights take as checkpoints store them, and that a training step takes besides.

print(plan_memory(ModelConfig.flash()))
print(plan_memory(ModelConfig.flash(), mesh=(1, 2), requests=64))
print(plan_memory(ModelConfig.flash(), training=TrainingStep(tokens=4096, ranks={"q_b": 8, "experts": 4})))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from dsv4jax.checks import integer
from dsv4jax.model.caches import TRAINED
from dsv4jax.model.checkpoint.tensors import TensorSpec, model_tensors
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.deltas import numbers_of
from dsv4jax.model.inside.devices import gathers_outputs
from dsv4jax.model.plain.experts import TILE, WIDE
from dsv4jax.plan import CachePlan, plan_cache

GIB = 1 << 30
DEVICES = (1, 2, 4, 8, 16, 32, 64)
DEVICE_GIB = (78, 139, 178)  # that an H100, H200 and B200 have for a program
PCIE = 43e9  # bytes a second that experts came to an H200 over PCIe 5.0


# Copies of the streams in f32 that are in memory while a layer is differentiated, at most: those of its two sublayers,
# and their mixing, of which each has as many products as streams. Measured on a CPU, of models of 2 to 7 layers.
STREAM_COPIES = 28
# Bytes for each number of a sublayer's input: what the loops of a layer begin with, which XLA writes before all layers.
LOOP_BYTES = 40
WIDE_BYTES = 8  # of each number of experts' weights that are wide at a time, and of its products' operands, at most
LOGIT_COPIES = 3  # in f32: logits, the logarithm of their softmax, and the derivative


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """A step that trains low-rank deltas: ``forward_sequences``, a cross entropy of all tokens, and its derivative.

    Raises:
      ValueError: a size is not positive.
    """

    ranks: Mapping[str, int]  # of deltas, as for ``with_deltas``
    batch: int = 1
    tokens: int = 4096  # of each sequence
    activation_bytes: int = 2  # of a number of the streams: 2 for a model in bf16, 4 in f32
    moments: int = 2  # numbers that the optimiser keeps for each that it trains: 2 for Adam

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "activation_bytes"):
            integer(name, getattr(self, name), 1)
        integer("moments", self.moments, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes that a training step takes besides the weights, at most. Arithmetic, of XLA's form on any device."""

    deltas: int  # in f32
    gradients: int  # of them
    moments: int  # of the optimiser
    streams: int  # between layers, which reverse mode keeps, and what XLA writes early for each layer
    layer: int  # while one layer is computed again and differentiated
    head: int  # logits and their derivative, before any layer is; with the head in f32, to which a CPU widens it

    @property
    def total(self) -> int:
        """All that are in memory at the same time. The layers' turn comes when the head's is over."""
        return self.deltas + self.gradients + self.moments + self.temporaries

    @property
    def temporaries(self) -> int:
        """Without what stays from one step to the next, and without the result."""
        return self.streams + max(self.layer, self.head)


def step_memory(cfg: ModelConfig, step: TrainingStep) -> StepMemory:
    """Compute the memory of a training step."""
    tokens, deltas = step.batch * step.tokens, 4 * numbers_of(cfg, step.ranks)
    of_streams = tokens * cfg.num_streams * cfg.hidden_size
    of_expert = 3 * cfg.expert_width * cfg.hidden_size
    pairs = tokens * cfg.experts_per_token
    tiles = min(pairs, cfg.num_experts + pairs // min(tokens, TILE))
    tiles = max(1, min(tiles, WIDE // of_expert))
    return StepMemory(
        deltas=deltas,
        gradients=deltas,
        moments=step.moments * deltas,
        streams=(cfg.num_layers + 1) * of_streams * step.activation_bytes
        + cfg.num_layers * LOOP_BYTES * tokens * cfg.hidden_size,
        layer=4 * STREAM_COPIES * of_streams + WIDE_BYTES * tiles * of_expert + 2 * deltas,
        head=4 * (LOGIT_COPIES * tokens + cfg.hidden_size) * cfg.vocab_size + 2 * 4 * of_streams,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshMemory:
    """What a device of a mesh holds of a model, and what a decode step makes it receive. Arithmetic, not measured."""

    shape: tuple[int, int]  # of the axes data and model
    requests: int  # of all devices
    weights: int  # bytes on each device
    cache: CachePlan  # of the requests of a device, whatever their context
    # By the names of ``dsv4jax.model.inside.devices``: (how often a step, bytes that a device receives in all of them).
    received: dict[str, tuple[int, int]]

    def context(self, device_bytes: int) -> int:
        """Return the tokens that each request can have beside the weights, the same for all; 0 if there is no room."""
        return self.cache.largest_context(max(0, device_bytes - self.weights))

    def __str__(self) -> str:
        data, model = self.shape
        lines = [f"on a mesh of {data}x{model}, {self.requests} requests, each device:"]
        lines += [f"{'weights':<20} {self.weights / GIB:8.1f} GiB"]
        lines += [f"context in {gib:>4} GiB {self.context(gib * GIB):12,} tokens a request" for gib in DEVICE_GIB]
        lines += [
            f"{name:<20} {times:3} a step, {size / 1e6:10.3f} MB received"
            for name, (times, size) in self.received.items()
        ]
        return "\n".join(lines)


def mesh_memory(cfg: ModelConfig, weights: int, shape: tuple[int, int], requests: int) -> MeshMemory:
    """Compute what a mesh holds and sends in a decode step, with activations in bf16."""
    data, model = (integer(name, size, 1) for name, size in zip(("data", "model"), shape, strict=True))
    requests = integer("requests", requests, 1)
    for name, count, size in (
        ("requests", requests, data),
        ("num_experts", cfg.num_experts, data * model),
        ("vocab_size", cfg.vocab_size, data * model),
    ):
        if count % size:
            raise ValueError(f"{name}={count} must be divisible by {size}, of the mesh {data}x{model}")

    def gathered(row: int) -> int:
        return (data - 1) * (requests // data) * row

    def added(row: int) -> int:
        return (data - 1) * (requests // data) * row + 2 * (model - 1) * (requests // data) * row // model

    of_picks = requests * 2 * cfg.experts_per_token * cfg.hidden_size
    is_gathered = gathers_outputs(data, model, of_picks)
    hidden, layers, logits = cfg.hidden_size, cfg.num_layers, 4 * cfg.vocab_size * (requests // data)
    of_data, of_any = int(data > 1), int(data * model > 1)
    received = {
        "gather_tokens": (of_data, gathered(8)),
        "sum_of_embedding": (of_any, added(2 * hidden)),
        "gather_inputs": (of_data * (layers + 1), (layers + 1) * gathered(2 * hidden)),
        "gather_outputs": (of_any * is_gathered * layers, layers * (model - 1) * is_gathered * of_picks),
        "sum_of_experts": (of_any * (not is_gathered) * layers, layers * (not is_gathered) * added(4 * hidden)),
        "gather_logits": (of_any, logits * (data - 1) // (data * model) + logits * (model - 1) // model),
    }
    return MeshMemory(
        shape=(data, model),
        requests=requests,
        weights=weights,
        cache=plan_cache(cfg.attention, requests // data, 1, **TRAINED),
        received=received,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a model's weights in a checkpoint, and how many numbers and tensors they are.

    ``training`` is what a training step takes besides, and ``mesh`` what several devices hold and send, if that was
    asked for.
    """

    experts: int  # routed, without those of the block for drafts
    tables: int  # embedding and head
    other: int
    drafts: int  # the whole block for drafts
    draft_experts: int  # its routed experts
    picked: int  # of the routed experts that a token picks
    numbers: int
    tensors: int  # scales are tensors, too
    layers: int  # without those of the block for drafts
    training: StepMemory | None = None
    mesh: MeshMemory | None = None

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return self.experts + self.tables + self.other + self.drafts

    def per_device(self, devices: int) -> int:
        """Bytes on each of some devices. Routed experts, embedding and head are spread, and all else is on each."""
        spread = self.experts + self.draft_experts + self.tables
        return math.ceil(spread / devices) + self.total - spread

    def host_layers(self, device_bytes: int) -> int:
        """Return how many layers must keep their routed experts in the host's memory for the rest to fit a device.

        Args:
          device_bytes: what the device has for weights: its memory without caches and a pass's own arrays, of which
            ``plan_cache`` and a compiled pass's ``memory_analysis`` tell.

        Raises:
          ValueError: the rest does not fit with no layer's experts on the device.
        """
        surplus = self.total - integer("device_bytes", device_bytes, 0)
        if surplus > self.experts:
            rest = self.total - self.experts
            raise ValueError(f"device_bytes must be at least {rest}, all but the routed experts, got {device_bytes}")
        return max(0, math.ceil(surplus * self.layers / self.experts))

    def host_seconds(self, layers: int, bytes_per_second: float = PCIE) -> float:
        """Return how much longer a token takes whose picked experts come from the host's memory in so many layers."""
        return integer("layers", layers, 0) * self.picked / self.layers / bytes_per_second

    def __str__(self) -> str:
        parts = {
            "routed experts": self.experts,
            "embedding and head": self.tables,
            "other": self.other,
            "drafts": self.drafts,
            "in all": self.total,
        }
        lines = [f"{name:<20} {size / GIB:8.1f} GiB" for name, size in parts.items()]
        lines.append(f"{self.numbers:,} numbers in {self.tensors:,} tensors")
        lines += [
            f"on {devices} device{'s' * (devices > 1)}:".ljust(20)
            + f" {self.per_device(devices) / GIB:8.1f} GiB each"
            + (", experts, embedding and head spread, the rest on each" if devices > 1 else "")
            for devices in DEVICES
        ]
        if self.mesh is not None:
            lines.append(str(self.mesh))
        if self.training is not None:
            step = self.training
            parts = {
                "deltas": step.deltas,
                "their gradients": step.gradients,
                "optimiser": step.moments,
                "streams": step.streams,
                "a layer": step.layer,
                "or the head": step.head,
                "a training step": step.total,
            }
            lines += [f"{name:<20} {size / GIB:8.1f} GiB" for name, size in parts.items()]
        return "\n".join(lines)


def plan_memory(
    cfg: ModelConfig,
    drafts: int = 1,
    training: TrainingStep | None = None,
    mesh: tuple[int, int] | None = None,
    requests: int = 1,
) -> MemoryPlan:
    """Compute the memory of a model's weights, and of a training step or on a mesh if one is given.

    Args:
      cfg: the model's sizes.
      drafts: 0 leaves out the block that guesses tokens.
      training: the step; its memory is the plan's ``training``.
      mesh: sizes of the axes data and model, such as (1, 2); what its devices hold and send is the plan's ``mesh``.
      requests: that the mesh serves at a time.

    Raises:
      ValueError: no weight has the name of one of the step's deltas; or requests do not divide by the axis data, or
        experts or vocabulary by all devices.
    """
    specs = model_tensors(cfg, drafts)

    def size(of: dict[str, TensorSpec]) -> int:
        return sum(spec.nbytes for spec in of.values())

    main = {name: spec for name, spec in specs.items() if not name.startswith("mtp.")}
    block = {name: spec for name, spec in specs.items() if name not in main}
    experts = {name: spec for name, spec in main.items() if ".ffn.experts." in name}
    tables = {name: spec for name, spec in main.items() if name in ("embed.weight", "head.weight")}
    scales = [spec.scales for spec in specs.values() if spec.scales is not None]
    plan = MemoryPlan(
        experts=size(experts),
        tables=size(tables),
        other=size(main) - size(experts) - size(tables),
        drafts=size(block),
        draft_experts=size({name: spec for name, spec in block.items() if ".ffn.experts." in name}),
        picked=size(experts) * cfg.experts_per_token // cfg.num_experts,
        numbers=sum(math.prod(spec.codes) for spec in specs.values()) + sum(math.prod(scale) for scale in scales),
        tensors=len(specs) + len(scales),
        layers=cfg.num_layers,
        training=None if training is None else step_memory(cfg, training),
    )
    if mesh is None:
        return plan
    of_mesh = mesh_memory(cfg, plan.per_device(math.prod(mesh)), mesh, requests)
    return dataclasses.replace(plan, mesh=of_mesh)
