"""Which implementation serves which op.

An op's XLA form is its reference. ``backend=None`` picks the op's kernel where device and sizes allow; a named backend
binds every op and never slips to another. ``OpBackends`` names one op by op.

    xla               plain JAX, on any device
    pallas            the kernels of ``pallas_kernels``, on NVIDIA GPUs of compute capability 9.0 and 10.0
    pallas_simulated  the same kernels run in NumPy on the host, on any device: slow, and checked for races

    cache_update      rounding and storing of new tokens, whole or piece by piece
    indexer_scores    score of every entry for every query of a CSA layer
    top_k             the entries of the largest scores
    decode_attention  attention over window and entries
    gather_rows       stored rows as dense ones
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language import target

NAMES = ("xla", "pallas", "pallas_simulated")
CAPABILITIES = ("9.0", "10.0")  # Hopper; Blackwell


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpBackends:
    """A backend for each op: a name from ``backends()``, or None for the fastest available.

    Serves wherever a backend's name does, and like it is hashable: jit takes it as a static argument.
    """

    cache_update: str | None = None
    indexer_scores: str | None = None
    top_k: str | None = None
    decode_attention: str | None = None
    gather_rows: str | None = None

    def __post_init__(self) -> None:
        for op in backends():
            if (name := getattr(self, op)) is not None and name not in NAMES:
                raise ValueError(f"{op} must be None or one of {list(NAMES)}, got {name!r}")


Backend = str | OpBackends | None


def backends() -> dict[str, tuple[str, ...]]:
    """Op name -> the backends that implement it."""
    return {field.name: NAMES for field in dataclasses.fields(OpBackends)}


def check_name(backend: Backend) -> None:
    """ValueError for what names no backend."""
    if backend is not None and not isinstance(backend, OpBackends) and backend not in NAMES:
        raise ValueError(f"backend must be None or one of {list(NAMES)}, or an OpBackends; got {backend!r}")


def choose(op: str, backend: Backend, unsupported: str | None) -> str:
    """The backend that serves an op in this call.

    Args:
      unsupported: why the op's kernel cannot serve these formats and sizes, or None where it can.

    Raises:
      ValueError: unknown name, or a named backend that cannot serve.
    """
    check_name(backend)
    name = getattr(backend, op) if isinstance(backend, OpBackends) else backend
    if name is None:
        return "pallas" if unsupported is None and _device_reason() is None else "xla"
    reason = None if name == "xla" else unsupported
    if reason is None and name == "pallas":
        reason = _device_reason()
    if reason is not None:
        raise ValueError(f"backend={name!r} cannot serve {op}: {reason}")
    return name


def choose_all(backend: Backend, unsupported: dict[str, str | None]) -> OpBackends:
    """``choose`` for several ops: op -> why its kernel cannot serve."""
    return OpBackends(**{op: choose(op, backend, reason) for op, reason in unsupported.items()})


def _device_reason() -> str | None:
    """Why the kernels do not run on the target device, or None where they do."""
    device = target.device()
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the target is {device.platform}"
    if capability not in CAPABILITIES:
        return f"it needs compute capability {' or '.join(CAPABILITIES)}, {device.device_kind} has {capability}"
    return None
