"""What runs by itself, on the simulator: copies and products, whose memory and registers nobody may touch too soon."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.simulator import barriers
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile, TileCopy
from pallas_kernels.language.values import Value
from tests.language.test_tensor_cores import SPEC, fill, store_product
from tests.support.lane_kernels import run

STAGES, CHUNKS = 3, 7
WAYS = ("hardware", "lanes", "stores")  # how chunks get into shared memory
SUMS = "sums of a product are used that wgmma_wait has not returned"
HOLD = r"registers that a product reads, from .*:\d+, may be used again .* machine.hold\(words\) is to follow the wait"


def ring(machine: TensorCores, inputs: Any, out: Any, *, way: str, fault: str | None) -> None:
    """Add up a b_i^T, where b_i come through stages. A product runs while the next one is started."""
    a, b = inputs
    left, stages = Tile.take(machine, 64, 128), Tile.take(machine, 64, 128, copies=STAGES)
    full = Barrier.take(machine, 1 if way == "hardware" else 4, copies=STAGES)
    free = Barrier.take(machine, 4, copies=STAGES)
    init_barriers(full, free)
    fill(machine, left, a, 2 * WARPGROUP)
    machine.fence_shared()
    machine.barrier("block")

    def load() -> None:
        lane = machine.thread % WARPGROUP

        def one(i: Value, _: None) -> None:
            stage = i % STAGES
            tile, there = stages.copy(stage), full.copy(stage)
            if fault != "waits for no room":
                free.copy(stage).wait((i // STAGES & 1) ^ (0 if fault == "wrong parity of room" else 1))
            if way == "hardware":
                with machine.when(lane < WARP):
                    there.fill(TileCopy(source=b, row=i * 64, column=0, to=tile.offset, rows=64, row_bytes=128))
                return
            for n in range(0, 512, WARPGROUP):
                row, unit = (lane + n) // 8, (lane + n) % 8
                to, place = tile.unit(row, unit), (i * 64 + row, unit * 8)
                if way == "lanes":
                    machine.copy_async(to, b.address_of(place), True)
                else:
                    machine.store_shared(to, b.load_words(*place, count=8), 16, True)
            if fault != "signals too early":
                machine.wait_copies()
            machine.fence_shared()
            there.arrive()
            machine.wait_copies()

        machine.loop(CHUNKS, one)

    def multiply() -> None:
        def one(i: Value, sums: list[Value]) -> list[Value]:
            stage, parity = i % STAGES, i // STAGES & 1
            if fault != "waits for no chunk":
                full.copy(stage).wait(parity ^ 1 if fault == "wrong parity of a chunk" else parity)
            sums = machine.wgmma(sums, left.k_major(), stages.copy(stage).k_major(), columns=64)
            if fault == "frees too early":
                free.copy(stage).arrive()
            machine.wgmma_wait([], pending=1)
            if fault == "frees the newest":
                free.copy(stage).arrive()
            elif fault != "frees too early":
                free.copy((i - 1).maximum(0) % STAGES).arrive(i > 0)
            return sums

        sums = machine.wgmma_wait(machine.loop(CHUNKS, one, [machine.constant(0.0, "f32")] * 32))
        store_product(machine, out, sums)

    machine.roles(Role(warpgroups=1, registers=168, body=load), Role(warpgroups=1, registers=168, body=multiply))


def run_ring(way: str, fault: str | None) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (64, 64)).astype(np.float16), rng.integers(-4, 5, (64 * CHUNKS, 64)).astype(np.float16)
    body, room = functools.partial(ring, way=way, fault=fault), 8192 * (1 + STAGES) + 16 * STAGES
    inputs, state = (jnp.asarray(a), jnp.asarray(b)), SPEC((64, 64), jnp.float32)
    found = run(body, inputs, state, warpgroups=2, shared_bytes=room, simulate=True)
    want = np.sum([a.astype(np.float32) @ x.astype(np.float32).T for x in b.reshape(CHUNKS, 64, 64)], 0)
    np.testing.assert_array_equal(found, want)  # small integers: exact


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_a_ring_of_stages_is_sound_in_any_order(way, seed, monkeypatch):
    monkeypatch.setattr(barriers, "SEED", seed)
    run_ring(way, None)


FAULTS = (
    *("frees too early", "frees the newest", "waits for no room", "wrong parity of room"),
    *("waits for no chunk", "wrong parity of a chunk"),
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("way", "fault"), [*((way, fault) for way in WAYS for fault in FAULTS), ("lanes", "signals too early")]
)
def test_a_stage_that_is_used_too_early_is_found_in_any_order(way, fault, seed, monkeypatch):
    monkeypatch.setattr(barriers, "SEED", seed)
    # Whichever access comes first in this order; or a role waits for what does not come, or comes a phase too early.
    found = "what a running|what another one|what a lane writes|nobody has written|waits for another one|arrives twice"
    with pytest.raises(jax.errors.JaxRuntimeError, match=found):
        run_ring(way, fault)


def multiply_words(machine: TensorCores, source: Any, out: Any, *, mistake: str | None) -> None:
    """Multiply registers by a tile twice, with other work while a product runs."""
    tile = Tile.take(machine, 64, 128)
    fill(machine, tile, source, WARPGROUP)
    machine.fence_shared()
    machine.barrier("block")
    words = [machine.thread + i for i in range(16)]
    sums = machine.wgmma(None, words, tile.k_major(), columns=64)
    busy = machine.thread * 3
    if mistake == "hold before the wait":
        machine.hold(words)
    if mistake == "sums":
        sums = [value * 2.0 for value in sums]
    elif mistake == "stores sums":
        store_product(machine, out, sums)
    elif mistake == "never waits":
        return
    elif mistake == "stores to the tile":
        machine.store_shared(tile.unit(machine.thread % 64, 0), [busy], 4, machine.thread < 64)
    if mistake == "drops the values":
        machine.wgmma_wait([])
    else:
        sums = machine.wgmma_wait(sums)
    if mistake == "holds other words":
        machine.hold([word + 1 for word in words])
    elif mistake not in ("no hold", "hold before the wait"):
        machine.hold(words)
    store_product(machine, out, sums)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("sums", SUMS),
        ("stores sums", SUMS),
        ("drops the values", SUMS),
        ("no hold", HOLD),
        ("hold before the wait", HOLD),
        ("holds other words", HOLD),
        ("never waits", r"a product that nobody waits for, from .*:\d+"),
        ("stores to the tile", "a lane writes what a running product reads"),
    ],
)
def test_what_a_running_product_uses_is_left_alone(mistake, message):
    source, state = jnp.ones((64, 64), jnp.float16), SPEC((64, 64), jnp.float32)
    attempt = functools.partial(run, inputs=source, state=state, shared_bytes=8192, simulate=True)
    attempt(functools.partial(multiply_words, mistake=None))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        attempt(functools.partial(multiply_words, mistake=mistake))


def multiply_at_once(machine: TensorCores, source: Any, out: Any) -> None:
    tile = Tile.take(machine, 64, 128)
    fill(machine, tile, source, WARPGROUP)
    machine.fence_shared()
    machine.barrier("block")
    words = [machine.thread] * 16
    store_product(machine, out, machine.wgmma_wait(machine.wgmma(None, words, tile.k_major(), columns=64)))


def test_words_need_no_hold_where_the_wait_follows_at_once():
    source, state = jnp.ones((64, 64), jnp.float16), SPEC((64, 64), jnp.float32)
    run(multiply_at_once, source, state, shared_bytes=8192, simulate=True)
