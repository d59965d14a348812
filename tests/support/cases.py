"""Cases of a test: ``make test`` runs the first ones, ``make check`` one more, and ``make sweeps`` all the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``: the first ``count``, then a slow one, then those of sweeps.

    A case is a value, a tuple of values, or what ``pytest.param`` made.
    """

    def marked(case: Any, mark: pytest.MarkDecorator) -> Any:
        if hasattr(case, "marks"):
            return pytest.param(*case.values, id=case.id, marks=(*case.marks, mark))
        return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)

    found = list(cases)
    second = [marked(case, pytest.mark.slow) for case in found[count : count + 1]]
    return [*found[:count], *second, *(marked(case, pytest.mark.sweep) for case in found[count + 1 :])]
