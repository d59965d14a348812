"""What runs kernels in Triton in a test: the interpreter on a machine without a GPU, and else the GPU."""

from __future__ import annotations

import importlib.util

import pytest

from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import TRITON
from dsv4jax.layer.ops import GATHER_ROWS

EXTRA = ("triton", "jax_triton")
requires_extra = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, EXTRA)), reason='kernels in Triton need the extra "triton"'
)


def runs_here() -> pytest.MarkDecorator:
    """Skip tests where kernels in Triton can neither run nor be interpreted, for the reason that ops give."""
    reason = GATHER_ROWS[TRITON].unsupported(None, AttentionType.SWA)
    return pytest.mark.skipif(reason is not None, reason=f"kernels in Triton: {reason}")
