"""What the pages of docs/ show is what happens: their code, their numbers and pictures, their names."""

import re
import runpy

import jax
import pytest

import dsv4jax as d4
import pallas_kernels
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, row_bytes
from dsv4jax.layer.backend import Op
from dsv4jax.layer.ops import CACHE_UPDATE, DECODE_ATTENTION, GATHER_ROWS, INDEXER_SCORES, PROJECTIONS, TOP_K
from dsv4jax.model import ModelConfig, plan_memory
from dsv4jax.weights.params import param_shapes
from dsv4jax.weights.stored import Stored
from tests.audits.test_compiled_kernels import KNOWN_SPILLS
from tests.support.paths import ROOT
from tests.support.signatures import GROUPS

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
CODE = {name: re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for name, page in PAGES.items()}
# Their code runs in sweeps; tests of models and of requests call the same.
LONG = (
    "generation.md", "model.md", "prefixes.md", "reproducibility.md", "requests.md", "research.md", "tour.md",
    "training.md",
)  # fmt: skip
API = set(re.findall(r"^::: ([\w.]+)$", "\n".join(PAGES.values()), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.sweep if name in LONG else ()) for name, blocks in CODE.items() if blocks],
)
def test_the_code_of_a_page_runs_and_prints_what_it_says(name, capsys):
    """``` ```python ``` blocks run one after another; ``` ```py ``` ones are for reading. A print is one line."""
    code = "\n".join(CODE[name])
    exec(compile(code, name, "exec"), {"__name__": name})
    calls = re.findall(r"^ *print\(.*", code, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(calls) == len(printed)
    for call, line in zip(calls, printed, strict=True):
        _, _, said = call.partition(")  # ")
        assert not said or said == line, call


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def size_of(leaf) -> str:
    return "-" if leaf is None else f"{leaf.size * leaf.dtype.itemsize} B"


def test_byte_tables():
    page, cfg = PAGES["layouts.md"], d4.DSV4Config.flash()
    for name, form in KV_FORMATS.items():
        row = form.row(cfg.head_dim - cfg.rope_dim, cfg.rope_dim)
        parts = [size_of(leaf) for leaf in (row.nope, row.rope, row.scale)]
        assert table_row(f"`{name}`", *parts, f"{row_bytes(row)} B") in page
    for name, form in INDEXER_FORMATS.items():
        row = form.row(cfg.indexer_head_dim)
        assert table_row(f"`{name}`", size_of(row.codes), size_of(row.scale), f"{row_bytes(row)} B") in page


def test_tables_of_blocks_and_state():
    page, plan = PAGES["layouts.md"], d4.plan_cache(d4.DSV4Config.flash())
    kinds = d4.AttentionType
    csa, hca = plan.block_bytes(kinds.CSA), plan.block_bytes(kinds.HCA)
    count = str(plan.entries_per_block(kinds.CSA))
    assert table_row("CSA", count, f"{csa['entries']:,} B", f"{csa['indexer keys']:,} B") in page
    assert table_row("HCA", "1", f"{hca['entries']:,} B", "-") in page
    online = d4.plan_cache(plan.cfg, hca_tail="online")
    state = {
        "window, `fp8_row`": plan.state_bytes(kinds.SWA)["window"],
        "CSA tail": plan.state_bytes(kinds.CSA)["tail"],
        "CSA indexer tail": plan.state_bytes(kinds.CSA)["indexer tail"],
        "HCA tail, ring": plan.state_bytes(kinds.HCA)["tail"],
        "HCA tail, online": online.state_bytes(kinds.HCA)["tail"],
    }
    for name, size in state.items():
        assert table_row(name, f"{size:,} B") in page


def test_pictures_are_those_that_the_plan_draws():
    pictures = runpy.run_path(str(DOCS / "draw_layouts.py"))["PICTURES"]
    stored = {path.stem: path.read_text() for path in (DOCS / "layouts").glob("*.svg")}
    assert stored == {name: str(draw()) for name, draw in pictures.items()}, "run docs/draw_layouts.py"


def test_every_public_name_is_in_the_api_pages():
    groups = GROUPS | {"pallas_kernels": (pallas_kernels, pallas_kernels.__all__)}
    assert not {f"{group}.{name}" for group, (_, names) in groups.items() for name in names} - API


def test_the_table_of_weights_has_their_bytes():
    cfg = d4.DSV4Config.flash()

    def gigabytes(stored: Stored | None) -> str:
        layers = [param_shapes(cfg, spec.attn, stored) for spec in d4.config.layer_schedule(cfg)]
        leaves = jax.tree.leaves(layers)
        return f"{sum(leaf.size * min(leaf.dtype.itemsize, 2) for leaf in leaves) / 1e9:.1f} GB"  # f32 stands for bf16

    for form, stored in (("wide", None), ("stored", Stored())):
        (row,) = re.findall(rf'^\| `"{form}"` \|.*\| ([^|]*) \|$', PAGES["support.md"], re.MULTILINE)
        assert row.removesuffix(" in bf16") == gigabytes(stored), form


def test_the_byte_table_is_the_printed_plan():
    (printed,) = re.findall(r"^```text\n(KV cache.*?)```", PAGES["layouts.md"], re.MULTILINE | re.DOTALL)
    assert printed.strip() == str(d4.plan_cache(d4.DSV4Config.flash()))


def test_the_tables_of_memory_are_the_printed_plans():
    printed = re.findall(r"^```text\n(routed experts.*?)```", PAGES["model.md"], re.MULTILINE | re.DOTALL)
    assert printed == [f"{plan_memory(cfg)}\n" for cfg in (ModelConfig.flash(), ModelConfig.pro())]


def serves(op: Op, kv_format: str, indexer_format: str) -> str:
    plan = d4.plan_cache(d4.DSV4Config.flash(), kv_format=kv_format, indexer_format=indexer_format)
    return "XLA" if op["pallas_simulated"].unsupported(plan, d4.AttentionType.CSA) else "kernel"


@pytest.mark.parametrize(
    "op",
    [PROJECTIONS, CACHE_UPDATE, INDEXER_SCORES, TOP_K, DECODE_ATTENTION, GATHER_ROWS],
    ids=lambda op: op.name,
)
def test_the_table_of_formats_and_ops_says_where_kernels_serve(op):
    """The simulator asks for no GPU, and serves what the kernels serve. A column has a default in the other format."""
    (row,) = re.findall(rf"^\| `{op.name}` \| [^|]* \| (.*) \|$", PAGES["support.md"], re.MULTILINE)
    rows = [serves(op, form, "nvfp4") for form in KV_FORMATS]
    keys = [serves(op, "fp8_row", form) for form in INDEXER_FORMATS]
    assert row.split(" | ") == rows + keys
    (head,) = re.findall(r"^\| op \| what it does \| rows: (.*) \|$", PAGES["support.md"], re.MULTILINE)
    assert re.findall(r"`(\w+)`", head) == [*KV_FORMATS, *INDEXER_FORMATS]


def test_the_table_of_formats_and_ops_has_every_op():
    tables = PAGES["support.md"].split("## Formats, ops and backends")[1].split("## Weights")[0]
    described = re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE)
    assert set(described) == set(d4.backends())


def test_the_page_of_what_was_checked_names_the_known_spills():
    """No more and no fewer kernels than the audit lets spill, with the bytes that they store."""
    (said,) = re.findall(r"On the H200 attention of (.*?)\. All others", PAGES["verification.md"])
    ((name, target), (_, stored, _)) = next(iter(KNOWN_SPILLS.items()))
    assert (len(KNOWN_SPILLS), name, target) == (1, "pro decode_attention csa fp8_row [9, 4]", "sm_90a")
    assert said == f"9 requests with four tokens each, in a CSA layer of Pro's sizes, spills {stored} bytes"


@pytest.mark.parametrize("name", [*PAGES, "../README.md", "../CONTRIBUTING.md"])
def test_links_lead_somewhere_in_the_repository_too(name):
    """Pages are read on the site, where ``make docs`` checks all links, and as files, where these are what there is."""
    page = (DOCS / name).read_text()
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", page, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\]\[[\w.]+\]", prose), "a reference that only the site resolves: link to api/...md#name"
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", prose):
        if target.startswith("https://"):
            continue
        path = (DOCS / name).parent / target if target else DOCS / name
        assert path.exists(), f"{name} links to {target}"
        if anchor and path.suffix == ".md":
            text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
            names = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
            member = anchor.rpartition(".")[0]  # the pages of a class show its members
            assert anchor in slugs or anchor in names or member in names, f"{name}: no {anchor} in {target}"


@pytest.mark.parametrize("name", [*PAGES, "../README.md"])
def test_code_fits_the_column_of_the_site(name):
    """It has room for 110 columns on a screen of 1,400 pixels. What programs print may be longer."""
    blocks = re.findall(r"^```(?:python|py|sh)\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 110]


def test_files_that_the_pages_name_are_there():
    for name, page in PAGES.items():
        for file in re.findall(r"`((?:dsv4jax|pallas_kernels|tests|docs|examples|notebooks)/[\w/]+\.\w+)`", page):
            assert (ROOT / file).exists(), f"{name} names {file}"
