"""What README shows is what happens."""

import re
from pathlib import Path

import dsv4jax as d4

ROOT = Path(__file__).parents[1]
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
    modules = {module.name for package in PACKAGES for module in (ROOT / package).glob("*.py")}
    for name in modules - {"__init__.py"}:
        assert f"`{name}`" in README, name
    programs = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("pallas_kernels/bench/[!_]*.py")]
    for program in programs:
        assert f"`{program.stem}`" in README, program
    named = set(re.findall(r"`(\w+\.py)`", README))
    assert named <= modules, f"README names {named - modules}, which are not there"
