"""Which implementation serves which op.

An op's XLA form is its reference. A kernel registers itself here under the op's name; ``backend=None`` then picks it
where device and sizes allow, and a named backend binds every op that has such an implementation and never slips to
another.

    xla               plain JAX, on any device
    pallas            the kernels of ``pallas_kernels``, on NVIDIA GPUs of compute capability 9.0 and 10.0
    pallas_simulated  the same kernels run in NumPy on the host, on any device: slow, and checked for races
"""

from __future__ import annotations

from typing import Any

import jax

OPS: dict[str, tuple[str, ...]] = {
    "cache_update": ("xla", "pallas", "pallas_simulated"),
    "indexer_scores": ("xla",),
    "top_k": ("xla",),
    "decode_attention": ("xla",),
    "gather_rows": ("xla", "pallas", "pallas_simulated"),
}
CAPABILITIES = ("9.0", "10.0")  # Hopper; Blackwell


def backends() -> dict[str, tuple[str, ...]]:
    """Op name -> the backends that implement it."""
    return dict(OPS)


def check_name(backend: str | None) -> None:
    """ValueError for a name that no op implements."""
    known = sorted({name for names in OPS.values() for name in names})
    if backend is not None and backend not in known:
        raise ValueError(f"backend must be None or one of {known}, got {backend!r}; ops and their backends: {OPS}")


def choose(op: str, backend: str | None, unsupported: str | None) -> str:
    """The backend that serves an op in this call.

    Args:
      unsupported: why the op's kernel cannot serve these formats and sizes, or None where it can.

    Raises:
      ValueError: unknown name, or a named backend that cannot serve.
    """
    check_name(backend)
    if backend is None:
        can = "pallas" in OPS[op] and unsupported is None and _device_reason() is None
        return "pallas" if can else "xla"
    if backend not in OPS[op]:
        return "xla"
    reason = None if backend == "xla" else unsupported
    if reason is None and backend == "pallas":
        reason = _device_reason()
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot serve {op}: {reason}")
    return backend


def _device_reason() -> str | None:
    """Why the kernels do not run on the target device, or None where they do."""
    device = _target_device()
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the target is {device.platform}"
    if capability not in CAPABILITIES:
        return f"it needs compute capability {' or '.join(CAPABILITIES)}, {device.device_kind} has {capability}"
    return None


def _target_device() -> Any:
    """The device that is compiled for: of the current abstract mesh where one is set, else the default one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None:
        return mesh.abstract_device
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        return jax.devices()[0]
    return jax.devices(default)[0] if isinstance(default, str) else default
