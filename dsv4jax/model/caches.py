"""The caches that a model needs: its own, and one for the block that makes drafts, with the same slots."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv4jax.cache.cache import KVCache, admit, release
from dsv4jax.cache.create import init_cache
from dsv4jax.cache.shards import DATA, automatic, of_rows
from dsv4jax.checks import check_type, integer
from dsv4jax.model.config import ModelConfig
from dsv4jax.plan import CachePlan, plan_cache
from dsv4jax.requests.fork import fork
from dsv4jax.requests.placing import choose_shards, rows_of_shards, slots_of_shards
from dsv4jax.requests.snapshot import Snapshot, extract, insert
from dsv4jax.requests.storage import new_folder, restore, save

# How the published models' rows and keys were rounded in training; ``plan_cache`` says why its own defaults differ.
TRAINED: dict[str, Any] = {"kv_format": "fp8_tile64", "indexer_format": "mxfp4", "hca_tail": "online"}

# In a pass. Each costs a run of the draft block and of the head, one after the other, and keeps the probabilities of
# the whole vocabulary; and it counts only if all before it were right.
MOST_DRAFTS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Requests outside of any cache, with what their drafts are made of."""

    model: Snapshot
    drafts: Snapshot | None  # None if no drafts are made


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """A model's cache and that of its drafts.

    Admit, fork, release, extract and insert requests here, so that both caches agree on slots and tokens.
    """

    model: KVCache
    drafts: KVCache | None  # None if no drafts are made

    def admit(self, n: int, where: jax.Array | None = None) -> tuple[Caches, jax.Array, jax.Array]:
        """Take slots for n new requests, as ``d4.admit`` does: (caches, slots int32 [n], ok bool [])."""
        model, slots, ok = admit(self.model, n, where)
        # The lowest free slots are taken, and the same ones are free in both.
        drafts = None if self.drafts is None else admit(self.drafts, n, where)[0]
        return Caches(model=model, drafts=drafts), slots, ok

    def admit_anywhere(self, tokens: jax.Array) -> tuple[Caches, jax.Array, jax.Array]:
        """Take slots on the shards with most free blocks, as ``d4.requests.admit_anywhere`` does.

        Returns (caches, shards int32 [n], slots int32 [n]).
        """
        shards = choose_shards(self.model, tokens)
        where = rows_of_shards(self.model, shards)
        caches, slots, _ = self.admit(where.size, where)
        return caches, shards, slots_of_shards(slots, shards)

    def fork(self, source_slot: jax.Array, target_slots: jax.Array) -> tuple[Caches, jax.Array]:
        """Make each target slot a request with the source's contents, as ``d4.fork`` does: (caches, ok bool []).

        Over a mesh, sources and targets are as many for each shard, and ``ok`` is bool [shards].
        """
        model, ok = fork(self.model, source_slot, target_slots)
        if self.drafts is None:
            return Caches(model=model, drafts=None), ok
        # A window needs no blocks, so that this one cannot fail where the other did not.
        drafts, _ = fork(self.drafts, source_slot, jnp.where(of_rows(ok, target_slots.size), target_slots, -1))
        return Caches(model=model, drafts=drafts), ok

    def release(self, slots: jax.Array) -> Caches:
        """Free slots int32 [B], as ``d4.release`` does."""
        drafts = None if self.drafts is None else release(self.drafts, slots)
        return Caches(model=release(self.model, slots), drafts=drafts)

    def extract(self, slots: Sequence[int] | np.ndarray | jax.Array) -> Snapshots:
        """Copy requests out of both caches, as ``d4.extract`` does."""
        drafts = None if self.drafts is None else extract(self.drafts, slots)
        return Snapshots(model=extract(self.model, slots), drafts=drafts)

    def insert(self, snapshots: Snapshots) -> tuple[Caches, jax.Array, jax.Array]:
        """Admit the requests of snapshots, as ``d4.insert`` does: (caches, slots int32 [n], ok bool []).

        Raises:
          ValueError: as ``d4.insert``; or only one of the two has drafts.
        """
        check_type("snapshots", snapshots, Snapshots)
        if (self.drafts is None) != (snapshots.drafts is None):
            have = (
                ("caches have", "snapshots do not") if snapshots.drafts is None else ("snapshots have", "caches do not")
            )
            raise ValueError(f"insert: the {have[0]} rows for drafts, and the {have[1]}")
        model, slots, ok = insert(self.model, snapshots.model)
        if self.drafts is None or snapshots.drafts is None:
            return Caches(model=model, drafts=None), slots, ok
        # Slots are taken as by ``admit``. A snapshot of a negative length is not inserted.
        lengths = jnp.where(of_rows(ok, snapshots.drafts.num_requests), snapshots.drafts.seq_lens, -1)
        drafts, _, also_ok = insert(self.drafts, dataclasses.replace(snapshots.drafts, seq_lens=lengths))
        return Caches(model=model, drafts=drafts), slots, ok & also_ok


def init_caches(
    cfg: ModelConfig, max_requests: int, max_context: int, drafts: int = 0, *, mesh: Mesh | None = None, **formats: Any
) -> Caches:
    """Return empty caches for a model.

    Args:
      cfg: the model's sizes.
      max_requests: number of slots.
      max_context: tokens that a request can hold.
      drafts: the most tokens that are guessed at a time, up to ``MOST_DRAFTS``, or with DSpark the rows of its block;
        0 = no cache for drafts.
      mesh: as for ``load_model``. Requests and blocks are then divided over its axis "data". None = one device.
      formats: further arguments of ``plan_cache``. Unless given, rows, keys and tails are stored as in the models'
        training, and not as ``plan_cache`` has them: ``kv_format="fp8_tile64"``, ``indexer_format="mxfp4"``,
        ``hca_tail="online"``.

    Raises:
      ValueError: as ``plan_cache``, there are too many drafts, or requests or blocks do not divide.
    """
    check_type("cfg", cfg, ModelConfig)
    drafts = integer("drafts", drafts, least=0)
    if cfg.dspark is not None and drafts > cfg.dspark.block_size:
        rows = cfg.dspark.block_size
        raise ValueError(f"drafts must be at most {rows}, the rows of the model's DSpark block, got {drafts}")
    if drafts > MOST_DRAFTS:
        raise ValueError(
            f"drafts must be at most {MOST_DRAFTS}, got {drafts}: each costs a run of the draft block and of the head, "
            "and counts only if all before it were right"
        )
    mesh = None if mesh is None else automatic(mesh)
    plan = plan_cache(cfg.attention, max_requests, max_context, **(TRAINED | formats))
    if "num_blocks" not in formats:
        plan = _divisible(plan, mesh)
    if not drafts:
        return empty_caches(plan, None, mesh)
    # Multi-token prediction stores guesses past the end of the request's tokens, in a copy that is then forgotten.
    of_drafts = plan_cache(
        cfg.draft_attention,
        max_requests,
        max_context + drafts,
        plan.kv_format,
        plan.indexer_format,
        plan.tail_dtype,
        invariant=plan.invariant,
    )
    return empty_caches(plan, _divisible(of_drafts, mesh), mesh)


def _divisible(plan: CachePlan, mesh: Mesh | None) -> CachePlan:
    """The plan with as many more blocks as make them divide by a mesh's shards of requests."""
    shards = 1 if mesh is None else mesh.shape[DATA]
    return dataclasses.replace(plan, num_blocks=-(-plan.num_blocks // shards) * shards)


def empty_caches(model: CachePlan, drafts: CachePlan | None, mesh: Mesh | None) -> Caches:
    """Return empty caches of these plans, over a mesh if one is given."""

    def empty(plan: CachePlan) -> KVCache:
        return dataclasses.replace(init_cache(plan, mesh), mesh=mesh)

    return Caches(model=empty(model), drafts=None if drafts is None else empty(drafts))


# What a folder of both has; each is a folder as ``d4.requests.save`` writes it.
_FOLDERS = "model", "drafts"


def save_caches(path: str | os.PathLike[str], value: Caches | Snapshots) -> None:
    """Write both caches, or the requests of snapshots of both, to a new folder; see ``d4.requests.save``.

    Raises:
      ValueError, FileExistsError, ImportError: as ``d4.requests.save``.
    """
    if not isinstance(value, Caches | Snapshots):
        raise ValueError(f"save_caches: expected Caches or Snapshots, got {type(value).__name__}")
    with new_folder(path, _FOLDERS) as partial:
        partial.mkdir(parents=True)
        for name in _FOLDERS:
            if (one := getattr(value, name)) is not None:
                save(partial / name, one)


def restore_caches(
    path: str | os.PathLike[str],
    plans: tuple[CachePlan, CachePlan | None] | None = None,
    device: Any = None,
    mesh: Mesh | None = None,
) -> Caches | Snapshots:
    """Read what ``save_caches`` wrote, bit for bit.

    Args:
      path: the folder given to ``save_caches``.
      plans: those of the model's cache and of the drafts' that the reader expects, as for ``d4.requests.restore``.
      device, mesh: as for ``d4.requests.restore``.

    Raises:
      FileNotFoundError, ValueError, ImportError: as ``d4.requests.restore``; or drafts are expected and there are none,
        or the other way round.
    """
    path = Path(path)
    has_drafts = (path / "drafts").exists()
    if plans is not None and (plans[1] is not None) != has_drafts:
        raise ValueError(f"{path} has {'rows' if has_drafts else 'no rows'} for drafts, unlike the plans")
    wanted_model, wanted_drafts = plans or (None, None)
    model = restore(path / "model", wanted_model, device, mesh)
    drafts = restore(path / "drafts", wanted_drafts, device, mesh) if has_drafts else None
    if isinstance(model, Snapshot):
        assert not isinstance(drafts, KVCache)
        return Snapshots(model=model, drafts=drafts)
    assert not isinstance(drafts, Snapshot)
    return Caches(model=model, drafts=drafts)
