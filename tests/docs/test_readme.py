"""What README shows is what happens."""

import re

import dsv4jax as d4
from tests.support.paths import ROOT

PACKAGES = ("dsv4jax", "pallas_kernels")
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


def test_every_module_has_its_place_in_the_map():
    modules = {module.relative_to(ROOT) for package in PACKAGES for module in (ROOT / package).rglob("*.py")}
    names = {module.name for module in modules} - {"__init__.py"}
    for name in names:
        # A machine has a module for each module of words, in a folder of its own.
        assert f"`{name}`" in README, name
    for room in {module.parent for module in modules}:
        assert f"`{room.name}/`" in README, room
    programs = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/kernels/[!_]*.py")]
    for program in programs:
        assert f"`{program.stem}`" in README, program
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert named <= names, f"README names {named - names}, which are not there"
