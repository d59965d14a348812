"""How many parameters functions take: one that takes nine is missing a noun. Read from the source, not run."""

import ast
from collections.abc import Iterator

from tests.audits.test_imports import trees

MAX_PARAMETERS = 12
MANY = 9
# Functions may leave this list, and none may join it.
TAKE_MANY = {
    "dsv4jax.layer.attention.decode_attention",
    "dsv4jax.layer.layer.attention_layer",
    "dsv4jax.layer.layer.attention_layer_at",
    "dsv4jax.plan.plan_cache",
    "dsv4jax.requests.speculate.stage",
}


def count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The parameters that a caller gives; ``*args`` and ``**kwargs`` count as one each."""
    given = function.args
    names = [
        each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
    ]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def functions(inside: str, node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of the functions and methods in a tree, and how many parameters each takes."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{inside}.{child.name}" if is_function or isinstance(child, ast.ClassDef) else inside
        if is_function:
            yield name, count(child)
        yield from functions(name, child)


def taken() -> dict[str, int]:
    return {name: number for module, tree in trees().items() for name, number in functions(module, tree)}


def test_no_function_takes_more_than_one_can_keep_in_mind():
    found = taken()
    assert len(found) > 1000, "functions were not found"
    assert not {name: number for name, number in found.items() if number > MAX_PARAMETERS}
    assert {name for name, number in found.items() if number >= MANY} == TAKE_MANY


def test_the_audit_counts_what_a_caller_gives():
    source = "class A:\n    def f(self, a, /, b, *c, d=1, **e):\n        async def g(cls, x): ...\n\n\ndef h(y): ..."
    assert dict(functions("m", ast.parse(source))) == {"m.A.f": 5, "m.A.f.g": 1, "m.h": 1}
