"""The memory that a model's weights take as checkpoints store them, on one device or spread over several.

print(plan_memory(ModelConfig.flash()))
"""

from __future__ import annotations

import dataclasses
import math

from dsv4jax.model.checkpoint.tensors import TensorSpec, model_tensors
from dsv4jax.model.config import ModelConfig

GIB = 1 << 30
DEVICES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a model's weights in a checkpoint, and how many numbers and tensors they are."""

    experts: int  # routed, without those of the block for drafts
    tables: int  # embedding and head
    other: int
    drafts: int  # the whole block for drafts
    draft_experts: int  # its routed experts
    numbers: int
    tensors: int  # scales are tensors, too

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return self.experts + self.tables + self.other + self.drafts

    def per_device(self, devices: int) -> int:
        """Bytes on each of some devices if routed experts are spread over them, and all else is on each."""
        spread = self.experts + self.draft_experts
        return math.ceil(spread / devices) + self.total - spread

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
            + (", the experts spread, the rest on each; computed, only one device is served" if devices > 1 else "")
            for devices in DEVICES
        ]
        return "\n".join(lines)


def plan_memory(cfg: ModelConfig, drafts: int = 1) -> MemoryPlan:
    """Compute the memory of a model's weights; ``drafts`` of 0 leaves out the block that guesses tokens."""
    specs = model_tensors(cfg, drafts)

    def size(of: dict[str, TensorSpec]) -> int:
        return sum(spec.nbytes for spec in of.values())

    main = {name: spec for name, spec in specs.items() if not name.startswith("mtp.")}
    block = {name: spec for name, spec in specs.items() if name not in main}
    experts = {name: spec for name, spec in main.items() if ".ffn.experts." in name}
    tables = {name: spec for name, spec in main.items() if name in ("embed.weight", "head.weight")}
    scales = [spec.scales for spec in specs.values() if spec.scales is not None]
    return MemoryPlan(
        experts=size(experts),
        tables=size(tables),
        other=size(main) - size(experts) - size(tables),
        drafts=size(block),
        draft_experts=size({name: spec for name, spec in block.items() if ".ffn.experts." in name}),
        numbers=sum(math.prod(spec.codes) for spec in specs.values()) + sum(math.prod(scale) for scale in scales),
        tensors=len(specs) + len(scales),
    )
