"""Caches and snapshots in files, written with orbax-checkpoint (``pip install 'dsv4jax[ckpt]'``).

    path/header.json    format, version, plan; CRC-32 of every file of leaves; a CRC-32 of the header itself
    path/leaves/        the leaves, as orbax stores arrays

A checkpoint is written next to ``path``, with the header last, and then renamed to ``path``. tensorstore, which orbax
uses, protects its index with checksums but not the bytes of an array. Therefore every file is checked before it is
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.create import abstract_cache
from dsv4jax.cache.shards import is_held_here
from dsv4jax.checks import Tree, check_concrete
from dsv4jax.config import DSV4Config, Json
from dsv4jax.plan import CachePlan, plan_cache
from dsv4jax.requests.dividing import over_mesh
from dsv4jax.requests.snapshot import LAYOUT, Snapshot, abstract_snapshot, differing_fields

FORMAT = "dsv4jax"
VERSION = 1  # version of the file format; increase it when a leaf's name, shape or meaning or a plan's fields change
CFG_FIELDS = tuple(field.name for field in dataclasses.fields(DSV4Config))
# A file that lacks the ratio of a kind was written before there was such a kind, and so has none of its layers.
RATIOS = tuple(name for name in CFG_FIELDS if name.endswith("_compression_ratio"))
CAPACITY = tuple(field.name for field in dataclasses.fields(CachePlan) if field.name not in LAYOUT)
NEWER = {"invariant": False}  # of these, what older files lack, and what their writers had; left out if it is that


def save(path: str | os.PathLike[str], value: KVCache | Snapshot) -> None:
    """Write a whole cache, or the requests of a snapshot, to a new folder.

    An interrupted save leaves no ``path``, only ``path.partial``, which the next one replaces. All leaves pass through
    this process's memory.

    Raises:
      ValueError: neither a cache nor a snapshot, traced, or other processes hold parts of it.
      FileExistsError: there is something at ``path``, or at ``path.partial`` what no save has left; nothing is
        overwritten.
      ImportError: orbax-checkpoint is not installed.
    """
    if not isinstance(value, KVCache | Snapshot):
        raise ValueError(f"save: expected a KVCache or a Snapshot, got {type(value).__name__}")
    check_concrete("save", value, "call it on a value that has come back")
    if not is_held_here(value):
        raise ValueError(
            "save: other processes hold parts of this cache: let each save snapshots of requests of its own shards, "
            "extract(sharding.shard_of(cache, number), slots) for each number of sharding.local_shards(cache)"
        )
    ocp = _orbax()
    with new_folder(path, ("header.json", "leaves")) as partial:
        # orbax does not accept empty arrays.
        leaves = {name: np.asarray(leaf) for name, leaf in _named_leaves(value).items() if leaf.size}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(partial / "leaves", args=ocp.args.PyTreeSave(leaves))
        header = _describe(value) | {"files": _checksums(partial / "leaves")}
        # A plan may contain NumPy integers, which JSON cannot encode.
        header = json.loads(json.dumps(header, default=lambda number: number.item()))
        sealed = {"header": header, "crc32": _checksum_of_json(header)}
        (partial / "header.json").write_text(json.dumps(sealed, indent=1) + "\n")


def restore(
    path: str | os.PathLike[str],
    plan: CachePlan | None = None,
    device: Tree = None,
    mesh: Mesh | None = None,
) -> KVCache | Snapshot:
    """Read what ``save`` wrote, bit for bit, whatever devices it was saved from.

    Args:
      path: the folder given to ``save``.
      plan: the plan that the reader expects. A cache must have exactly this plan. For a snapshot only configuration,
        formats and tails are compared, because ``insert`` accepts caches of any capacity. None accepts any plan.
      device: where to put the result, as for ``jax.device_put``: a device, a sharding, or a pytree of them. None means
        the default device.
      mesh: in place of ``device``, the devices of a cache, as for ``init_caches``. There may be more or fewer shards of
        requests than there were: slots are counted through all shards, and slot ``g`` of all is slot ``g % n`` of shard
        ``g // n``, where a shard has ``n``. Requests keep their order, rows and grants, and blocks move with them.
        Several processes make this call together, and each places the parts of its own devices.

    Raises:
      FileNotFoundError: ``path`` does not exist.
      ValueError: ``path`` is not a checkpoint of this library, has another version or plan, is incomplete or is
        damaged; the message says which. Or the mesh comes with a device or is given for a snapshot, has other axes,
        requests or blocks do not divide by its shards, or a shard lacks blocks for the requests that it would get.
      ImportError: orbax-checkpoint is not installed.
    """
    ocp, path = _orbax(), Path(path).absolute()
    if mesh is not None and device is not None:
        raise ValueError("restore: give device or mesh, and not both")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    header = _read_header(path)
    template = _template(header, plan, path)
    _check_files(header["files"], _checksums(path / "leaves"), path)
    specs = _named_leaves(template)
    # Restored as NumPy arrays, so that it does not matter which devices held them when they were saved.
    wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name, spec in specs.items() if spec.size}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        leaves = checkpointer.restore(path / "leaves", args=ocp.args.PyTreeRestore(restore_args=wanted))
    restored = []
    for name, spec in specs.items():
        leaf = leaves[name] if spec.size else np.zeros(spec.shape, spec.dtype)
        if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{path}: {name} is {leaf.dtype}{leaf.shape}, expected {spec.dtype}{spec.shape}")
        restored.append(leaf)
    value = jax.tree.unflatten(jax.tree.structure(template), restored)
    if mesh is None:
        return jax.device_put(value, device)
    if isinstance(value, Snapshot):
        raise ValueError(f"restore: {path} has a snapshot, which lies over no mesh: insert it into a cache that does")
    return over_mesh(value, mesh)


def _orbax() -> Tree:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError("save and restore need orbax-checkpoint: pip install 'dsv4jax[ckpt]'") from error
    return ocp


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], names: tuple[str, ...]) -> Iterator[Path]:
    """Give a folder to write to, which gets its name ``path`` when all is written.

    Args:
      path: of the new folder.
      names: what the names of everything written to it begin with. A folder ``path.partial`` that has nothing else was
        left by an interrupted save, and is removed.

    Raises:
      FileExistsError: there is something at ``path``, or something else at ``path.partial``.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists: save to a new folder and remove the old one afterwards")
    partial = path.with_name(path.name + ".partial")
    _remove_unfinished(partial, names)
    yield partial
    for entry in (*partial.rglob("*"), partial):  # else the new name could survive a power failure without its contents
        _sync(entry)
    partial.rename(path)
    _sync(path.parent)


def _remove_unfinished(partial: Path, names: tuple[str, ...]) -> None:
    """Remove what an interrupted save has left. Raises FileExistsError for anything else."""
    if not partial.exists():
        return
    if not partial.is_dir() or any(not entry.name.startswith(names) for entry in partial.iterdir()):
        raise FileExistsError(f"{partial} is where a save begins, and was left by none: move it away")
    shutil.rmtree(partial)


def _sync(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named_leaves(tree: KVCache | Snapshot) -> dict[str, jax.Array]:
    """Return the leaves by path, such as ``csa.state.window.nope``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of every file under a folder, by its path relative to the folder."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                crc = 0
                while piece := stream.read(1 << 24):
                    crc = zlib.crc32(piece, crc)
            found[file.relative_to(folder).as_posix()] = crc
    return found


def _checksum_of_json(value: object) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _describe(value: KVCache | Snapshot) -> dict[str, Json]:
    layout = value.plan if isinstance(value, KVCache) else value
    fields = {name: getattr(layout, name) for name in LAYOUT}
    fields |= {"cfg": dataclasses.asdict(layout.cfg), "tail_dtype": layout.tail_dtype.name}
    described = {"format": FORMAT, "version": VERSION, "layout": fields}
    if isinstance(value, KVCache):
        every = {name: getattr(value.plan, name) for name in CAPACITY}
        capacity = {name: given for name, given in every.items() if name not in NEWER or given != NEWER[name]}
        return described | {"cache": capacity, "shards": value.tables.num_free.shape[0]}
    return described | {"snapshot": {"num_requests": value.num_requests, "blocks": value.blocks}}


def _read_header(path: Path) -> dict[str, Json]:
    try:
        sealed = json.loads((path / "header.json").read_text())
    except OSError as error:
        raise ValueError(f"{path} is no checkpoint of {FORMAT}, or an unfinished one: {error}") from error
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{path} is damaged: header.json cannot be read: {error}") from error
    header = sealed.get("header") if isinstance(sealed, dict) else None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of {FORMAT}: header.json does not say so")
    if header.get("version") != VERSION:
        raise ValueError(f"{path} has version {header.get('version')}, this library reads version {VERSION}")
    if sealed.get("crc32") != _checksum_of_json(header):
        raise ValueError(f"{path} is damaged: header.json does not match its checksum")
    return header


def _template(header: dict[str, Json], expected: CachePlan | None, path: Path) -> KVCache | Snapshot:
    """Return the shapes and dtypes of what the header describes. Raises ValueError if another plan is expected."""
    try:
        layout = _exactly(header["layout"], LAYOUT)
        layout = layout | {"cfg": DSV4Config(**_exactly(layout["cfg"], CFG_FIELDS, optional=RATIOS))}
        any_capacity: dict[str, Json] = dict(max_requests=1, max_context=1, num_blocks=1)
        capacity = _exactly(header["cache"], CAPACITY, optional=tuple(NEWER)) if "cache" in header else any_capacity
        plan = plan_cache(**layout, **capacity)
        if "snapshot" in header:
            template = abstract_snapshot(plan, **header["snapshot"])
        else:
            cache = abstract_cache(plan)
            num_free = jax.ShapeDtypeStruct((header["shards"],), np.int32)  # each shard has its own count
            template = dataclasses.replace(cache, tables=dataclasses.replace(cache.tables, num_free=num_free))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has a plan that this version does not know: {error}") from error
    if expected is not None:
        names = LAYOUT + CAPACITY if "cache" in header else LAYOUT
        if found := differing_fields(plan, expected, names):
            raise ValueError(f"restore (saved against given): {path} is of another plan: " + "; ".join(found))
    return template


def _exactly(fields: dict[str, Json], names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Json]:
    """Return the fields, after checking that they are exactly these names, or lack only optional ones.

    Any other missing field must not be replaced by its default, which may not be what the writer had.
    """
    if unknown := sorted(set(fields) - set(names)):
        raise ValueError(f"unknown {', '.join(unknown)}")
    if missing := sorted(set(names) - set(fields) - set(optional)):
        raise ValueError(f"missing {', '.join(missing)}")
    return fields


def _check_files(written: dict[str, int], found: dict[str, int], path: Path) -> None:
    for name, checksum in written.items():
        if name not in found:
            raise ValueError(f"{path} is incomplete: leaves/{name} is missing")
        if checksum != found[name]:
            raise ValueError(f"{path} is damaged: leaves/{name} does not match its checksum")
