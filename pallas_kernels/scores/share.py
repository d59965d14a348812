"""How the work of a call is divided: all blocks score about the same number of tiles of 64 consecutive entries.

The tiles of all requests are put in one sequence, and each block takes a contiguous part of it. This may be part of one
request, or several consecutive requests. Preparing a request's queries costs a block as much time as scoring some
tiles, so each request also counts for that many additional tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, add, fold, maximum
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Value, select
from pallas_kernels.scores.inputs import PAGE_ENTRIES, ScoreInputs

TILE_ENTRIES = 64  # rows of a warpgroup's product: two pages
_START = 8  # cost of preparing a request's queries, in tiles


def count_tiles(inputs: ScoreInputs[jax.Array]) -> jax.Array:
    """Return the number of tiles that any query of each batch row sees, int32 [rows of all lanes].

    For calls with several tokens of a request, which may be thousands of rows: every warp reads the numbers of all of
    them. XLA counts once for all layers of a step.
    """
    requests, max_blocks = inputs.block_table.shape
    entries = inputs.visible.max(1).clip(0, max_blocks * PAGE_ENTRIES)
    there = (inputs.slots >= 0) & (inputs.slots < requests)
    tiles = jnp.where(there, (entries + (TILE_ENTRIES - 1)) // TILE_ENTRIES, 0)
    return jnp.pad(tiles, (0, math.prod(_lanes_and_rows(tiles.size)) - tiles.size))


def _lanes_and_rows(batch: int) -> tuple[int, int]:
    """Return the lanes of a warp that add up costs, and for how many batch rows each."""
    lanes = min(WARP, 1 << (batch - 1).bit_length())
    return lanes, -(-batch // lanes)


def num_tiles(inputs: ScoreInputs[Buffer], b: Value, where: Condition) -> Value:
    """Return the number of tiles that any query of a batch row sees; 0 for padding. ``inputs`` are buffers."""
    if inputs.tiles is not None:
        return inputs.tiles.load_int(b, where=where)
    requests, max_blocks = inputs.block_table.shape
    slot = inputs.slots.load_int(b, where=where)
    seen = [inputs.visible.load_int(b, t, where=where) for t in range(inputs.visible.shape[1])]
    entries = fold(maximum, seen).maximum(0).minimum(max_blocks * PAGE_ENTRIES)
    there = (slot >= 0) & (slot < requests) & where
    return select(there, (entries + TILE_ENTRIES - 1) // TILE_ENTRIES, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A block's part of the sequence, in tiles.

    Each request has ``_START`` additional tiles in front, for its preparation.
    """

    inputs: ScoreInputs[Buffer]
    begin: Value
    end: Value
    first: Value  # batch row in which the part begins
    requests: Value  # number of requests that the part touches
    before: Value  # cost of all requests before the first

    @classmethod
    def of_block(cls, machine: TensorCores, inputs: ScoreInputs[Buffer], blocks: int) -> Share:
        """Return the share of this block, of ``blocks`` in total.

        Every warp computes it for itself. Each lane adds up the cost of some consecutive requests.
        """
        batch = inputs.slots.shape[0]
        lanes, each = _lanes_and_rows(batch)
        lane = machine.thread % lanes
        rows = [lane * each + i for i in range(each)]
        if inputs.tiles is None:
            is_whole = batch == lanes * each
            counts = [num_tiles(inputs, b, True if is_whole else b < batch) for b in rows]
        else:
            count = math.gcd(each, VECTOR)
            counts = [word for b in rows[::count] for word in inputs.tiles.load_words(b, count=count)]
        costs = [cls.cost(tiles) for tiles in counts]
        zero, nobody = machine.constant(0, "i32"), machine.constant(-1, "i32")
        total, before, distance = fold(add, costs), zero, 1
        while distance < lanes:
            other = machine.shuffle_xor(total, distance)
            before, total = before + select((lane & distance) > 0, other, 0), total + other
            distance *= 2
        number, quota = machine.block(0), total // blocks
        more = total - quota * blocks  # the first blocks take one tile more
        begin = number * quota + number.minimum(more)
        end = begin + quota + select(number < more, machine.constant(1, "i32"), 0)
        first, last, found = nobody, nobody, nobody
        for b, cost in zip(rows, costs, strict=True):
            after = before + cost
            holds_first = (before <= begin) & (begin < after)
            first, found = select(holds_first, b, first), select(holds_first, before, found)
            last = select((before < end) & (end <= after), b, last)
            before = after
        if lanes > 1:
            first, last, found = (machine.reduce_warp("max", x) for x in (first, last, found))
        requests = select(begin < end, last - first + 1, 0)
        return cls(inputs=inputs, begin=begin, end=end, first=first, requests=requests, before=found)

    @staticmethod
    def cost(tiles: Value) -> Value:
        """Return the cost of a request with so many tiles."""
        return select(tiles > 0, tiles + _START, 0)

    def loop[Carry](self, body: Callable[[Value, Value, Value, Carry], Carry], carry: Carry) -> Carry:
        """Apply carry = body(b, first, end, carry) to every batch row in the share, for its tiles first .. end - 1.

        The range may be empty, if the share begins or ends among the tiles that stand for preparation.
        """

        def request(i: Value, state: tuple[Value, Carry]) -> tuple[Value, Carry]:
            b, (before, carry) = self.first + i, state
            tiles = num_tiles(self.inputs, b, True)
            first, end = (self.begin - before - _START).maximum(0), (self.end - before - _START).minimum(tiles)
            carry = body(b, first, end, carry)
            return before + self.cost(tiles), carry

        _, carry = self.inputs.slots.machine.loop(self.requests, request, (self.before, carry))
        return carry
