"""What is compiled for."""

from __future__ import annotations

from typing import Any

import jax


def device() -> Any:
    """Of the current abstract mesh where one is set, else the default one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None:
        return mesh.abstract_device
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def compute_capability() -> tuple[int, int]:
    """(major, minor) of what is compiled for; (0, 0) where it is no NVIDIA GPU."""
    major, minor = getattr(device(), "compute_capability", "0.0").split(".")
    return int(major), int(minor)


def architecture() -> str:
    """Of the kernels that differ: "sm100" where that is compiled for, else "sm90"."""
    return "sm100" if compute_capability()[0] == 10 else "sm90"
