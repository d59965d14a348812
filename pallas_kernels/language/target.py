"""The table of supported GPUs, and the device that is compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

Architecture = Literal["sm90", "sm100"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GPU:
    """A row of the table: what a kernel needs to know about the GPU that it runs on."""

    architecture: Architecture  # whose kernels it runs, if they differ between architectures
    capability: str  # compute capability, major.minor
    multiprocessors: int
    shared_bytes: int  # the largest shared memory that a block can ask for
    clusters: dict[int, int]  # cluster size -> clusters that run at once, with one block per multiprocessor


# Of the 227 KiB that a block can have, Mosaic takes a byte, and it rounds what is asked for up to whole KiB.
_SHARED_BYTES = 226 << 10

HOPPER = GPU(
    architecture="sm90",
    capability="9.0",
    multiprocessors=132,  # of an H200, like the numbers of clusters
    shared_bytes=_SHARED_BYTES,
    clusters={8: 13, 4: 30, 2: 66},  # the fewest seen: H200s differ in which multiprocessors they lack
)
BLACKWELL = GPU(
    architecture="sm100",
    capability="10.0",
    multiprocessors=148,  # of a B200
    shared_bytes=_SHARED_BYTES,
    clusters={8: 13, 4: 30, 2: 66},  # those of an H200; not measured on a B200
)
GPUS = (HOPPER, BLACKWELL)
type Device = Any  # a jax.Device, which jaxlib gives no type, or the AbstractDevice of a mesh


def device() -> Device:
    """Return the device that is compiled for.

    This is the device of the current abstract mesh if the mesh describes one, and the default device otherwise. A mesh
    of real devices, as ``jax.shard_map`` sets it, gives the kind of its devices but not their compute capability. In
    that case the default device is returned if it is of the same kind.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if hasattr(described, "compute_capability"):
        return described
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    default = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return default if described is None or described.device_kind == default.device_kind else described


def gpu() -> GPU | None:
    """Return the table's row for the device that is compiled for; None if it is not there, and has no kernels."""
    capability = getattr(device(), "compute_capability", None)
    return next((row for row in GPUS if row.capability == capability), None)


def unsupported() -> str | None:
    """Return why there are no kernels for the device that is compiled for, in a sentence that names it, or None."""
    if gpu() is not None:
        return None
    target = device()
    if target.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the target is {target.platform}"
    capability = getattr(target, "compute_capability", None)
    known = " or ".join(row.capability for row in GPUS)
    return f"it needs compute capability {known}, {target.device_kind} has {capability}"


def gpu_or_first() -> GPU:
    """Return ``gpu()``, or the first row of the table if there is none. The simulator then runs that row's kernels."""
    return gpu() or GPUS[0]


def multiprocessors() -> int:
    """Return the number of multiprocessors of the device that is compiled for, or of the GPU in its row of the table.

    Cards of one architecture differ: an H100 of the PCIe form has 114. A described device does not say its number.
    """
    count = getattr(device(), "core_count", None) if gpu() is not None else None
    return count or gpu_or_first().multiprocessors


def architecture() -> Architecture:
    """Return the architecture of ``gpu_or_first()``.

    On a device that is not in the table, ``launch`` raises an error.
    """
    return gpu_or_first().architecture
