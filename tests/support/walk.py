"""The way from attention_layer to each launch of a kernel: python -m tests.support.walk h200

Traces a step of a layer of each kind of V4-Flash, with weights as checkpoints store them, and prints one JSON line: for
each launch the functions that are passed on the longest way to it. ``--table`` first prints how many they are, and how
many rooms are entered. Needs the extra ``cross``.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import types
from typing import Any

from tests.support.compile_for_gpu import TARGETS, meshes, prepare_environment
from tests.support.paths import ROOT

SIZES = (64, 1), (1, 4096)  # requests, and tokens of each
FIRST, LAST = "attention_layer", ROOT / "pallas_kernels" / "language" / "launch.py"
PACKAGES = "dsv4jax", "pallas_kernels"


@dataclasses.dataclass(frozen=True)
class Walk:
    """The functions on the way to a launch, the first one first."""

    launch: str
    functions: tuple[str, ...]  # "room.module.function"

    @property
    def rooms(self) -> list[str]:
        """The rooms entered, one that is left and entered again each time."""
        passed = [name.rsplit(".", 2)[0] for name in self.functions]
        return [room for before, room in zip(["", *passed], passed, strict=False) if room != before]


def walks(function: Any, *args: Any) -> list[Walk]:
    """Return the ways to the launches that a function makes when it is called."""
    found: list[Walk] = []

    def on_call(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "launch" and code.co_filename == str(LAST):
            found.append(Walk(frame.f_locals["name"], _functions(frame.f_back)))

    sys.setprofile(on_call)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return found


def _functions(frame: types.FrameType | None) -> tuple[str, ...]:
    """The functions of the two packages from a frame out to ``attention_layer``."""
    passed: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if path.startswith(PACKAGES):
            passed.append(f"{path.removesuffix('.py').replace('/', '.')}.{frame.f_code.co_name}")
            if frame.f_code.co_name == FIRST:
                break
        frame = frame.f_back
    return tuple(reversed(passed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    prepare_environment()
    import jax

    from tests.support.step_launches import RATIOS, step_of

    longest: dict[str, Walk] = {}
    for kind, (batch, tokens) in itertools.product(RATIOS, SIZES):
        sizes = argparse.Namespace(batch=batch, tokens=tokens, weights="stored", draft=False, invariant=False)
        step, args = step_of((kind,), sizes)
        with jax.sharding.use_abstract_mesh(meshes(options.target)[1]):
            found = walks(functools.partial(jax.eval_shape, step), *args)
        for walk in found:
            if walk.functions[0].endswith(FIRST):
                longest[walk.launch] = max(longest.get(walk.launch, walk), walk, key=lambda one: len(one.functions))
    for name, walk in sorted(longest.items()) if options.table else ():
        print(f"{name:20} {len(walk.functions):2} functions, {len(walk.rooms):2} rooms")
    print(json.dumps({name: walk.functions for name, walk in longest.items()}))


if __name__ == "__main__":
    main()
