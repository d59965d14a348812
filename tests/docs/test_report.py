"""The tables and pictures of README and docs/speed.md are those that the recorded lines give."""

import re

import pytest

from benchmarks.kernels.lines import Results
from benchmarks.kernels.report import MARKED, PAGES, TABLES, files, with_tables
from benchmarks.kernels.tables import ALL_EARLIER, table
from tests.support.paths import ROOT

RESULTS = Results.load()


def test_the_files_are_what_the_report_writes():
    for name, content in files().items():
        assert (ROOT / name).read_text() == content, f"{name}: run python -m benchmarks.kernels report"
    assert {path.name for path in (ROOT / "docs/speed").iterdir()} == {"cache_update.svg", "reads.svg"}


def test_every_table_has_a_place():
    placed = [match.group(1) for name in PAGES for match in MARKED.finditer((ROOT / name).read_text())]
    assert sorted(placed) == sorted([*TABLES, "summary"])  # README and the page about speed both begin with it


def test_a_mark_that_all_rows_have_becomes_a_sentence():
    rows = [("a", "1*"), ("b", "2*")]
    assert table("case | us", rows) == f"| case | us |\n| --- | --- |\n| a | 1 |\n| b | 2 |\n\n{ALL_EARLIER}"
    assert "| a | 1* |" in table("case | us", [*rows, ("c", "3")])


def test_a_place_for_no_table_is_refused():
    with pytest.raises(ValueError, match="no table is called 'nothing'"):
        with_tables("<!-- report: nothing -->\n<!-- end of report -->", RESULTS)


def test_a_table_shows_its_lines():
    """One figure of each sort of line, as the files hold them."""
    page = with_tables("<!-- report: summary -->\nstale words\n<!-- end of report -->", RESULTS)
    assert "stale words" not in page
    line = RESULTS.case("attention csa B1 64 heads 128 + 512 fp8_row")
    assert f"| {line['pallas']['median']:.2f} | {RESULTS.public_beside(line['case'])['us']} (FlashMLA) |" in page  # pyright: ignore
    assert "| CSA attention of a 4,096-token chunk |" in page


def test_public_figures_have_a_source_and_stand_beside_cases_that_exist():
    for line in RESULTS.public:
        assert set(line) == {"library", "version", "kernel", "case", "us", "device", "timed", "beside"}
        for case in line["beside"]:
            RESULTS.case(case)  # KeyError where no line has it


def test_figures_by_hand_name_their_program():
    for line in RESULTS.by_hand:
        assert {"case", "program", "recorded", "device", "jax"} <= set(line)
        if module := re.search(r"python -m ([\w.]+)", line["program"]):
            assert (ROOT / (module.group(1).replace(".", "/") + ".py")).exists()


def test_a_case_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="'nothing' is the name of 0 lines"):
        RESULTS.case("nothing")
