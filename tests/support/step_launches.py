"""The launches of a decode step, read in what XLA makes of it: python -m tests.support.step_launches h200

Compiles steps of V4-Flash's sizes where there is no GPU, and prints one JSON line: how many launches one more layer of
each kind adds to a step, how many of them belong to products, and how many a step has besides. ``--list`` prints first
what they are. With ``--draft`` the step stages a draft in each layer and commits it; with ``--invariant`` the cache is
invariant. One target per process. Needs the extra ``cross``.
"""

import argparse
import dataclasses
import functools
import json
import re
from collections import Counter
from pathlib import Path

from tests.support.compile_for_gpu import TARGETS, compile_for, prepare_environment

RATIOS = {"swa": 0, "csa": 4, "hca": 128}

# Instructions of an optimised program that are no work for the GPU.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("after-all", "partition-id", "replica-id", "all-reduce-done"),
}
_CALLERS = {"while": ("body", "condition"), "call": ("to_apply",), "conditional": ("branch_computations",)}
_PRODUCT = r"dot_general|product"  # in what launches of products come from
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%?[\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a program."""

    name: str
    opcode: str
    rest: str

    @property
    def what(self) -> str:
        """What it does: its opcode, its kind, and the operation of the layer that it comes from."""
        origin = re.search(r'op_name="([^"]*)"', self.rest)
        parts = [re.search(rf'{key}="?([\w$]+)', self.rest) for key in ("custom_call_target", "kind")]
        words = [self.opcode, *(part[1] for part in parts if part)]
        words.append("/".join(origin[1].split("/")[-2:]) if origin else re.sub(r"[.0-9]+$", "", self.name.lstrip("%")))
        return " ".join(words)


def computations(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a module by name, and the name of its entry."""
    found: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            current = head[2]
            found[current] = []
            entry = current if head[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            found[current].append(Instruction(name=match[1], opcode=match[2], rest=match[3]))
    return found, entry


def launches(hlo: str) -> list[Instruction]:
    """The instructions that an optimised program runs on the GPU, each once, however often a loop repeats it."""
    found, entry = computations(hlo)
    run: list[Instruction] = []
    waiting = [entry]
    while waiting:
        for one in found[waiting.pop()]:
            if one.opcode in _CALLERS:
                for key in _CALLERS[one.opcode]:
                    for several, single in re.findall(rf"{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", one.rest):
                        waiting += [name.strip(" %") for name in (several or single).split(",")]
            elif one.opcode not in _FREE:
                run.append(one)
    return run


def step_of(kinds: tuple[str, ...], options: argparse.Namespace):
    """A step of layers of these kinds, and its arguments."""
    import jax
    import jax.numpy as jnp

    import dsv4jax as d4
    from tests.support.in_place import speculative_step, whole_step

    cfg = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=tuple(RATIOS[kind] for kind in kinds))
    plan = d4.plan_cache(
        cfg,
        max_requests=options.batch,
        max_context=32768 + 256,
        indexer_format="mxfp4",
        hca_tail="online",
        invariant=options.invariant,
    )

    def weights(layer: int):
        make = functools.partial(d4.init_attention_params, cfg=cfg, layer=layer, dtype=jnp.bfloat16)
        return jax.eval_shape(functools.partial(make, weights=options.weights), jax.random.key(0))

    row = jax.ShapeDtypeStruct((options.batch,), jnp.int32)
    x = jax.ShapeDtypeStruct((options.batch, options.tokens, cfg.hidden_size), jnp.bfloat16)
    step = speculative_step if options.draft else whole_step
    return step, (list(map(weights, range(len(kinds)))), x, d4.cache.abstract_cache(plan), row, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1, help="of each request")
    parser.add_argument("--weights", choices=("wide", "stored"), default="wide")
    parser.add_argument("--draft", action="store_true", help="stage the tokens as a draft, and commit some")
    parser.add_argument("--invariant", action="store_true", help="of a cache whose plan is invariant")
    parser.add_argument("--list", action="store_true", help="print every launch of one more layer, and of the others")
    parser.add_argument("--dump", type=Path, default=None, help="write the programs into this folder")
    options = parser.parse_args()
    prepare_environment()

    def launches_of(*kinds: str) -> Counter[str]:
        step, args = step_of(kinds, options)
        hlo = compile_for(options.target, step, *args, donate_argnums=2).as_text() or ""
        if options.dump:
            (options.dump / f"{'_'.join(kinds)}.hlo").write_text(hlo)
        return Counter(one.what for one in launches(hlo))

    report = {}
    for kind in RATIOS:
        one, two = launches_of(kind), launches_of(kind, kind)
        added, once = two - one, one - (two - one)
        products = sum(count for what, count in added.items() if re.search(_PRODUCT, what))
        layer = two.total() - one.total()
        report[kind] = {"layer": layer, "products": products, "once": one.total() - layer}
        for title, some in ((f"one more {kind} layer", added), ("once in a step", once)) if options.list else ():
            print(f"{title}:")
            for what, count in sorted(some.items()):
                print(f"    {count:3} {what}")
    if options.tokens == 1 and not options.draft:  # what is done once is the same for a draft and for a chunk
        total = launches_of(*RATIOS).total()
        report["all kinds"] = {"once": total - sum(found["layer"] for found in report.values())}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
