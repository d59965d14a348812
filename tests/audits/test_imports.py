"""Imports run one way: between the two packages, between rooms, and between modules. Read from the source, not run."""

import ast
import collections
import functools
import graphlib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Each room may import from itself and from the rooms after it.
ROOMS = {
    "dsv4jax": (
        *("generate", "model", "serialization", "requests", "pieces", "porting"),
        *("layer", "sharding", "cache", "weights", ""),
    ),
    "pallas_kernels": (
        "triton_gpu",
        "update",
        "attention",
        "scores",
        "selection",
        "products",
        "router",
        "streams",
        "",
        "language",
        "plugin",
        "tuned",
        "trees",
    ),
    "pallas_kernels.language": ("launch", "ptx", "simulator", ""),
}
# Rooms that stand beside each other, and know nothing of one another.
BESIDE = {
    "pallas_kernels": {"update", "attention", "scores", "selection", "products", "streams"},
    "pallas_kernels.language": {"ptx", "simulator"},
}
MAX_MODULES = 16  # in one folder
MAX_LINES = {"dsv4jax": 500, "pallas_kernels": 800, "tests": 500, "benchmarks": 500, "examples": 500}  # of a file

# Imports inside a function, and why: none of them hides a circle.
LAZY = {
    ("dsv4jax.layer.kernels.triton", "pallas_kernels.triton_gpu"): "Triton is an optional extra",
    ("pallas_kernels.language.launch", "pallas_kernels.language.ptx.naming"): "not every jaxlib has Mosaic GPU",
    ("pallas_kernels.language.launch", "pallas_kernels.language.ptx.tensor_memory"): "not every jaxlib has Mosaic GPU",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path for package in ("dsv4jax", "pallas_kernels") for path in (ROOT / package).rglob("*.py")
}


def imported(module: str, node: ast.AST) -> list[str]:
    """The modules of this project that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module} imports by a relative name"
        base = node.module or ""
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
    else:
        return []
    return [name for name in names if name in FILES]


@functools.cache  # and not when pytest collects tests, in each of its processes
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text()) for module, path in FILES.items()}


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {
        module: {name for node in ast.walk(tree) for name in imported(module, node)} for module, tree in trees().items()
    }


def room_of(package: str, module: str) -> str:
    """The folder below a package in which a module stands, its file where that is a room of its own, or ''."""
    first = module.removeprefix(package).lstrip(".").split(".")[0]
    return first if first in ROOMS[package] else ""


def test_the_kernels_know_nothing_of_the_library():
    upward = {module: names for module, names in imports().items() if module.startswith("pallas_kernels")}
    assert upward
    assert not [(a, b) for a, names in upward.items() for b in names if b.split(".")[0] == "dsv4jax"]


def test_the_library_reaches_kernels_through_their_package_and_the_table_of_gpus():
    used = {
        b for a, names in imports().items() if a.startswith("dsv4jax") for b in names if b.startswith("pallas_kernels")
    }
    kernels = {"pallas_kernels", "pallas_kernels.triton_gpu"}
    assert used <= kernels | {"pallas_kernels.language", "pallas_kernels.language.target"}
    assert "pallas_kernels" in used


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_downward(package):
    order, beside = ROOMS[package], BESIDE.get(package, set())
    inside = {module for module in FILES if module.startswith(f"{package}.")}
    assert inside
    for module in inside:
        for name in imports()[module]:
            if name not in inside:
                continue
            room, other = room_of(package, module), room_of(package, name)
            assert order.index(room) <= order.index(other), f"{module} imports {name}, which stands above it"
            assert room == other or not {room, other} <= beside, f"{module} imports {name}, which stands beside it"


def test_there_is_no_circle():
    graphlib.TopologicalSorter(imports()).prepare()  # raises CycleError, which names it


def test_no_import_hides_in_a_function_or_behind_type_checking():
    hidden = set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.If):
                hidden |= {(module, name) for inner in ast.walk(node) for name in imported(module, inner)}
    assert hidden == LAZY.keys()


def test_no_folder_holds_more_modules_than_one_can_overlook():
    sizes = collections.Counter(path.parent for path in FILES.values() if path.name != "__init__.py")
    assert not {folder: count for folder, count in sizes.items() if count > MAX_MODULES}


@pytest.mark.parametrize("folder", MAX_LINES)
def test_no_file_is_longer_than_one_reads_at_a_time(folder):
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lines
    assert not {path: count for path, count in lines.items() if count > MAX_LINES[folder]}


@pytest.mark.parametrize(
    "module", ["dsv4jax.model.forward_pass", "dsv4jax.requests.fork", "dsv4jax.cache.cache", "dsv4jax.layer.layer"]
)
def test_a_module_is_found_under_its_name(module):
    """No function of the package stands in its way."""
    import importlib
    import types

    import dsv4jax

    found: object = dsv4jax
    importlib.import_module(module)
    for name in module.split(".")[1:]:
        found = getattr(found, name)
    assert isinstance(found, types.ModuleType)


def test_the_audit_notices_a_circle():
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports() | {"dsv4jax.kinds": {"dsv4jax.plan"}}).prepare()
