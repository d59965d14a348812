"""The GPU that kernels are compiled for, as far as Triton's kernels differ between GPUs."""

from __future__ import annotations

from pallas_kernels.language import target

# Compute capabilities of data centers' GPUs, where a block can have 163 KiB of shared memory or more; on others 99 KiB.
MUCH_SHARED_MEMORY = (80, 90, 100, 103)


def capability() -> int | None:
    """Return the compute capability of the device that is compiled for, major.minor as 10 major + minor.

    None if it has none, as a CPU.
    """
    found = getattr(target.device(), "compute_capability", None)
    if found is None or target.device().platform not in ("gpu", "cuda"):
        return None
    major, _, minor = str(found).partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else None


def multiprocessors() -> int:
    """Return how many blocks the GPU runs at once, one on each multiprocessor."""
    return int(getattr(target.device(), "core_count", 0) or getattr(target.device(), "num_cores", 0) or 108)


def converts_fp8() -> bool:
    """Whether the GPU has instructions that convert E4M3."""
    return (capability() or 0) >= 89
