"""The choice of an implementation for each op.

An op has one implementation per backend. Its XLA implementation is the reference for the others. With ``backend=None``
an op uses its Pallas kernel if the device and the sizes allow it, its Triton kernel on other NVIDIA GPUs, and XLA
otherwise. A named backend is used for every op that implements it; if it cannot serve such an op, that is an error, and
no other backend is tried. ``OpBackends`` names a backend for each op.

    xla               plain JAX, on any device
    pallas            the kernels of ``pallas_kernels``, on the GPUs that ``pallas_kernels.language.target`` lists
    pallas_simulated  the same kernels run in NumPy on the host, on any device: slow, and checked for races
    triton            the kernels of ``pallas_kernels.triton_gpu``, on NVIDIA GPUs since Ampere; an extra

    projections       products with the layer's weights, and what tokens contribute
    cache_update      rounding and storing of new tokens, as a whole or in steps
    indexer_scores    the score of every entry for every query of a CSA layer
    top_k             the entries with the largest scores
    decode_attention  attention over window and entries
    gather_rows       stored rows as dense ones

and those of a whole model, around attention:

    router             which experts each token goes to
    experts            the outputs of those experts, and of the shared one
    hyper_connections  what stands between two sublayers
    head               logits

A cache whose plan is ``invariant`` takes from each implementation the form whose sums depend on a request alone. One
that has no such form is not chosen, and if it is named, that is an error.

To add a backend for an op, write a class with the methods of the op's protocol in ``ops``, of layers or of models, and
register it, for example with ``ops.TOP_K.register("mine", MyTopK())``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from dsv4jax.checks import Tree
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan

XLA, PALLAS, SIMULATED, TRITON = "xla", "pallas", "pallas_simulated", "triton"


class Choosable(Protocol):
    """The method that implementations of all ops share."""

    def unsupported(self, *args: Tree, **kwargs: Tree) -> str | None:
        """Return why this implementation cannot serve what an op is chosen for on the target device, or None."""
        ...


class Implementation(Protocol):
    """The method that implementations of all ops of a layer share."""

    def unsupported(self, plan: CachePlan | None, kind: AttentionType) -> str | None:
        """Return why this implementation cannot serve a plan's layers of a kind on the target device, or None.

        With ``plan`` None only the device is checked. This is for operations that move rows without encoding any, which
        work for every plan.
        """
        ...


class Anywhere:
    """Base class of implementations in plain JAX, which serve everything on any device."""

    def unsupported(self, *args: Tree, **kwargs: Tree) -> str | None:
        del args, kwargs
        return None


class Op[T: Choosable]:
    """An op and its implementations, by backend name."""

    def __init__(self, name: str):
        self.name = name
        self._implementations: dict[str, T] = {}
        self._invariant: dict[str, T] = {}  # the forms of them whose sums do not depend on the batch
        self._candidates: dict[str, Callable[[], bool]] = {}  # for ``backend=None``, in this order

    def register(self, backend: str, implementation: T, *, if_unnamed: Callable[[], bool] | None = None) -> None:
        """Add an implementation.

        Args:
          backend: its name.
          implementation: the object.
          if_unnamed: whether ``backend=None`` may choose it on the device that is compiled for, if it serves the plan.
            None means always for the Pallas kernels, and never for others.

        Raises:
          ValueError: the name is taken.
        """
        if backend in self._implementations:
            raise ValueError(f"{self.name} has a backend {backend!r} already")
        self._implementations[backend] = implementation
        if if_unnamed is not None or backend == PALLAS:
            self._candidates[backend] = if_unnamed or (lambda: True)

    def register_invariant(self, backend: str, implementation: T) -> None:
        """Add the form of a backend's implementation in which what a request gets does not depend on the batch.

        It may be the implementation itself. It serves what the implementation serves.
        """
        assert backend in self._implementations, "of a backend that is registered"
        self._invariant[backend] = implementation

    def __getitem__(self, backend: str) -> T:
        return self._implementations[backend]

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(self._implementations)

    def choose(self, backend: Backend, *served: Tree) -> str:
        """Return the name of the backend that serves this op.

        Args:
          backend: the caller's.
          served: what the op's ``unsupported`` takes: a plan and a kind of layer; in a model sizes, weights and dtype.

        Raises:
          ValueError: the name is unknown, or the named backend cannot serve; the message says why.
        """
        check_name(backend)
        forms, of_forms = self._forms(backend, served)
        name = getattr(backend, self.name) if isinstance(backend, OpBackends) else backend
        if name is None:
            for candidate, is_wanted in self._candidates.items():
                if candidate in forms and is_wanted() and forms[candidate].unsupported(*served) is None:
                    return candidate
            return XLA
        if name not in self._implementations:  # the name belongs to other ops
            return XLA
        reason = forms[name].unsupported(*served) if name in forms else of_forms
        if reason is not None:
            raise ValueError(f"backend={name!r} cannot serve {self.name}: {reason}")
        return name

    def of(self, backend: Backend, *served: Tree) -> T:
        """Return the implementation that ``choose`` names."""
        return self._forms(backend, served)[0][self.choose(backend, *served)]

    def _forms(self, backend: Backend, served: tuple[Tree, ...]) -> tuple[dict[str, T], str]:
        """Return the implementations to choose from, and why others are not among them."""
        if any(isinstance(one, CachePlan) and one.invariant for one in served) or is_invariant(backend):
            return self._invariant, "what it gives a request depends on the batch, which invariant=True rules out"
        return self._implementations, ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpBackends:
    """A backend for each op: a name from ``backends()``, or None for the fastest available.

    It can be given wherever a backend's name can. It is hashable, so jit can take it as a static argument.

    Raises:
      ValueError: an op has no backend of that name.
    """

    projections: str | None = None
    cache_update: str | None = None
    indexer_scores: str | None = None
    top_k: str | None = None
    decode_attention: str | None = None
    gather_rows: str | None = None
    router: str | None = None
    experts: str | None = None
    hyper_connections: str | None = None
    head: str | None = None
    # Whether results must not depend on the batch, for ops that have no plan to see it in; see ``plan_cache``.
    invariant: bool = False

    def __post_init__(self) -> None:
        for op, names in backends().items():
            if (name := getattr(self, op)) is not None and name not in names:
                raise ValueError(f"{op} must be None or one of {list(names)}, got {name!r}")


Backend = str | OpBackends | None

_OPS: dict[str, Op] = {}


def is_invariant(backend: Backend) -> bool:
    """Whether a backend says that results must not depend on the batch."""
    return isinstance(backend, OpBackends) and backend.invariant


def for_plan(backend: Backend, plan: CachePlan) -> Backend:
    """Return the backend as ops need it that do not see the plan of the cache that they run beside."""
    if not plan.invariant or is_invariant(backend):
        return backend
    check_name(backend)
    if isinstance(backend, OpBackends):
        return dataclasses.replace(backend, invariant=True)
    named = {op: backend if backend in names else XLA for op, names in backends().items()} if backend else {}
    return OpBackends(**named, invariant=True)


def declare(name: str) -> Op:
    """Return the op of this name. A new one has no implementations, and is listed by ``backends()``."""
    return _OPS.setdefault(name, Op(name))


def backends() -> dict[str, tuple[str, ...]]:
    """Return the name of each op and the names of the backends that implement it."""
    return {name: op.backends for name, op in _OPS.items()}


def check_name(backend: Backend) -> None:
    """Raise ValueError if ``backend`` is a name that no op has an implementation for."""
    names = sorted({name for known in backends().values() for name in known})
    if backend is not None and not isinstance(backend, OpBackends) and backend not in names:
        raise ValueError(f"backend must be None or one of {names}, or an OpBackends; got {backend!r}")
