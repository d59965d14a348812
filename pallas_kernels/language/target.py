"""What is compiled for."""

from __future__ import annotations

from typing import Any

import jax


def device() -> Any:
    """Of the current abstract mesh where it describes one, else the default one.

    A mesh of real devices, as ``jax.shard_map`` sets it, tells their kind without its capability: it means the default
    device where that is of the same kind.
    """
    described: Any = jax.sharding.get_abstract_mesh().abstract_device
    if hasattr(described, "compute_capability"):
        return described
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    default = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return default if described is None or described.device_kind == default.device_kind else described


def compute_capability() -> tuple[int, int]:
    """(major, minor) of what is compiled for; (0, 0) where it is no NVIDIA GPU."""
    major, minor = getattr(device(), "compute_capability", "0.0").split(".")
    return int(major), int(minor)


def architecture() -> str:
    """Of the kernels that differ: "sm100" where that is compiled for, else "sm90"."""
    return "sm100" if compute_capability()[0] == 10 else "sm90"
