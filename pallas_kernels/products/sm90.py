"""Products on Hopper: a warpgroup widens its rows of the weight in registers, and multiplies them by all rows of x."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.barriers import init_barriers
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARPGROUP, Condition, Value, select
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import HOPPER
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.products.activations import AHEAD, Activations
from pallas_kernels.products.split import TILE, Split
from pallas_kernels.products.weights import STAGE_BYTES, Factors, StoredTile, as_operand, widen

_MOST_STAGES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    split: Split
    groups: int
    columns: int
    rows: int
    inputs: int = 128  # of a chunk
    tiles: int = 1  # per warpgroup
    most_stages: int = _MOST_STAGES
    overlap: bool = True
    x_first: bool = True

    @property
    def owned(self) -> int:
        return -(-(self.columns // 8) // self.split.cluster)

    @property
    def all_tiles(self) -> int:
        return self.split.warpgroups * self.tiles

    @property
    def fixed_bytes(self) -> int:
        s = self.split
        received = s.cluster * self.owned * self.tiles * s.warpgroups * WARPGROUP * 16 if s.cluster > 1 else 0
        x = Activations.shared_bytes(self.columns, self.inputs)
        return x + received + Factors.shared_bytes(self.all_tiles, s.chunks) + 2048 + SCRATCH_BYTES

    @property
    def stages(self) -> int:
        room = HOPPER.shared_bytes - self.fixed_bytes
        return max(2, min(self.most_stages, self.split.chunks * self.tiles, room // (STAGE_BYTES * self.split.warpgroups)))

    def grid(self) -> Grid:
        s = self.split
        return Grid(
            blocks=(self.groups * s.blocks, -(-self.rows // self.columns)),
            warpgroups=s.warpgroups,
            cluster=s.cluster,
            shared_bytes=self.fixed_bytes - SCRATCH_BYTES + self.stages * STAGE_BYTES * s.warpgroups,
        )


def body(tuning: Tuning, block: tuple[int, int], machine: TensorCores, inputs, out: Buffer) -> None:
    s, columns, tiles, stages = tuning.split, tuning.columns, tuning.tiles, tuning.stages
    x, weight, scales = inputs
    outputs, k = weight.shape
    per_group = outputs // tuning.groups // TILE
    group, place = machine.block(0) // s.blocks, machine.block(0) % s.blocks
    warpgroup = machine.thread // WARPGROUP
    first_tile = place * tuning.all_tiles
    first = machine.rank * (s.chunks * tuning.inputs) if s.cluster > 1 else machine.constant(0, "i32")
    first_row = (group * per_group + first_tile) * TILE
    row = machine.block(1) * columns
    lanes = s.warpgroups * WARPGROUP

    activations = Activations.take(
        x, row, group * k + first, columns=columns, inputs=tuning.inputs, chunks=s.chunks, warpgroups=s.warpgroups
    )
    received = None
    if s.cluster > 1:
        received = Shared.take(machine, (s.cluster, tuning.owned, tiles, lanes, 4), "f32")
    factors = None if scales is None else Factors.take(machine, tuning.all_tiles, s.chunks)
    room = StoredTile.take_rooms(machine, s.warpgroups, stages)

    mine: list[tuple[Value, Condition, StoredTile]] = []
    for t in range(tiles):
        local = warpgroup * tiles + t
        there = True if per_group % tuning.all_tiles == 0 else first_tile + local < per_group
        mine.append((local, there, StoredTile.of(weight, room, local * TILE + first_row, first, there)))

    count = s.chunks * tiles
    loaded = []
    if tuning.x_first:
        loaded = [activations.load(machine.constant(i, "i32")) for i in range(AHEAD)]
    for n in range(stages - 1):
        mine[n % tiles][2].copy(n // tiles, n, n < count)
    if not tuning.x_first:
        loaded = [activations.load(machine.constant(i, "i32")) for i in range(AHEAD)]
    init_barriers(activations.staged)
    if factors is not None:
        factors.stage(scales, block, first_row, first, lanes)
    for i, part in enumerate(loaded):
        activations.store(i, part)
    machine.barrier("block" if s.cluster == 1 else "cluster")

    def chunk_step(chunk: Value, sums: list[list[Value]]) -> list[list[Value]]:
        sums = list(sums)
        following = activations.load(chunk + AHEAD)
        x_tile = activations.wait(chunk)
        for t in range(tiles):
            n = chunk * tiles + t
            stage = n % stages
            machine.wait_copies(pending=stages - 2)
            held = []
            for half in range(2):
                words = mine[t][2].load(stage, half)
                if factors is not None:
                    words = widen(words, factors.load(mine[t][0], chunk, half))
                else:
                    words = as_operand(words)
                held.append(words)
                operand = x_tile.k_major(half * tuning.inputs, tuning.inputs)
                new = machine.wgmma(sums[t], words, operand, columns=columns, dtype="bf16")
                if half == 0:
                    ahead = stages - 1 + t
                    mine[ahead % tiles][2].copy(chunk + ahead // tiles, (n + (stages - 1)) % stages, n + (stages - 1) < count)
                if half or not tuning.overlap:
                    new = machine.wgmma_wait(new)
                sums[t] = new
            machine.hold(held)
        activations.store(chunk + AHEAD, following)
        return sums

    zero = machine.constant(0.0, "f32")
    sums = machine.loop(s.chunks, chunk_step, [[zero] * (columns // 2) for _ in range(tiles)])

    lane = machine.thread
    for t, (local, there, _) in enumerate(mine):
        feature = local * TILE + first_row
        for n in range(columns // 8):
            part = sums[t][4 * n : 4 * n + 4]
            if received is None:
                _store(machine, out, feature, row, machine.constant(n, "i32"), part, there)
            else:
                received.store_floats(part, machine.rank, n % tuning.owned, t, lane, 0, rank=n // tuning.owned)
    if received is None:
        return
    machine.barrier("cluster")
    for t, (local, there, _) in enumerate(mine):
        for n in range(tuning.owned):
            parts = [received.load_floats(source, n, t, lane, 0) for source in range(s.cluster)]
            total = parts[0]
            for part in parts[1:]:
                total = [a + b for a, b in zip(total, part, strict=True)]
            _store(machine, out, local * TILE + first_row, row, machine.rank * tuning.owned + n, total, there)


def _store(machine: TensorCores, out: Buffer, feature: Value, row: Value, n, sums: list[Value], there) -> None:
    """Store eight columns of a product: the outputs of eight rows of x."""
    lane = machine.thread
    odd = (lane // 4) & 1
    m = row + n * 8 + lane % 4 * 2 + odd
    feature = feature + product_row(machine) - odd
    where = there & (m < out.shape[0])
    for i in range(2):
        a, b = sums[2 * i : 2 * i + 2]
        got = machine.shuffle_xor(select(odd == 0, b, a), 4)
        pair = [select(odd == 0, a, got), select(odd == 0, got, b)]
        out.store_floats(pair, m, feature + 8 * i, where=where)
