"""Mistakes that the kernel language refuses, and what its messages say to write instead.

Mistakes that a machine sees while it reads a body are TypeErrors on both machines. Mistakes that depend on numbers are
in ``test_undefined``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer, Team
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile
from pallas_kernels.language.tensor_memory import Accumulator, TensorMemory
from pallas_kernels.language.values import Value, negate, select
from tests.support.lane_kernels import LANE, ROOM, Body, elementwise, emit, machines, run, simulated


def check_refused(body: Body, message: str, *, emits: bool, **options: Any) -> None:
    """Check that one of the machines raises TypeError."""
    if emits:
        with pytest.raises(TypeError, match=message):
            emit(body, jnp.asarray(LANE), np.zeros_like(LANE), shared_bytes=ROOM, **options)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)TypeError: .*{message}"):
            simulated(body, **options)


both_machines = pytest.mark.parametrize("emits", [False, True], ids=["simulator", "ptx"])


# ---- comparisons ----------------------------------------------------------------------------------------------------


@machines
def test_where_takes_equals_and_differs(simulate):
    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        out.store_int(lane + 1000, lane, where=lane == 3)
        out.store_int(lane + 2000, lane, where=(lane != 3) & (lane % 2 == 1))

    out = run(body, {}, np.zeros_like(LANE), simulate=simulate)
    want = np.where(LANE == 3, LANE + 1000, np.where(LANE % 2 == 1, LANE + 2000, 0))
    np.testing.assert_array_equal(out, want)


def if_of_a_comparison(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    if machine.thread < 4:
        out.store_int(machine.thread, machine.thread)


def chained_comparison(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=4 <= machine.thread < 8)


def python_and(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=(machine.thread > 4) and (machine.thread < 8))


def python_or(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=(machine.thread < 4) or (machine.thread > 8))


def python_not(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=not machine.thread < 4)


def python_in(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    assert machine.thread not in [machine.constant(1, "i32")]


@both_machines
@pytest.mark.parametrize("body", [if_of_a_comparison, chained_comparison, python_and, python_or, python_not, python_in])
def test_a_condition_has_no_truth_value_in_python(body, emits):
    check_refused(body, r"with machine\.when\(condition\):    for  if condition:", emits=emits)


def test_a_value_is_no_key():
    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        hash(machine.thread)

    check_refused(body, "unhashable type: 'Value'", emits=True)


# ---- numbers and kinds ----------------------------------------------------------------------------------------------


def one(machine: Machine, kind: Any) -> Value:
    return machine.constant(True if kind == "bool" else 1, kind)


WRONG_NUMBERS: list[tuple[Body, str]] = [
    (lambda m, *_: m.thread + 0.5, "0.5 is no i32, which takes whole numbers: write an int, or compute with f32"),
    (lambda m, *_: m.thread * 2.0, "2.0 is no i32, which takes whole numbers"),
    (lambda m, *_: 0.5 - m.thread, "0.5 is no i32"),
    (lambda m, *_: m.thread < 0.5, "0.5 is no i32"),
    (lambda m, *_: m.thread == 0.5, "0.5 is no i32"),
    (lambda m, *_: m.constant(1.5, "i32"), "1.5 is no i32"),
    (lambda m, *_: m.thread & 0xFFFFFFFF, "4294967295 is no i32, .* write -1 for the same bits"),
    (lambda m, *_: m.thread + 2**31, "2147483648 is no i32, .* write -2147483648 for the same bits"),
    (lambda m, *_: m.thread - (2**31 + 1), "2147483649 is no i32, .* write -2147483647 for the same bits"),
    (lambda m, *_: m.constant(-(2**31) - 1, "i32"), "-2147483649 is no i32, which goes from -2147483648 to 2147483647"),
    (lambda m, *_: m.widen(m.thread) + 2**64, "18446744073709551616 is no i64"),
    (lambda m, *_: m.thread + True, "True is no i32: write 1 or 0"),
    (lambda m, *_: m.constant(0.0, "f32") + True, "True is no f32: write 1 or 0"),
    (lambda m, *_: m.constant(1, "bool"), "1 is no bool: write True or False, or a comparison"),
    (lambda m, *_: (m.thread < 1) == 0, "0 is no bool"),
    (lambda m, *_: m.constant(1e39, "f32"), r"1e\+39 is too large for an f32: write float\('inf'\)"),
    (lambda m, *_: m.thread + jnp.ones(3), "is no number: an array that a kernel reads is one of launch's inputs"),
    (lambda m, *_: m.thread == None, "None is no number"),  # noqa: E711
    (lambda m, *_: m.thread >> 32, "i32 >> 32: write 0 .. 31 bits"),
    (lambda m, *_: m.thread << -1, "i32 << -1: write 0 .. 31 bits"),
    (lambda m, *_: m.shuffle_xor(m.thread, 32), "write a distance from 1 to 31"),
    (lambda m, *_: m.shuffle_up(m.thread, 0), "write a distance from 1 to 31"),
]


@both_machines
@pytest.mark.parametrize(("body", "message"), WRONG_NUMBERS)
def test_numbers_fit_their_kind(body, message, emits):
    check_refused(body, message, emits=emits)


def test_numbers_that_fit():
    """Covers the limits of each kind, and NumPy's numbers on both sides of an operator."""

    def function(machine: Any, x: Any) -> list[Value]:
        one, three, half = np.int8(1), np.int32(3), np.float32(0.5)
        low = machine.constant(-(2**31), "i32") + one
        assert (three + x).kind == "i32"
        assert (half - machine.from_bits(x)).kind == "f32"
        assert (machine.constant(np.float64(2), "f32") == half).kind == "bool"
        assert (machine.widen(x) + 2**40).kind == "i64"
        largest = machine.constant(float(np.finfo(np.float32).max), "f32")
        return [low, x - one + (2**31 - 1), machine.bits(machine.constant(float("inf"), "f32") - largest)]

    low, high, inf = elementwise(function, LANE, simulate=True, outputs=3, dtype=np.int32)
    assert np.all(low == -(2**31) + 1)
    np.testing.assert_array_equal(high, (LANE.astype(np.int64) - 1 + 2**31 - 1).astype(np.int32))
    assert np.all(inf == np.float32(np.inf).view(np.int32))


MIXED: list[tuple[Body, str]] = [
    (lambda m, *_: m.thread + one(m, "f32"), r"i32 \+ f32: .* no word converts whole numbers to f32"),
    (lambda m, *_: one(m, "f32") * m.thread, r"f32 \* i32"),
    (lambda m, *_: m.thread < one(m, "f32"), "i32 < f32"),
    (
        lambda m, *_: m.thread + (m.thread < 4),
        r'i32 \+ bool: write select\(condition, machine.constant\(1, "i32"\), 0\)',
    ),
    (lambda m, *_: one(m, "f32") + (m.thread < 4), r'write select\(condition, machine.constant\(1.0, "f32"\), 0.0\)'),
    (lambda m, *_: m.widen(m.thread) + m.thread, r"i64 \+ i32: write machine.widen\(x\) for the i64 of an i32"),
    (lambda m, *_: (m.thread < 4) + (m.thread > 2), r"bool \+ bool: conditions take & \| \^ == != and negate"),
    (lambda m, *_: (m.thread < 4) < (m.thread > 2), "bool < bool"),
    (lambda m, *_: (m.thread < 4) & m.thread, "bool & i32"),
    (lambda m, *_: one(m, "f32") & one(m, "f32"), r"f32 & f32: f32 takes \+ - \* and comparisons"),
    (lambda m, *_: one(m, "f32") >> 3, "f32 >> f32"),
    (lambda m, *_: select(m.thread < 4, m.thread, one(m, "f32")), "select of i32 and f32"),
    (lambda m, *_: select(m.thread < 4, 1, 0), r'select\(1, 0\): write machine.constant\(1, "i32"\) or "f32"'),
    (lambda m, *_: select(m.thread & 1, m.thread, 0), "a condition is meant, this is an i32: write x != 0"),
    (lambda m, *_: negate(m.thread), "a condition is meant, this is an i32: write x != 0"),
    (lambda m, i, out: out.store_int(m.thread, m.thread, where=m.thread & 1), "a condition is meant, this is an i32"),
    (lambda m, *_: m.when(m.thread & 1).__enter__(), "a condition is meant, this is an i32"),
    (lambda m, *_: m.exp(m.thread), "an f32 is meant, this is an i32"),
    (lambda m, *_: m.fma(one(m, "f32"), m.thread, one(m, "f32")), "an f32 is meant, this is an i32"),
    (lambda m, *_: m.to_e4m3([one(m, "f32")] * 3 + [m.thread]), "an f32 is meant, this is an i32"),
    (lambda m, *_: m.bits(m.thread), "an f32 is meant, this is an i32"),
    (lambda m, *_: m.from_bits(one(m, "f32")), "an i32 is meant, this is an f32"),
    (lambda m, *_: m.population_count(m.thread < 4), "an i32 is meant, this is a bool"),
    (lambda m, *_: m.reduce_warp("add", one(m, "f32")), "an i32 is meant, this is an f32"),
    (lambda m, *_: m.shuffle_xor(m.thread < 4, 1), "an i32 is meant, this is a bool"),
    (lambda m, *_: m.shuffle(m.thread < 4, m.thread % 32), "an i32 is meant, this is a bool"),
    (lambda m, *_: m.shuffle(m.thread, one(m, "f32")), "an i32 is meant, this is an f32"),
    (lambda m, i, out: i.load_int(one(m, "f32")), "an i32 is meant, this is an f32"),
    (lambda m, i, out: out.store_int(5, m.thread), r'5 is no Value: write machine.constant\(5, "i32"\)'),
    (lambda m, i, out: out.store_int(one(m, "f32"), m.thread), "an i32 is meant, this is an f32"),
    (lambda m, i, out: m.store_shared(m.thread * 4, [one(m, "f32")], 4, True), "an i32 is meant, this is an f32"),
    (lambda m, i, out: m.store_shared(m.thread * 4, [m.thread], 8, True), "1 words for a store of 8 bytes"),
    (lambda m, i, out: m.store(out.address, [m.thread] * 2, 16, True), "2 words for a store of 16 bytes"),
    (lambda m, i, out: i.load_words(m.thread, count=3), "12 bytes at once: an access moves 1, 2, 4, 8 or 16"),
    (lambda m, i, out: out.store_words([m.thread] * 3, m.thread), "12 bytes at once"),
    (lambda m, *_: m.load_shared(m.thread * 16, 32), "32 bytes at once"),
    (lambda m, *_: m.store_shared(m.thread * 16, [m.thread] * 8, 32, True), "32 bytes at once"),
    (
        lambda m, i, out: i.load_floats(m.thread, count=1),
        "an array of float32 or bfloat16 is meant, this one is of int32",
    ),
    (lambda m, i, out: out.store_floats([one(m, "f32")], m.thread), "an array of float32 or bfloat16 is meant"),
    (lambda m, i, out: i.load_bytes(m.thread), "an array of uint8 or bool is meant, this one is of int32"),
    (lambda m, i, out: i.load_int(m.thread, m.thread), r"an array of shape \(128,\) takes 1 indices, got 2"),
    (lambda m, *_: Team(m, 48), "a team of 48 lanes: write a power of two up to 32, or 128"),
    (lambda m, *_: m.barrier("block", leave=m.thread < 32), "a barrier of a block cannot be left"),
    (lambda m, *_: m.load_shared(one(m, "f32"), 4), r"i32 \+ f32|an i32 is meant, this is an f32"),
    (lambda m, *_: m.multiply_f16(one(m, "f32"), m.thread), "an i32 is meant, this is an f32"),
]


@both_machines
@pytest.mark.parametrize(("body", "message"), MIXED)
def test_kinds_and_sizes_do_not_mix(body, message, emits):
    check_refused(body, message, emits=emits)


def product(machine: Any, *, depth: int = 128, columns: int = 8, **options: Any) -> None:
    """A product of 64 rows of 128 bytes with 8 rows of ``depth`` bytes."""
    left, right = Tile.take(machine, 64, 128), Tile.take(machine, 8, 128)
    machine.wgmma(None, left.k_major(), right.k_major(0, depth), columns=columns, **options)


def product_of_transposed_bytes(machine: Any, inputs: Buffer, out: Buffer) -> None:
    left, right = Tile.take(machine, 64, 128), Tile.take(machine, 64, 128)
    machine.wgmma(None, left.k_major(0, 128), right.transposed(0), columns=64, dtype="e4m3")


def product_in_tensor_memory(machine: TensorMemory, inputs: Buffer, out: Buffer) -> None:
    left, right = Tile.take(machine, 64, 128), Tile.take(machine, 8, 128)
    machine.mma(Accumulator(column=0, columns=12), left.k_major(), right.k_major(), accumulate=False)


WRONG_PRODUCTS: list[tuple[Body, str]] = [
    (lambda m, *_: product(m, columns=12), "a product of 12 columns: write a multiple of 8, 256 at most"),
    (lambda m, *_: product(m, columns=264), "a product of 264 columns"),
    (lambda m, *_: product(m, depth=64), "the left operand has 4 steps of K, the right one 2"),
    (
        lambda m, *_: m.wgmma(None, [m.thread] * 12, Tile.take(m, 8, 128).k_major(), columns=8),
        "12 words of a left operand: write four for each of the 4 steps of K",
    ),
    (
        lambda m, *_: m.wgmma([one(m, "f32")] * 8, [m.thread] * 16, Tile.take(m, 8, 128).k_major(), columns=8),
        "a product of 8 columns starts from 4 values, got 8",
    ),
    (
        lambda m, *_: m.wgmma(
            [one(m, "f32")] * 4, [m.thread] * 16, Tile.take(m, 8, 128).k_major(), columns=8, packed=True
        ),
        "a product with sums in f16 starts at zero: write start=None",
    ),
    (product_of_transposed_bytes, "an operand of e4m3 is K-major: write tile.k_major"),
    (product_in_tensor_memory, "a product of 12 columns: write a multiple of 8, 256 at most"),
]


@both_machines
@pytest.mark.parametrize(("body", "message"), WRONG_PRODUCTS)
def test_a_product_takes_operands_of_one_depth(body, message, emits):
    check_refused(body, message, emits=emits)


# ---- division -------------------------------------------------------------------------------------------------------

WRONG_DIVISORS: list[tuple[Body, str]] = [
    (lambda m, *_: m.thread // 0, "i32 // 0: the divisor is a positive int, known when the kernel is built"),
    (lambda m, *_: m.thread % -3, "i32 % -3: the divisor is a positive int"),
    (lambda m, *_: m.thread // 2.0, "i32 // 2.0: the divisor is a positive int"),
    (lambda m, *_: m.thread % True, "i32 % True: the divisor is a positive int"),
    (lambda m, *_: m.thread // m.thread, "i32 // <i32 value>: the divisor is a positive int"),
    (lambda m, *_: one(m, "f32") // 2, r"f32 // 2: f32 takes \+ - \* and comparisons; write machine.divide"),
    (lambda m, *_: one(m, "f32") / 2.0, r"write machine.divide\(a, b\)"),
    (lambda m, *_: m.thread / 2, "a // n for an integer a"),
]


@both_machines
@pytest.mark.parametrize(("body", "message"), WRONG_DIVISORS)
def test_divisors_are_positive_and_known(body, message, emits):
    check_refused(body, message, emits=emits)


# ---- values end with their part of a body ---------------------------------------------------------------------------


def set_in_when(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < 4):
        x = machine.thread + 7
    out.store_int(x, machine.thread)


def set_in_a_known_when(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(True):
        x = machine.thread + 7
    out.store_int(x, machine.thread)


def loaded_in_when(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < 4):
        x = inputs.load_int(machine.thread)
    out.store_int(x, machine.thread)


def condition_of_an_inner_when(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < 64):
        few = machine.thread < 4
    with machine.when(few):
        out.store_int(machine.thread, machine.thread)


WHEN = r"made inside machine\.when is used outside of it: .* write select\(condition, a, b\)"


@both_machines
@pytest.mark.parametrize("body", [set_in_when, set_in_a_known_when, loaded_in_when, condition_of_an_inner_when])
def test_a_value_ends_with_its_when(body, emits):
    check_refused(body, WHEN, emits=emits)


def accumulator_closed_over(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    total = machine.constant(0, "i32")

    def add(i: Value, carry: None) -> None:
        nonlocal total
        total = total + i

    machine.loop(4, add)
    out.store_int(total, machine.thread)


def number_of_a_turn(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    last = []

    def add(i: Value, total: Value) -> Value:
        last.append(i)
        return total + i

    machine.loop(1, add, machine.constant(0, "i32"))
    out.store_int(last[0], machine.thread)


def carry_of_a_repetition(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    seen = []

    def halve(x: Value) -> tuple[Value, Value]:
        seen.append(x)
        return x > 1, x >> 1

    machine.repeat(halve, machine.thread)
    out.store_int(seen[0], machine.thread)


TURN = r"made in a turn of a loop is used outside of it: .* carry = machine\.loop\(count, body, carry\)"


@both_machines
@pytest.mark.parametrize("body", [accumulator_closed_over, number_of_a_turn, carry_of_a_repetition])
def test_a_value_ends_with_its_turn_of_a_loop(body, emits):
    check_refused(body, TURN, emits=emits)


def test_the_simulator_sees_an_accumulator_that_no_turn_hands_over():
    """A GPU would begin every iteration with the same number."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        total = machine.constant(0, "i32")

        def add(i: Value, carry: None) -> None:
            nonlocal total
            total = total + i
            out.store_int(total, machine.thread)

        machine.loop(4, add)

    check_refused(body, TURN, emits=False)


@both_machines
def test_a_value_ends_with_its_branch(emits):
    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        seen = []

        def then(x: Value) -> Value:
            seen.append(x + 1)
            return x

        machine.branch(machine.thread < 4, then, machine.thread)
        out.store_int(seen[0], machine.thread)

    message = r"made in a branch is used outside of it: .* carry = machine\.branch\(condition, then, carry\)"
    check_refused(body, message, emits=emits)


@both_machines
def test_a_value_ends_with_its_role(emits):
    def body(machine: TensorCores, inputs: Buffer, out: Buffer) -> None:
        found = []
        load = Role(warpgroups=1, registers=168, body=lambda: found.append(inputs.load_int(machine.thread % WARPGROUP)))
        machine.roles(load, Role(warpgroups=1, registers=168, body=lambda: None))
        out.store_int(found[0], machine.thread % WARPGROUP, where=machine.thread < WARPGROUP)

    message = r"made (in a role|inside machine\.when) is used outside of it: .*"
    check_refused(body, message, emits=emits, warpgroups=2)


def test_a_value_ends_with_its_role_for_the_other_roles():
    """In the simulator roles take turns. Other roles cannot use a role's values, even before it has ended."""

    def body(machine: TensorCores, inputs: Buffer, out: Buffer) -> None:
        done = Barrier.take(machine, warps=4)
        init_barriers(done)
        found: list[Value] = []

        def load() -> None:
            found.append(inputs.load_int(machine.thread % WARPGROUP))
            done.arrive()

        def store() -> None:
            done.wait(0)
            out.store_int(found[0], machine.thread % WARPGROUP)

        machine.roles(Role(warpgroups=1, registers=168, body=load), Role(warpgroups=1, registers=168, body=store))

    check_refused(body, r"made in a role is used outside of it", emits=False, warpgroups=2)


@machines
def test_what_a_when_or_a_loop_leaves_behind_properly(simulate):
    """Inner parts can use the values of outer ones, and what a loop returns can be used after it."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        with machine.when(lane >= 0):
            x = inputs.load_int(lane)

            def add(i: Value, carry: tuple[Value, Value]) -> tuple[Value, Value]:
                total, same = carry
                inner = machine.loop(i, lambda j, sum_: sum_ + j + x, machine.constant(0, "i32"))
                return total + inner, same

            total, same = machine.loop(4, add, (machine.constant(0, "i32"), x))
            with machine.when(lane < 64):
                out.store_int(total + same, lane)

    out = run(body, jnp.asarray(LANE), np.zeros_like(LANE), simulate=simulate)
    np.testing.assert_array_equal(out, np.where(LANE < 64, 4 + 6 * LANE + LANE, 0))


# ---- what a loop carries --------------------------------------------------------------------------------------------

WRONG_CARRIES: list[tuple[Body, str]] = [
    (
        lambda m, *_: m.loop(2, lambda i, c: (c[0], c[1]), [m.thread, m.thread]),
        r"it got \['i32', 'i32'\], and returned \('i32', 'i32'\)",
    ),
    (lambda m, *_: m.loop(2, lambda i, c: [*c, i], [m.thread]), r"it got \['i32'\], and returned \['i32', 'i32'\]"),
    (lambda m, *_: m.loop(2, lambda i, c: m.from_bits(c), m.thread), "it got i32, and returned f32"),
    (lambda m, *_: m.loop(2, lambda i, c: None, m.thread), "it got i32, and returned None"),
    (lambda m, *_: m.loop(2, lambda i, c: 0, m.thread), r"0 is carried or held, and is no Value: write machine\.const"),
    (lambda m, *_: m.loop(2, lambda i, c: c, [m.thread, 1.5]), r"1\.5 is carried or held, and is no Value"),
    (lambda m, *_: m.hold([m.thread, 3]), "3 is carried or held, and is no Value"),
    (lambda m, *_: m.loop(m.constant(1.0, "f32"), lambda i, c: c), "an i32 is meant, this is an f32"),
    (lambda m, *_: m.repeat(lambda c: (c, c), m.thread), "a condition is meant, this is an i32: write x != 0"),
    (lambda m, *_: m.repeat(lambda c: (False, c), m.thread), "False is no Value"),
    (lambda m, *_: m.repeat(lambda c: (c > 1, (c,)), m.thread), r"it got i32, and returned \('i32',\)"),
    (lambda m, *_: m.branch(m.thread, lambda c: c, m.thread), "a condition is meant, this is an i32: write x != 0"),
    (lambda m, *_: m.branch(m.thread < 4, lambda c: [c], m.thread), r"it got i32, and returned \['i32'\]"),
    (lambda m, *_: m.branch_warp(m.thread, lambda c: c, m.thread), "a condition is meant, this is an i32"),
    (lambda m, *_: m.branch(m.thread < 4, lambda c: c, 5), "5 is carried or held, and is no Value"),
]


@both_machines
@pytest.mark.parametrize(("body", "message"), WRONG_CARRIES)
def test_a_body_returns_the_carry_that_it_got(body, message, emits):
    check_refused(body, message, emits=emits)
