"""What is restored equals what was saved. Otherwise it is refused, with a message that says why."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint", reason="files are written by orbax, of the extra 'ckpt'")
import orbax.checkpoint as ocp

import dsv4jax as d4
from dsv4jax.requests import storage
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    CFG,
    FORMATS,
    LAYERS,
    TOKENS,
    assert_same,
    feed,
    garbage,
    ids,
    random_params,
    sequence,
    small_plan,
)
from tests.support.paths import DATA


def filled(**options) -> tuple[d4.KVCache, jax.Array]:
    """Return a cache of random bytes that holds four requests, of which the second is too short for an entry."""
    cache, slots, ok = d4.admit(d4.init_cache(small_plan(**options)), BATCH)
    assert ok
    num_new = ids(33, 3, 16, 20)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    assert ok
    return garbage(d4.advance(cache, slots, num_new)), slots


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, d4.requests.Snapshot]:
    """Return a snapshot and its folder, which no test changes."""
    cache, slots = filled(kv_format="fp8_row")
    path = tmp_path_factory.mktemp("saved") / "requests"
    snapshot = d4.extract(cache, slots[:1])
    d4.requests.save(path, snapshot)
    return path, snapshot


@pytest.mark.parametrize("name", ["fp8_row_nvfp4_ring", "fp8_tile64_mxfp4_online"])
def test_files_of_an_earlier_version_of_the_library_are_read(name):
    """``tests/data/saved`` was written before modules were moved into packages.

    It has a cache, and its first request alone.
    """
    cache, request = (d4.requests.restore(DATA / "saved" / f"{what}_{name}") for what in ("cache", "request"))
    assert isinstance(cache, d4.KVCache)
    assert isinstance(request, d4.requests.Snapshot)
    assert cache.plan.cfg == CFG
    assert cache.seq_lens.tolist() == [37, 18, 0]
    assert d4.verify(cache) == []
    assert_same(d4.extract(cache, [0]), request)
    cache, slots, ok = d4.insert(d4.release(cache, ids(0)), request)
    assert ok
    assert_same(d4.extract(cache, slots), request)


@pytest.mark.parametrize("options", first_of(FORMATS.values(), count=2), ids=FORMATS)
def test_caches_and_snapshots_come_back_bit_for_bit(options, tmp_path):
    cache, slots = filled(**options)
    for name, value in (("cache", cache), ("requests", d4.extract(cache, slots[::2]))):
        d4.requests.save(tmp_path / name, value)
        restored = d4.requests.restore(str(tmp_path / name), cache.plan)
        assert_same(restored, value)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_requests_without_entries_have_empty_leaves(tmp_path):
    cache, slots = filled()
    snapshot = d4.extract(cache, slots[1:2])
    assert snapshot.blocks == 0
    d4.requests.save(tmp_path / "short", snapshot)
    assert_same(d4.requests.restore(tmp_path / "short"), snapshot)


@pytest.mark.slow
def test_a_restored_cache_goes_on_in_place_as_the_saved_one(tmp_path):
    cache, slots, ok = d4.admit(d4.init_cache(small_plan()), BATCH)
    assert ok
    xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate((13, 8, 3, 16))]
    splits = [[8, 5], [8], [3], [8, 8]]
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    d4.requests.save(tmp_path / "cache", cache)
    restored = d4.requests.restore(tmp_path / "cache", cache.plan, jax.devices()[0])
    for number in (9, 10):
        xs = [sequence(number, 5, CFG.hidden_size)] * BATCH
        want, cache = feed(random_params(), xs, cache, slots, [[5]] * BATCH, layers=LAYERS, width=TOKENS)
        got, restored = feed(random_params(), xs, restored, slots, [[5]] * BATCH, layers=LAYERS, width=TOKENS)
        assert_same(got, want)
        assert_same(restored, cache)
    jax.jit(d4.release, donate_argnums=0)(
        d4.requests.restore(tmp_path / "cache"), slots
    )  # its buffers can be given away


def test_an_invariant_cache_is_restored_as_one(tmp_path):
    plan = small_plan(max_requests=1, num_blocks=1, invariant=True)
    d4.requests.save(tmp_path / "cache", d4.init_cache(plan))
    restored = d4.requests.restore(tmp_path / "cache")
    assert isinstance(restored, d4.KVCache)
    assert restored.plan == plan
    with pytest.raises(ValueError, match="invariant"):
        d4.requests.restore(tmp_path / "cache", small_plan(max_requests=1, num_blocks=1))


def test_plans_of_numpy_integers_and_no_devices_in_the_files(tmp_path):
    plan = small_plan(max_requests=np.int64(2), num_blocks=np.int32(3))
    cache = d4.init_cache(plan)
    d4.requests.save(tmp_path / "cache", cache)
    assert_same(d4.requests.restore(tmp_path / "cache", plan), cache)
    header = json.loads((tmp_path / "cache/header.json").read_text())["header"]
    assert header["cache"] == {"max_requests": 2, "max_context": 80, "num_blocks": 3}
    assert not list((tmp_path / "cache").rglob("_sharding")), "devices are not part of a saved cache"


def test_a_cache_of_several_shards(tmp_path):
    """Shards differ only in ids and counts of the tables. The reader chooses which devices they are restored to."""
    cache, _ = filled()
    tables = dataclasses.replace(cache.tables, num_free=ids(4, 5))
    cache = dataclasses.replace(cache, tables=tables)
    d4.requests.save(tmp_path / "cache", cache)
    places = jax.tree.map(lambda leaf: jax.sharding.SingleDeviceSharding(jax.devices()[0]), cache)
    assert_same(d4.requests.restore(tmp_path / "cache", cache.plan, places), cache)
    for refused in (d4.describe, lambda cache: d4.extract(cache, [0])):
        with pytest.raises(ValueError, match=r"this cache has 2 shards .*: give it one of them: sharding.shard_of"):
            refused(cache)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "cache_message", "snapshot_message"),
    [
        (dict(kv_format="bf16"), "kv_format: f32 against bf16$", "kv_format: f32 against bf16$"),
        (dict(hca_tail="online"), "hca_tail: ring against online$", "hca_tail: ring against online$"),
        (
            dict(max_context=96, num_blocks=15),
            "max_context: 80 against 96; num_blocks: 14 against 15$",
            None,  # goes into a cache of any capacity
        ),
        (dict(max_requests=6), "max_requests: 5 against 6$", None),
    ],
)
def test_another_plan_is_refused_field_by_field(options, cache_message, snapshot_message, tmp_path):
    cache, slots = filled()
    plan = small_plan(**options)
    for value, message in ((cache, cache_message), (d4.extract(cache, slots[1:2]), snapshot_message)):
        path = tmp_path / type(value).__name__
        d4.requests.save(path, value)
        if message is None:
            assert_same(d4.requests.restore(path, plan), value)
        else:
            with pytest.raises(ValueError, match=rf"\(saved against given\): {path} is of another plan: {message}"):
                d4.requests.restore(path, plan)
    if "kv_format" in options:
        other = dataclasses.replace(plan, cfg=dataclasses.replace(CFG, norm_eps=1e-5), kv_format="f32")
        with pytest.raises(ValueError, match=r"of another plan: cfg\.norm_eps: 1e-06 against 1e-05$"):
            d4.requests.restore(tmp_path / "KVCache", other)


def reseal(path: Path, **changes: Any) -> None:
    """Rewrite a header with a matching checksum."""
    header = json.loads((path / "header.json").read_text())["header"] | changes
    sealed = {"header": header, "crc32": storage._checksum_of_json(header)}
    (path / "header.json").write_text(json.dumps(sealed))


def test_another_version_is_refused(saved, tmp_path):
    path = tmp_path / "requests"
    d4.requests.save(path, saved[1])
    reseal(path, version=2)
    with pytest.raises(ValueError, match=f"{path} has version 2, this library reads version 1$"):
        d4.requests.restore(path)
    reseal(path, version=1, layout={**layout_of(path), "kv_format": "fp7"})
    with pytest.raises(ValueError, match=f"{path} has a plan that this version does not know: kv_format must be"):
        d4.requests.restore(path)
    layout: dict[str, Any] = layout_of(path) | {"kv_format": "fp8_row"}
    without = {name: value for name, value in layout.items() if name != "hca_tail"}
    for changes, what in (
        (dict(layout={**layout, "cfg": {**layout["cfg"], "sinks": 1}}), "unknown sinks"),
        (dict(layout={**layout, "cfg": {**layout["cfg"], "o_groups": 0}}), ".*o_groups"),
        (dict(layout={**layout, "sinks": 1}), "unknown sinks"),
        (dict(layout=without), "missing hca_tail"),
        (dict(layout=layout, cache=dict(max_requests=1, max_context=80)), "missing num_blocks"),
        (dict(layout=None), ""),
    ):
        changed = tmp_path / "changed"
        shutil.copytree(path, changed)
        reseal(changed, **changes)
        with pytest.raises(ValueError, match=f"{changed} has a plan that this version does not know: {what}"):
            d4.requests.restore(changed)
        shutil.rmtree(changed)
    reseal(path, format="something")
    with pytest.raises(ValueError, match=f"{path} is no checkpoint of dsv4jax: header.json does not say so"):
        d4.requests.restore(path)
    reseal(path, format="dsv4jax", layout={**layout_of(path), "kv_format": "fp8_row", "tail_dtype": "bfloat16"})
    with pytest.raises(ValueError, match=rf"{path}: csa.state.tail.ka is float32\(1, 1, 4, 136\), expected bfloat16"):
        d4.requests.restore(path)


def layout_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "header.json").read_text())["header"]["layout"]


def test_every_file_is_guarded_against_truncation_and_flipped_bits(saved, tmp_path):
    path = tmp_path / "requests"
    d4.requests.save(path, saved[1])
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert max(file.stat().st_size for file in files) > 10_000, "the arrays are among them"
    rng = np.random.default_rng(0)
    for file in files:
        whole = file.read_bytes()
        damaged = [whole[: len(whole) // 2], b""]
        for _ in range(6):  # of the low bits: a flipped case, as of 1e-6, is no damage
            at = int(rng.integers(len(whole) - 1))  # the last character of the header is a line end
            damaged.append(whole[:at] + bytes([whole[at] ^ (1 << int(rng.integers(5)))]) + whole[at + 1 :])
        for content in damaged:
            file.write_bytes(content)
            with pytest.raises(ValueError, match=f"^{path} (is damaged|has version|is no checkpoint)") as refusal:
                d4.requests.restore(path)
            assert file.name == "header.json" or f"{file.relative_to(path)} does not match" in str(refusal.value)
        file.unlink()
        with pytest.raises(ValueError, match=f"^{path} is (incomplete|no checkpoint).*{file.name}"):
            d4.requests.restore(path)
        file.write_bytes(whole)
    assert_same(d4.requests.restore(path), saved[1])


@pytest.mark.parametrize("stage", ["leaves", "checksums", "rename"])
def test_an_interrupted_save_is_never_taken_for_a_whole_one(stage, saved, tmp_path, monkeypatch):
    path = tmp_path / "requests"

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    owner, name = {
        "leaves": (ocp.PyTreeCheckpointHandler, "finalize"),
        "checksums": (storage, "_checksums"),
        "rename": (Path, "rename"),
    }[stage]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt):
            d4.requests.save(path, saved[1])
    with pytest.raises(FileNotFoundError, match=f"{path} does not exist"):
        d4.requests.restore(path)
    partial = tmp_path / "requests.partial"
    assert partial.exists()
    if stage != "rename":  # by then the rest is there
        with pytest.raises(ValueError, match=f"{partial} is no checkpoint of dsv4jax, or an unfinished one"):
            d4.requests.restore(partial)
    d4.requests.save(path, saved[1])
    assert not partial.exists()
    assert_same(d4.requests.restore(path), saved[1])


def test_nothing_is_overwritten(saved, tmp_path):
    path, snapshot = saved
    theirs = tmp_path / "requests.partial"
    theirs.mkdir()
    (theirs / "leaves").mkdir()
    (theirs / "notes.txt").write_text("not ours")
    with pytest.raises(FileExistsError, match=f"{theirs} .* move it away"):
        d4.requests.save(tmp_path / "requests", snapshot)
    assert sorted(file.name for file in theirs.iterdir()) == ["leaves", "notes.txt"]
    with pytest.raises(FileExistsError, match=f"{path} exists: save to a new folder"):
        d4.requests.save(path, snapshot)
    assert_same(d4.requests.restore(path), snapshot)


def test_what_is_neither_a_cache_nor_a_snapshot(tmp_path):
    with pytest.raises(ValueError, match="save: expected a KVCache or a Snapshot, got dict"):
        d4.requests.save(tmp_path / "x", {})  # type: ignore[arg-type]
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path / 'folder'} is no checkpoint of dsv4jax, or an unfinished one"):
        d4.requests.restore(tmp_path / "folder")


def test_without_orbax_the_message_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"save and restore need orbax-checkpoint: pip install 'dsv4jax\[ckpt\]'"):
        d4.requests.restore(tmp_path)


@pytest.mark.slow
def test_importing_the_library_imports_neither_orbax_nor_matplotlib():
    program = """
import importlib, pkgutil, sys
import dsv4jax
for module in pkgutil.walk_packages(dsv4jax.__path__, "dsv4jax."):
    importlib.import_module(module.name)
assert not {"orbax", "matplotlib", "tensorstore"} & sys.modules.keys()
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
