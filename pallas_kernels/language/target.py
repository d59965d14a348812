"""What is compiled for, and the table of GPUs that kernels are made for."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

Architecture = Literal["sm90", "sm100"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GPU:
    """A row of the table: what a kernel asks about the GPU that it runs on."""

    architecture: Architecture  # whose kernels it runs, where they differ
    capability: str  # compute capability, major.minor
    multiprocessors: int
    shared_bytes: int  # shared memory of a block, at most
    clusters: dict[int, int]  # blocks of a cluster -> clusters that run at once, where a multiprocessor holds one block


HOPPER = GPU(
    architecture="sm90",
    capability="9.0",
    multiprocessors=132,  # of an H200, as the numbers of clusters
    shared_bytes=232448,
    clusters={8: 13, 4: 32, 2: 66},
)
BLACKWELL = GPU(
    architecture="sm100",
    capability="10.0",
    multiprocessors=148,  # of a B200
    shared_bytes=232448,
    clusters={8: 13, 4: 32, 2: 66},  # as of an H200: on a B200 nobody has measured them
)
GPUS = (HOPPER, BLACKWELL)


def device() -> Any:
    """The device that is compiled for: that of the current abstract mesh where it describes one, else the default one.

    A mesh of real devices, as ``jax.shard_map`` sets it, tells their kind without its capability: it means the default
    device where that is of the same kind.
    """
    described: Any = jax.sharding.get_abstract_mesh().abstract_device
    if hasattr(described, "compute_capability"):
        return described
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    default = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return default if described is None or described.device_kind == default.device_kind else described


def gpu() -> GPU | None:
    """The row of the table for what is compiled for; None where no row is: such a device has no kernels."""
    capability = getattr(device(), "compute_capability", None)
    return next((row for row in GPUS if row.capability == capability), None)


def unsupported() -> str | None:
    """Why there are no kernels for what is compiled for, as a sentence that names it; None where there are."""
    if gpu() is not None:
        return None
    target = device()
    if target.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the target is {target.platform}"
    capability = getattr(target, "compute_capability", None)
    known = " or ".join(row.capability for row in GPUS)
    return f"it needs compute capability {known}, {target.device_kind} has {capability}"


def gpu_or_first() -> GPU:
    """As ``gpu``, or the first row where there is none: whose kernels the simulator runs then."""
    return gpu() or GPUS[0]


def architecture() -> Architecture:
    """The architecture of ``gpu_or_first``. ``launch`` refuses what is not in the table, so that nothing else runs."""
    return gpu_or_first().architecture
