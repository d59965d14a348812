"""Which implementation serves which op.

An op's XLA form is its reference. A kernel registers itself here under the op's name; ``backend=None`` then picks it
where the device supports it, and a named backend binds every op that has such an implementation and never slips to
another.
"""

from __future__ import annotations

OPS: dict[str, tuple[str, ...]] = {
    "cache_update": ("xla",),
    "indexer_scores": ("xla",),
    "top_k": ("xla",),
    "decode_attention": ("xla",),
    "gather_rows": ("xla",),
}


def backends() -> dict[str, tuple[str, ...]]:
    """Op name -> the backends that implement it."""
    return dict(OPS)


def resolve(backend: str | None) -> str:
    """The backend a call runs on. ValueError for a name that no op implements."""
    if backend is None:
        return "xla"
    known = sorted({name for names in OPS.values() for name in names})
    if backend not in known:
        raise ValueError(f"backend must be None or one of {known}, got {backend!r}; ops and their backends: {OPS}")
    return backend
