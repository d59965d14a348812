"""Cases of which ``make test`` runs the first, and ``make check`` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``, those after the first ``count`` marked slow.

    A case is a value, a tuple of values, or what ``pytest.param`` made.
    """
    slow = pytest.mark.slow

    def marked(case: Any) -> Any:
        if hasattr(case, "marks"):
            return pytest.param(*case.values, id=case.id, marks=(*case.marks, slow))
        return pytest.param(*case, marks=slow) if isinstance(case, tuple) else pytest.param(case, marks=slow)

    return [case if i < count else marked(case) for i, case in enumerate(cases)]
