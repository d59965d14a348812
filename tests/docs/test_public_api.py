"""What the package promises: names, signatures, and an import that touches no device."""

import collections
import difflib
import importlib.metadata
import inspect
import operator
import os
import re
import subprocess
import sys
import warnings

import pytest

import dsv4jax as d4
from tests.support.paths import ROOT
from tests.support.signatures import GROUPS, signatures

RECORDED = ROOT / "tests" / "docs" / "signatures.txt"

# The functions under the facade, and the argument that each updates in place.
UPDATES = {
    "append_swa": "state",
    "append_tail": "state",
    "flush_entries": "pool",
    "rotate_csa": "state",
    "reset_hca": "state",
    "reset_slots": "state",
}
READS = ("gather_compressed", "gather_all_compressed", "gather_swa", "select_entries", "decode_attention")


def test_signatures_are_those_recorded():
    """A change of the public face is seen as a difference of one file."""
    recorded, found = RECORDED.read_text().splitlines(), signatures().splitlines()
    changed = "\n".join(difflib.unified_diff(recorded, found, "recorded", "found", n=0, lineterm=""))
    assert not changed, f"{changed}\npython -m tests.support.signatures > tests/docs/signatures.txt  # if meant so"


def test_backends_and_booleans_are_given_by_name():
    functions = {
        f"{group}.{name}": function
        for group, (module, names) in GROUPS.items()
        for name in names
        if callable(function := getattr(module, name)) and not inspect.isclass(function)
    }
    for name, function in functions.items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in ("backend", "model_axis", "residual") or isinstance(parameter.default, bool):
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{name}: {parameter}"
    assert {"dsv4jax.attention_layer", "dsv4jax.model.chat_text", "dsv4jax.pieces.append_swa"} <= functions.keys()


def test_what_one_writes_daily_is_at_the_top_and_the_rest_in_groups():
    assert len(d4.__all__) <= 30
    assert set(dir(d4)) == {*d4.__all__, *d4._GROUPS, "__version__"}
    for group, (module, names) in GROUPS.items():
        assert all(hasattr(module, name) for name in names), group
    homes = collections.Counter(name for _, names in GROUPS.values() for name in names)
    assert not [name for name, count in homes.items() if count > 1], "a name has one home"


@pytest.mark.parametrize("name", d4._MOVED)
def test_an_old_name_is_the_new_one_and_says_so(name):
    assert name not in d4.__all__
    with pytest.warns(DeprecationWarning, match=rf"^dsv4jax\.{name} is now dsv4jax\.{d4._MOVED[name]}$"):
        old = getattr(d4, name)
    assert old is operator.attrgetter(d4._MOVED[name])(d4)
    with pytest.raises(AttributeError, match=f"no attribute '{name}_'"):
        getattr(d4, f"{name}_")


def test_an_old_name_does_not_stop_the_tests_of_others():
    """Where warnings of this project are errors, as in this test, this one is shown all the same."""
    with warnings.catch_warnings(record=True) as shown:
        assert operator.attrgetter("project")(d4) is d4.linear
    assert len(shown) == 1


def test_no_file_of_the_project_uses_an_old_name():
    names = "|".join(d4._MOVED)
    old = re.compile(rf"\b(?:d4|dsv4jax)\.(?:{names})\b|from dsv4jax import .*\b(?:{names})\b")
    folders = ("dsv4jax", "pallas_kernels", "tests", "docs", "notebooks", "examples", "benchmarks")
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    read = {path: path.read_text() for path in files if path.suffix in (".py", ".md", ".ipynb")}
    assert len(read) > 400
    assert old.search("cache = d4.restore(path)")
    about = ROOT / "tests" / "docs" / "test_public_api.py"
    assert not [f"{path}: {use[0]}" for path in read.keys() - {about} for use in old.finditer(read[path])]


@pytest.mark.parametrize("name", [*UPDATES, *READS])
def test_pieces_are_jitted_and_expose_the_function_under_the_jit(name):
    piece = getattr(d4.pieces, name)
    assert hasattr(piece, "lower"), "not under jit"
    assert inspect.isfunction(piece.__wrapped__)
    assert not hasattr(piece.__wrapped__, "lower"), "the twin under the jit must not donate"
    if name in UPDATES:
        assert next(iter(inspect.signature(piece).parameters)) == UPDATES[name]


def test_types_of_the_contract():
    classes = (d4.CachePlan, d4.KVCache, d4.StateCache, d4.PagedPool)
    for each in (*classes, d4.porting.LayerCacheSchema, d4.cache.LayerStack, d4.cache.Tables):
        assert vars(each)["__dataclass_params__"].frozen, each
    plan = d4.plan_cache(d4.DSV4Config.tiny())
    assert plan.memory_bytes() > plan.bytes_per_request > plan.bytes_per_token > 0
    assert isinstance(d4.KVCache.seq_lens, property)


def test_formats_of_the_contract():
    from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS

    assert list(KV_FORMATS) == ["f32", "bf16", "fp8_row", "fp8_tile64"]
    assert set(INDEXER_FORMATS) == {"f32", "bf16", "nvfp4", "mxfp4"}


def test_backends_lists_ops_and_is_the_callers_own():
    ops = d4.backends()
    assert ops
    assert all("xla" in names for names in ops.values()), "XLA is the reference of every op"
    ops.clear()
    assert d4.backends()


def test_the_model_and_the_version_are_attributes(monkeypatch):
    """Also of a folder that is on the path, but not installed."""
    assert d4.model is sys.modules["dsv4jax.model"]
    assert d4.__version__ == importlib.metadata.version("dsv4jax")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        assert importlib.reload(d4).__version__ == "unknown"
    assert importlib.reload(d4).__version__ != "unknown"


def test_importing_touches_no_device():
    """Starting a backend takes GPU memory and fixes the platform before the user's program has a say.

    In a fresh process, every module of the package; the last lines show that the probe would have noticed.
    """
    program = """
import importlib, pkgutil
import dsv4jax
for module in pkgutil.walk_packages(dsv4jax.__path__, "dsv4jax."):
    importlib.import_module(module.name)
from dsv4jax import DSV4Config, plan_cache
str(plan_cache(DSV4Config.flash()))  # host arithmetic alone
from jax._src import xla_bridge  # no public function tells
assert not xla_bridge.backends_are_initialized(), "import or planning started a backend"
import jax
jax.devices()
assert xla_bridge.backends_are_initialized()
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
