"""The page of the kernel language: every word of it is there, and its tables of mistakes say what happens."""

import ast
import functools
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import negate, select
from tests.support.lane_kernels import mesh_of
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/language.md").read_text()
ON_THE_PAGE = set(re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE))
LANGUAGE = "pallas_kernels.language"
FOR_MACHINES = {"expect"}  # what the two machines share; no body calls it


def blocks() -> list[str]:
    """The page's code that runs."""
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def imported_by_kernels() -> dict[str, set[str]]:
    """Module of the language -> names that the modules with kernels, or the page's own, import from it."""
    found: dict[str, set[str]] = {}
    paths = (ROOT / "pallas_kernels").rglob("*.py")
    code = [path.read_text() for path in paths if "language" not in path.relative_to(ROOT / "pallas_kernels").parts]
    for text in (*code, *blocks()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == LANGUAGE:
                for name in node.names:
                    found.setdefault(f"{LANGUAGE}.{name.name}", set())
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{LANGUAGE}."):
                found.setdefault(node.module, set()).update(name.name for name in node.names)
    return found


IMPORTED = imported_by_kernels()
MODULES = [importlib.import_module(name) for name in sorted(IMPORTED)]


def words(module: ModuleType) -> dict[str, Any]:
    """The public functions and classes that a module defines."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
        and not name.startswith("_")
        and name not in FOR_MACHINES
    }


WORDS = {f"{module.__name__}.{name}": thing for module in MODULES for name, thing in words(module).items()}
METHODS = {
    f"{path}.{name}": member.fget if isinstance(member, property) else getattr(thing, name)
    for path, thing in WORDS.items()
    if inspect.isclass(thing)
    for name, member in vars(thing).items()
    if not name.startswith("_") and (isinstance(member, property) or inspect.isroutine(getattr(thing, name)))
}


def test_every_word_is_on_the_page():
    """A class brings its methods and properties with it."""
    assert set(WORDS) == {path for path in ON_THE_PAGE if path.startswith(LANGUAGE)}
    constants = {name for path, names in IMPORTED.items() for name in names if f"{path}.{name}" not in WORDS}
    unnamed = {name for name in constants if not re.search(rf"`{name}`", PAGE)}
    assert not unnamed


@pytest.mark.parametrize("path", [*WORDS, *METHODS])
def test_every_word_says_what_it_means(path):
    documented = (WORDS | METHODS)[path].__doc__ or ""
    generated = documented.startswith(path.rpartition(".")[2] + "(")  # what a dataclass without a docstring gets
    assert documented
    assert not generated


def rows_of(heading: str) -> list[tuple[str, str, str]]:
    """(written, message, instead) of the table under a line that ends so."""
    table = PAGE.split(heading)[1].split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    return [re.fullmatch(r"\| `(.*?)` \| (.*) \| `(.*?)` \|", row).groups() for row in table.splitlines()]  # pyright: ignore


def simulated(code: str) -> None:
    """Run one line in a body. It is what the tables are about: nothing more is in the block."""

    def body(machine: Machine, source: Buffer, out: Buffer) -> None:
        lane, counts = machine.thread, Shared.take(machine, (WARPGROUP,), "i32")
        (x,) = source.load_floats(lane, count=1)
        names = dict(machine=machine, lane=lane, n=lane % 7, x=x, source=source, out=out, counts=counts)
        exec(code, names | dict(select=select, negate=negate))

    jax.block_until_ready(
        launch(
            body,
            name="line",
            grid=Grid(blocks=(1,), shared_bytes=4 * WARPGROUP),
            inputs=jnp.ones(WARPGROUP, jnp.float32),
            state=jax.ShapeDtypeStruct((WARPGROUP,), jnp.int32),
            simulate=True,
        )
    )


MISTAKES = [("TypeError", *row) for row in rows_of("Both machines refuse these")]
MISTAKES += [("SimulationError", *row) for row in rows_of("These depend on numbers")]


@pytest.mark.parametrize(("error", "written", "message", "instead"), MISTAKES)
def test_a_mistake_is_refused_with_this_message_and_what_stands_beside_it_is_not(error, written, message, instead):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){error}: .*{re.escape(message)}"):
        simulated(written)
    simulated(instead)


@pytest.mark.parametrize(
    ("name", "inputs", "options"),
    [
        ("double", [((1000,), jnp.float32)], {}),
        ("row_peaks", [((7, 200), jnp.float32)], {}),
        ("transpose", [((45, 70), jnp.float32)], {}),
        ("histograms", [((3, 1000), jnp.int32)], {"bins": 200}),
        ("peaks_and_sums", [((7, 1001), jnp.float32)], {}),
        ("matmul", [((100, 320), jnp.bfloat16), ((128, 320), jnp.bfloat16), ((128,), jnp.float32)], {}),
        ("widened", [((100, 192), jnp.float16), ((64, 192), jnp.uint8), ((64,), jnp.float32)], {}),
    ],
)
def test_the_kernels_of_the_page_are_emitted_for_a_gpu(name, inputs, options):
    """What they compute is tested on the simulator, where the page's code is run."""
    kernel = jax.jit(functools.partial(page_code()[name], **options))
    with jax.sharding.use_abstract_mesh(mesh_of("9.0", "NVIDIA H200")):
        traced = kernel.trace(*(jax.ShapeDtypeStruct(*spec) for spec in inputs))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu\w*\(", text)) == 1


@functools.cache
def page_code() -> dict[str, Any]:
    """What the page's code defines."""
    names: dict[str, Any] = {"__name__": "language.md"}
    exec("\n".join(blocks()), names)
    return names
