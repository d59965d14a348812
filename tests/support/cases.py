"""Cases of a test: ``make test`` runs the first ones, ``make check`` a few more, ``make sweeps`` all the others."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int = 1, slow: int | None = None) -> list[Any]:
    """Cases for ``pytest.mark.parametrize``: the first ``count``, then slow ones, then those of sweeps.

    There is one slow case if none comes first, and otherwise none, unless ``slow`` says how many.
    A case is a value, a tuple of values, or what ``pytest.param`` made.
    """

    def marked(case: Any, mark: pytest.MarkDecorator) -> Any:
        if hasattr(case, "marks"):
            return pytest.param(*case.values, id=case.id, marks=(*case.marks, mark))
        return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)

    found, swept = list(cases), count + ((not count) if slow is None else slow)
    slow_ones = [marked(case, pytest.mark.slow) for case in found[count:swept]]
    return [*found[:count], *slow_ones, *(marked(case, pytest.mark.sweep) for case in found[swept:])]


def in_turns(*families: Sequence[Any]) -> list[Any]:
    """One case of each family, then another of each, and so on: then the first ones are of all of them."""
    absent = object()
    rounds = itertools.zip_longest(*families, fillvalue=absent)
    return [case for case in itertools.chain.from_iterable(rounds) if case is not absent]
