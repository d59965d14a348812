"""A small run of every kernel that has a pipeline, with more steps than stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels.activations import OperandRows
from pallas_kernels.attention import sm90, sm90_few, sm90_spread, sm100
from pallas_kernels.language import launch
from pallas_kernels.language.simulator import barriers
from pallas_kernels.language.simulator.memory import SimulationError
from pallas_kernels.language.target import BLACKWELL
from pallas_kernels.router.call import Router
from pallas_kernels.scores import sm90 as scores_sm90
from pallas_kernels.scores import sm100 as scores_sm100
from tests.kernels import test_mixed_streams as mixed_streams
from tests.kernels import test_router as router
from tests.kernels.test_product_queries import Queries
from tests.mutants.faults import Fault, LateStore, LateWait, Mutant, NoHold, Probe
from tests.support import attention_cases, score_cases
from tests.support.expert_cases import Experts
from tests.support.product_cases import Many, Product

Run = Callable[[], Any]


def _attention(**case: Any) -> Run:
    made = attention_cases.Case(**case)

    @functools.cache
    def inputs() -> Any:
        return attention_cases.make(made)[0]

    return lambda: attention_cases.run(made, inputs(), simulate=True)


def _scores(tokens: int, **options: Any) -> Run:
    blocks = 6
    seen = np.full((2, tokens), blocks * score_cases.PAGE_ENTRIES - 5, np.int32)
    case = score_cases.Case(key_format="mxfp4", visible=seen, max_blocks=blocks)
    return lambda: case.run(True, **options)[:, :, : int(seen.min())]


def _product(**sizes: Any) -> Run:
    gpu = {"gpu": sizes.pop("gpu")} if "gpu" in sizes else {}
    return functools.partial(Product(**sizes).run, simulate=True, **gpu)


def _operand_product(**sizes: Any) -> Run:
    case = Product(**sizes)
    return functools.partial(case.run, OperandRows.of(case.x), simulate=True)


def _leaves(run: Callable[[], Any]) -> Run:
    return lambda: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run())])


def _mixed_streams(**sizes: Any) -> Run:
    return _leaves(functools.partial(mixed_streams.Case(**sizes).run, simulate=True))


def _router() -> Any:
    case = router.Case(tokens=40, experts=64, hidden=512, picks=4)
    return pk.route(*case.arrays(), picks=case.picks, simulate=True)


def _sorted_pairs() -> Any:
    """The tiles of more pairs than one block sorts."""
    tokens, experts, picks = 1100, 20, 4  # so many that a warp has two steps
    sizes: dict[str, Any] = dict(tokens=tokens, experts=experts, picks=picks, scale=1.0, rows=32)
    picked = np.random.default_rng(0).integers(0, experts + 1, (tokens, picks))
    return Router(**sizes, simulate=True).sort(jnp.asarray(picked, jnp.int32))


_WIDE = sm90.Layout(is_wide=True, blocks=1)
_FP8: dict[str, Any] = {"activations": "fp8"}
_QUERIES = Queries(rows=130, heads=1, inputs=512, many=Many(multiprocessors=2), **_FP8)
_EXPERTS: dict[str, Any] = {"tokens": 3, "experts": 2, "blocks": 1, "stages": 3}
_GATE_UP, _DOWN = Experts(hidden=1536, width=128, **_EXPERTS), Experts(hidden=256, width=1536, **_EXPERTS)
_GATE_UP_FP8, _DOWN_FP8 = (dataclasses.replace(case, **_FP8) for case in (_GATE_UP, _DOWN))
KERNELS: dict[str, Run] = {
    "products of many rows, bf16": _product(rows=72, outputs=128, inputs=512, many=Many(parts=1, stages=3)),
    "products of many rows, own parts": _operand_product(
        rows=72, outputs=128, inputs=512, many=Many(own_parts=2, stages=3, tile_rows=72)
    ),
    "products of many rows, shared tiles": _product(
        rows=72, outputs=128, inputs=768, many=Many(parts=2, stages=3, tile_rows=80)
    ),
    "products of many rows, FP8": _product(rows=65, outputs=128, inputs=640, many=Many(parts=1, stages=3), **_FP8),
    "products of many rows, wide": _product(rows=72, outputs=128, inputs=512, block=None, many=Many(parts=1, stages=3)),
    "products of many rows, wide, own parts": _product(
        rows=72, outputs=128, inputs=512, block=None, many=Many(own_parts=2, stages=3, tile_rows=72)
    ),
    "products of many rows, queries": lambda: _QUERIES.run(simulate=True)[0],
    "products of few rows": _product(rows=13, outputs=64, inputs=2560, parts=(1, 1)),
    "products of few rows, in segments": _product(rows=64, outputs=64, inputs=2560, parts=(1, 1)),
    "products of few rows, FP8": _product(rows=9, outputs=64, inputs=1024, parts=(1, 1), **_FP8),
    "products of few rows, streamed": _product(rows=13, outputs=128, inputs=1024, parts=(1, 1), tiles=2, streams=True),
    "products of few rows, in turns": _product(
        rows=70, outputs=64, inputs=768, parts=(1, 1), streams=True, turns=2, columns=72
    ),
    "products of few rows, parts": _product(rows=9, outputs=64, inputs=1024, parts=(2, 2)),
    "products on Blackwell": _product(rows=9, outputs=128, inputs=640, parts=(1, 1), tiles=2, gpu=BLACKWELL),
    "products on Blackwell, FP8": _product(
        rows=9, outputs=128, inputs=512, parts=(1, 1), tiles=2, gpu=BLACKWELL, **_FP8
    ),
    "experts": lambda: _GATE_UP.run_gate_up(simulate=True),
    "experts, adjacent rows": lambda: _DOWN.run_down(simulate=True),
    "experts, rows in FP8": lambda: _GATE_UP_FP8.run_gate_up(simulate=True),
    "experts, adjacent rows in FP8": lambda: _DOWN_FP8.run_down(simulate=True),
    "mixed streams": _mixed_streams(tokens=201, hidden=128, ended="experts", multiprocessors=2),
    "mixed streams of few tokens": _mixed_streams(tokens=3, hidden=192, ended="attention"),
    "router": _leaves(_router),
    "tiles of a router of many tokens": _leaves(_sorted_pairs),
    "attention": _attention(lengths=(130, 60), layout=sm90.Layout(blocks=1)),
    "attention to widened picks": _attention(lengths=(130,), tokens=2, layout=_WIDE),
    "attention to widened rows": _attention(lengths=(300,), tokens=2, entries="all", layout=_WIDE),
    "attention for few queries": _attention(lengths=(300,), layout=sm90_few.Layout(heads=64, cluster=2, tiles=2)),
    "attention spread over a cluster": _attention(
        lengths=(1000,), entries="all", ratio=1, layout=sm90_spread.Layout(tiles=18)
    ),
    "attention on Blackwell": _attention(lengths=(140,), layout=sm100.Layout()),
    "scores in turn": _scores(1, tuning=scores_sm90.Tuning(warpgroups=2, stages=2, blocks=1)),
    "scores overlapped": _scores(2, tuning=scores_sm90.Tuning(warpgroups=2, overlapped=True, blocks=1)),
    "scores on Blackwell": _scores(2, architecture="sm100", tuning=scores_sm100.Tuning(warpgroups=2, blocks=1)),
}


NEVER_MADE = "never made"
HARMLESS: dict[tuple[str, type[Mutant]], str] = {
    ("products of few rows, streamed", LateWait): "a chunk of x has a place more than there are stages",
    ("products of few rows, in turns", LateWait): "a chunk of x has a place more than there are stages",
    ("experts, adjacent rows", LateStore): "what is known of rows is read after the last chunk, and stored before",
    ("experts, rows in FP8", NoHold): "each wait follows its product at once",
    ("experts, adjacent rows in FP8", NoHold): "each wait follows its product at once",
    ("scores in turn", NoHold): "each wait follows its product at once",
}


@contextlib.contextmanager
def _on(machine: type, seed: int) -> Iterator[None]:
    """Run kernels on a machine, without compiling what is around them."""
    saved = launch.TensorMemorySimulator, launch.jax.pure_callback, barriers.SEED
    launch.TensorMemorySimulator, barriers.SEED = machine, seed
    launch.jax.pure_callback = lambda run, shapes, *arguments: jax.tree.map(jax.numpy.asarray, run(*arguments))
    try:
        with jax.disable_jit():
            yield
    finally:
        launch.TensorMemorySimulator, launch.jax.pure_callback, barriers.SEED = saved


@functools.cache
def sound(kernel: str) -> np.ndarray:
    """Return what a kernel gives without a fault."""
    return result(kernel, launch.TensorMemorySimulator, 0)


def result(kernel: str, machine: type, seed: int) -> np.ndarray:
    """Return what a kernel gives on a machine, in the order of a seed."""
    with _on(machine, seed):
        return np.asarray(KERNELS[kernel]())


@functools.cache
def faults_of(kernel: str) -> list[Fault]:
    """Return all faults that can be made in a kernel."""
    probe = type("Probe", (Probe,), {"made": set()})
    result(kernel, probe, 0)
    return sorted(probe.made, key=str)


def found(kernel: str, fault: Fault, seed: int = 0) -> str | None:
    """Return how a fault is found: by which error, or by its numbers. None if it is not.

    It is "never made" where what comes too late is needed before anything that it should come before.
    """
    machine: Any = type(fault.machine.__name__, (fault.machine,), {"number": fault.number, "made": set()})
    want = sound(kernel)
    try:
        got = result(kernel, machine, seed)
    except SimulationError as error:
        return str(error)
    if not machine.made:
        return NEVER_MADE
    return None if np.array_equal(got, want, equal_nan=True) else "other numbers"
