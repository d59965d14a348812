"""Pairs of a token and an expert in tiles (``tiles``), sorted by the warps of a block, or of a cluster of blocks.

It is a counting sort. Each warp has adjacent pairs. It goes through them 32 at a time, and counts for each of them how
many of the same expert it had before. How many pairs an expert has in all gives where its pairs begin. The blocks of a
cluster order their pairs in shared memory first, where there is room: pairs of one expert are then stored side by side,
and not one by one all over the result. Of 24,576 pairs that saves a quarter of the launch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from pallas_kernels.language.lanes import add, fold_tree, running_sum
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import Condition, Value, select
from pallas_kernels.router.tiles import SMALL, OwnExperts, RoutedTiles

_SCANNED = 4  # numbers of an expert that are added up over experts, at most
_UNROLLED = 8  # steps of a warp, up to which their pairs are loaded together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ordered:
    """The pairs of a block, in their order."""

    pairs: Shared  # i32 [pairs, 2] each with its expert
    begins: Shared  # i32 [experts and padding] where those of each begin

    @staticmethod
    def shared_bytes(num_experts: int, count: int) -> int:
        return 8 * count + 4 * _padded(num_experts) if count else 0

    @classmethod
    def take(cls, machine: Machine, num_experts: int, count: int) -> Ordered | None:
        if not count:
            return None
        kinds = _padded(num_experts)
        return cls(pairs=Shared.take(machine, (count, 2), "i32"), begins=Shared.take(machine, (kinds,), "i32"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lists:
    """The shared memory of a block that sorts pairs."""

    machine: Machine
    num_experts: int
    warps: int  # of the block
    cluster: int  # blocks that sort together
    counts: Shared  # i32 [warps, experts and padding] pairs so far; then how many are in earlier warps
    masks: Shared  # i32 [warps, experts and padding] lanes with such a pair in this step
    totals: Shared  # i32 [cluster, experts and padding] pairs of each block
    begins: Shared  # i32 [experts and padding] where this block's pairs of each begin
    of_warps: Shared  # i32 [warps, 4] pairs and small tiles; then, where there are any, other tiles and own pairs
    ordered: Ordered | None  # None if pairs are stored one by one

    @staticmethod
    def of_block(pairs: int, warps: int, cluster: int) -> int:
        """Return how many of so many pairs a block sorts, which are as many for each lane."""
        return -(-pairs // (cluster * warps * WARP)) * warps * WARP

    @staticmethod
    def shared_bytes(num_experts: int, warps: int, cluster: int = 1, ordered: int = 0) -> int:
        rows = _padded(num_experts) * (2 * warps + cluster + 1)
        return 4 * rows + 16 * warps + 16 + Ordered.shared_bytes(num_experts, ordered)

    @classmethod
    def take(cls, machine: Machine, num_experts: int, warps: int, cluster: int = 1, ordered: int = 0) -> Lists:
        """Take it, with room to order so many pairs, which are either all that a block has or none."""
        kinds = _padded(num_experts)
        counts, masks, totals, begins = (
            Shared.take(machine, (*lead, kinds), "i32") for lead in ((warps,), (warps,), (cluster,), ())
        )
        return cls(
            machine=machine,
            num_experts=num_experts,
            warps=warps,
            cluster=cluster,
            counts=counts,
            masks=masks,
            totals=totals,
            begins=begins,
            of_warps=Shared.take(machine, (warps, _SCANNED), "i32"),
            ordered=Ordered.take(machine, num_experts, ordered),
        )

    def clear(self) -> None:
        """Set what a warp counts with to zero. Warps do it for themselves."""
        zeros = [self.machine.constant(0, "i32")] * 4
        for array in (self.counts, self.masks):
            of_warp = array[self.machine.thread // WARP]
            for i in range(0, array.shape[1], 4 * WARP):
                at = self.machine.thread % WARP * 4 + i
                of_warp.store_words(zeros, at, where=at < array.shape[1])
        self.machine.barrier("warp")

    def sort(
        self,
        pairs: int,
        expert_of: Callable[[Value, Condition], Value],
        tiles: RoutedTiles,
        own: OwnExperts | None = None,
    ) -> None:
        """Store the tiles of so many pairs, of which those of no expert are padding.

        ``expert_of`` loads the expert of a pair by its number, if it exists. With ``own`` only their tiles are stored.
        """
        machine = self.machine
        steps = self.of_block(pairs, self.warps, self.cluster) // (WARP * self.warps)
        warp, lane = machine.thread // WARP, machine.thread % WARP
        rank = machine.rank if self.cluster > 1 else machine.constant(0, "i32")
        first = (rank * self.warps + warp) * (steps * WARP) + lane
        counts, masks = self.counts[warp], self.masks[warp]
        found = []
        for begin in range(0, steps, _UNROLLED):
            numbers = [first + i * WARP for i in range(begin, min(begin + _UNROLLED, steps))]
            kinds = [self._kind(expert_of(number, number < pairs)) for number in numbers]
            for number, kind in zip(numbers, kinds, strict=True):
                there = number < pairs
                masks.add_int(machine.constant(1, "i32") << lane, kind, where=there)
                machine.barrier("warp")
                mask, before = masks.load_int(kind), counts.load_int(kind)
                lower = mask & ((machine.constant(1, "i32") << lane) - 1)
                machine.barrier("warp")
                leads = there & (lower == 0)
                counts.store_int(before + machine.population_count(mask), kind, where=leads)
                masks.store_int(machine.constant(0, "i32"), kind, where=leads)
                machine.barrier("warp")
                found.append((number, kind, before + machine.population_count(lower)))
        machine.barrier("block")
        self._add_up(tiles, rank, own)
        for number, kind, before in found:
            place = counts.load_int(kind) + before
            if self.ordered is None:
                tiles.pairs.store_int(number, self.begins.load_int(kind) + place, where=number < pairs)
            else:
                place = self.ordered.begins.load_int(kind) + place
                self.ordered.pairs.store_words([number, kind], place, 0, where=number < pairs)
        if self.ordered is not None:
            machine.barrier("block")
            most = self.ordered.pairs.shape[0]
            self._store(self.ordered, (rank * -most + pairs).maximum(0).minimum(most), tiles)

    def _store(self, ordered: Ordered, count: Value, tiles: RoutedTiles) -> None:
        """Store so many ordered pairs."""
        for i in range(0, ordered.pairs.shape[0], self.warps * WARP):
            at = self.machine.thread + i
            number, kind = ordered.pairs.load_words(at, 0, count=2)
            kind = select(at < count, kind, 0)
            place = at - ordered.begins.load_int(kind) + self.begins.load_int(kind)
            tiles.pairs.store_int(number, place, where=at < count)

    def _kind(self, expert: Value) -> Value:
        """Return the number of an expert, or that of padding, which comes after them."""
        return select((expert >= 0) & (expert < self.num_experts), expert, self.num_experts)

    def _add_up(self, tiles: RoutedTiles, rank: Value, own: OwnExperts | None) -> None:
        """Find where the pairs of each expert begin, and store the tiles."""
        machine, thread, rows = self.machine, self.machine.thread, tiles.rows
        kinds, zero = self.num_experts + 1, machine.constant(0, "i32")
        of_lane = -(-kinds // (self.warps * WARP))
        mine = [thread * of_lane + i for i in range(of_lane)]
        there = [kind < kinds for kind in mine]
        safe = [kind.minimum(kinds) for kind in mine]  # the lanes beyond load what nobody stores
        totals = []
        for kind, exists in zip(safe, there, strict=True):
            of_warps = [self.counts.load_int(warp, kind) for warp in range(self.warps)]
            through = list(itertools.accumulate(of_warps))
            for warp in range(1, self.warps):
                self.counts.store_int(through[warp - 1], warp, kind, where=exists)
            self.counts.store_int(zero, 0, kind, where=exists)
            totals.append(select(exists, through[-1], 0))
        earlier, of_block = [zero] * of_lane, totals[:]
        if self.cluster > 1:
            for to in range(self.cluster):
                for total, kind, exists in zip(totals, mine, there, strict=True):
                    self.totals.store_int(total, rank, kind, where=exists, rank=to)
            machine.barrier("cluster")
            for i, kind in enumerate(safe):
                of_blocks = [self.totals.load_int(block, kind) for block in range(self.cluster)]
                before = [select(rank > block, count, 0) for block, count in enumerate(of_blocks)]
                earlier[i] = fold_tree(add, before)
                totals[i] = select(there[i], fold_tree(add, of_blocks), 0)
        begin, count = (zero, self.num_experts) if own is None else (own.first.load_int(0), own.count)
        own_totals = [
            select((kind >= begin) & (kind < begin + count), total, 0) for kind, total in zip(mine, totals, strict=True)
        ]
        in_tiles, has_large = [(total + (rows - 1)) // rows for total in own_totals], rows > SMALL
        larges = [self._larges(total, number, rows) for total, number in zip(own_totals, in_tiles, strict=True)]
        smalls = [all_of_it - large for all_of_it, large in zip(in_tiles, larges, strict=True)]
        scanned = totals, smalls, *[larges] * has_large, *[of_block] * (self.ordered is not None)
        (begins, _), (smalls_before, all_smalls), *others = self._scan(*scanned)
        larges_before, all_larges = others[0] if has_large else (larges, zero)
        tiles.count.store_words([all_larges, all_larges + all_smalls], 0, where=(thread == 0) & (rank == 0))
        for i, kind in enumerate(mine):
            self.begins.store_int(begins[i] + earlier[i], kind, where=there[i])
            if self.ordered is not None:
                self.ordered.begins.store_int(others[-1][0][i], kind, where=there[i])

            def store(n: Value, _: None, i: int = i, kind: Value = kind) -> None:
                small = all_larges + smalls_before[i] + n - larges[i]
                is_large, of_small = n < larges[i], min(rows, SMALL)
                at = select(is_large, larges_before[i] + n, small)
                done = n * of_small + n.minimum(larges[i]) * (rows - of_small)
                most = select(is_large, machine.constant(rows, "i32"), of_small)
                tiles.tiles.store_int(kind - begin, at, 0)
                tiles.tiles.store_int(begins[i] + done, at, 1)
                tiles.tiles.store_int((totals[i] - done).minimum(most), at, 2)

            machine.loop(select(rank == 0, in_tiles[i], 0), store)
        machine.barrier("block")

    def _larges(self, total: Value, in_tiles: Value, rows: int) -> Value:
        """Return how many tiles of so many pairs of an expert are not small."""
        if rows <= SMALL:
            return self.machine.constant(0, "i32")
        left = total - (in_tiles - 1) * rows  # after full tiles
        has_two = (in_tiles > 1) & (left <= 2 * SMALL - rows)
        return in_tiles - select(left <= SMALL, select(has_two, self.machine.constant(2, "i32"), 1), 0)

    def _scan(self, *counts: list[Value]) -> list[tuple[list[Value], Value]]:
        """Return, for some numbers of each expert of the lane, what earlier ones have of each; and all of it."""
        machine, warp = self.machine, self.machine.thread // WARP
        through = [list(itertools.accumulate(of_kind)) for of_kind in counts]
        of_lanes = [running_sum(machine, each[-1]) for each in through]
        size = 2 if len(counts) <= 2 else _SCANNED
        words = [*of_lanes, *of_lanes[: size - len(counts)]]
        self.of_warps.store_words(words, warp, 0, where=machine.thread % WARP == WARP - 1)
        machine.barrier("block")
        of_warps = [self.of_warps.load_words(n, 0, count=size) for n in range(self.warps)]
        results = []
        for which, (each, of_lane) in enumerate(zip(through, of_lanes, strict=True)):
            before = [select(warp > n, total[which], 0) for n, total in enumerate(of_warps)]
            begin = of_lane - each[-1] + fold_tree(add, before)
            earlier = [begin, *(begin + before for before in each[:-1])]
            results.append((earlier, fold_tree(add, [total[which] for total in of_warps])))
        return results


def _padded(num_experts: int) -> int:
    """Return the numbers in a row: of experts, of padding, and one that is not used."""
    return -(-(num_experts + 2) // 4) * 4
