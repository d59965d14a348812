"""Which implementation serves which op.

An op has an implementation for each backend that knows it, and its XLA form is the reference of the others.
``backend=None`` picks the op's kernel where device and sizes allow; a named backend binds every op that it implements
and never slips to another. ``OpBackends`` names one op by op.

    xla               plain JAX, on any device
    pallas            the kernels of ``pallas_kernels``, on the GPUs that ``pallas_kernels.language.target`` lists
    pallas_simulated  the same kernels run in NumPy on the host, on any device: slow, and checked for races

    cache_update      rounding and storing of new tokens, whole or piece by piece
    indexer_scores    score of every entry for every query of a CSA layer
    top_k             the entries of the largest scores
    decode_attention  attention over window and entries
    gather_rows       stored rows as dense ones

A further backend of an op is one module: a class with the methods of the op's protocol in ``ops``, and
``ops.TOP_K.register("mine", MyTopK())`` for example.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan

XLA, PALLAS, SIMULATED = "xla", "pallas", "pallas_simulated"


class Implementation(Protocol):
    """What every implementation of an op says of itself."""

    def unsupported(self, plan: CachePlan | None, kind: AttentionType) -> str | None:
        """Why it does not serve a plan's layers of a kind on the device that is compiled for; None where it does.

        Without a plan the question is about the device alone: what moves rows and encodes none serves every plan.
        """
        ...


class Anywhere:
    """An implementation in plain JAX: it serves every plan, on any device."""

    def unsupported(self, plan: CachePlan | None, kind: AttentionType) -> str | None:
        del plan, kind
        return None


class Op[T: Implementation]:
    """An op and its implementations, by the names of their backends."""

    def __init__(self, name: str):
        self.name = name
        self._implementations: dict[str, T] = {}

    def register(self, backend: str, implementation: T) -> None:
        """Make an implementation known. ValueError for a name that is taken."""
        if backend in self._implementations:
            raise ValueError(f"{self.name} has a backend {backend!r} already")
        self._implementations[backend] = implementation

    def __getitem__(self, backend: str) -> T:
        return self._implementations[backend]

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(self._implementations)

    def choose(self, backend: Backend, plan: CachePlan | None, kind: AttentionType) -> str:
        """The name of the backend that serves this op for a plan's layers of a kind.

        Raises:
          ValueError: unknown name, or a named backend that cannot serve; the message says why.
        """
        check_name(backend)
        name = getattr(backend, self.name) if isinstance(backend, OpBackends) else backend
        if name is None:
            fastest = self._implementations.get(PALLAS)
            return XLA if fastest is None or fastest.unsupported(plan, kind) is not None else PALLAS
        if name not in self._implementations:  # the name is of other ops
            return XLA
        if (reason := self._implementations[name].unsupported(plan, kind)) is not None:
            raise ValueError(f"backend={name!r} cannot serve {self.name}: {reason}")
        return name

    def of(self, backend: Backend, plan: CachePlan | None, kind: AttentionType) -> T:
        """The implementation that ``choose`` names."""
        return self._implementations[self.choose(backend, plan, kind)]


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
        for op, names in backends().items():
            if (name := getattr(self, op)) is not None and name not in names:
                raise ValueError(f"{op} must be None or one of {list(names)}, got {name!r}")


Backend = str | OpBackends | None

_OPS: dict[str, Op] = {}


def declare(name: str) -> Op:
    """An op without implementations, known to ``backends()``."""
    return _OPS.setdefault(name, Op(name))


def backends() -> dict[str, tuple[str, ...]]:
    """Op name -> the backends that implement it."""
    return {name: op.backends for name, op in _OPS.items()}


def check_name(backend: Backend) -> None:
    """ValueError for what names no backend of any op."""
    names = sorted({name for known in backends().values() for name in known})
    if backend is not None and not isinstance(backend, OpBackends) and backend not in names:
        raise ValueError(f"backend must be None or one of {names}, or an OpBackends; got {backend!r}")
