"""What is compiled for."""

from __future__ import annotations

from typing import Any

import jax


def compute_capability() -> tuple[int, int]:
    """(major, minor) of the device that is compiled for; (0, 0) where it is no NVIDIA GPU.

    That is the device of the current abstract mesh where one is set, else the default one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not mesh.empty and mesh.abstract_device is not None:
        device = mesh.abstract_device
    elif device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    major, minor = getattr(device, "compute_capability", "0.0").split(".")
    return int(major), int(minor)


def architecture() -> str:
    """Of the kernels that differ: "sm100" where that is compiled for, else "sm90"."""
    return "sm100" if compute_capability()[0] == 10 else "sm90"
