"""What README and CONTRIBUTING say is so."""

import ast
import re

import pytest

import dsv4jax as d4
from tests.support.paths import ROOT

PACKAGES = ("dsv4jax", "pallas_kernels")
ROOMS = sorted(path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py"))
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_example_runs_and_prints_what_it_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    said = re.search(r"print\(cache\.seq_lens\)  # (.*)", code)
    assert said is not None
    assert capsys.readouterr().out.strip() == said.group(1)


def test_the_first_screen_says_what_the_cache_saves():
    """Bytes of V4-Flash's cache beside a dense one: 512 latent numbers and 64 for positions, in bf16."""
    cfg = d4.DSV4Config.flash()
    assert cfg.num_layers == 43
    tokens = 2**20
    ring, online = (
        d4.plan_cache(cfg, 1, tokens, kv_format="fp8_tile64", indexer_format="mxfp4", hca_tail=tail)
        for tail in ("ring", "online")
    )

    def state(plan: d4.CachePlan) -> int:
        return sum(sum(plan.state_bytes(spec.attn).values()) for spec in d4.config.layer_schedule(cfg))

    total = (online.bytes_per_token * tokens + state(online)) / 2**30
    assert f"| {online.bytes_per_token:,.0f} | {total:.1f} GiB |" in README
    assert f"{state(online) / 2**20:.1f} MiB a request ({state(ring) / 2**20:.1f} MiB with ring tails)" in README
    for layers in (43, 61):
        dense = (512 + 64) * 2 * layers
        assert f"| dense MLA, {layers} layers" in README
        assert f"| {dense:,} | {dense * tokens / 2**30:.1f} GiB |" in README
    assert len(README.splitlines()) <= 140


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), f"{page} links to {link}"


def test_every_room_has_its_place_in_the_map():
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    for folder in folders:
        assert f"`{folder}/`" in CONTRIBUTING, folder
    for program in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/kernels/[!_]*.py")):
        assert f"`{program.stem}`" in CONTRIBUTING, program
    pattern = r"`((?:dsv4jax|pallas_kernels|tests|docs|examples|benchmarks)/[\w/]*(?:\.\w+)?)`"
    for name in re.findall(pattern, README + CONTRIBUTING):
        assert (ROOT / name).exists(), f"README or CONTRIBUTING names {name}"


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_names_its_modules(room):
    """Its docstring has a line for each, and for nothing else: that is the map of the code."""
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    named = set(re.findall(r"^([a-z]\w*) {2,}\S", docstring, re.MULTILINE))
    modules = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    assert named == modules | folders
