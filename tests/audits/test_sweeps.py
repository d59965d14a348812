"""A test that is left to sweeps names one that make check runs, and that guards the same."""

import ast

from tests.support.paths import ROOT

SWEEP = "pytest.mark.sweep"


def marks_of(function: ast.FunctionDef) -> list[ast.expr]:
    return [mark for mark in function.decorator_list if ast.unparse(mark).startswith(SWEEP)]


def test_every_sweep_has_a_guard_in_check():
    functions = [
        function
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef)
    ]
    in_check = {function.name for function in functions if not marks_of(function)}
    swept = {function.name: mark for function in functions for mark in marks_of(function)}
    assert swept
    for name, mark in swept.items():
        guards = {ast.literal_eval(word.value) for word in getattr(mark, "keywords", []) if word.arg == "guard"}
        assert guards & in_check, f"{name} is left to sweeps: name its guard, {SWEEP}(guard='test_...')"
