"""What README shows is what happens."""

import ast
import re

import pytest

import dsv4jax as d4
from tests.support.paths import ROOT

PACKAGES = ("dsv4jax", "pallas_kernels")
ROOMS = sorted(path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py"))
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_example_runs_and_prints_what_it_says(capsys):
    code = block("python")
    exec(compile(code, "README.md", "exec"), {})
    said = re.search(r"print\(cache\.seq_lens\)  # (.*)", code)
    assert said is not None
    assert capsys.readouterr().out.strip() == said.group(1)


def test_the_byte_table_is_the_printed_plan():
    assert block("text").strip() == str(d4.plan_cache(d4.DSV4Config.flash()))


def test_every_room_has_its_place_in_the_map():
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    for folder in folders:
        assert f"`{folder}/`" in README, folder
    for program in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/kernels/[!_]*.py")):
        assert f"`{program.stem}`" in README, program
    for name in re.findall(r"`((?:dsv4jax|pallas_kernels|tests|docs|examples|benchmarks)/[\w/]*(?:\.\w+)?)`", README):
        assert (ROOT / name).exists(), f"README names {name}"


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_names_its_modules(room):
    """Its docstring has a line for each, and for nothing else: that is the map of the code."""
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    named = set(re.findall(r"^([a-z]\w*) {2,}\S", docstring, re.MULTILINE))
    modules = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    assert named == modules | folders
