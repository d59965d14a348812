"""How fast is a whole model of V4-Flash's sizes? python -m benchmarks.model

Each part is a program of ``benchmarks.model_parts`` and says there what it times. With ``--part`` more than once, or
without it, they run one after the other.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from pathlib import Path

import jax

WHOLE = "layer", "step", "generate", "prompt"  # parts that share a random model
MESH = "same", "made", "token", "kernels", "folder"  # besides prompt and step, with --mesh
KERNELS = {
    "experts": "experts",
    "shared": "shared_expert",
    "router": "router",
    "between": "hyper_connections",
    "head": "head",
}  # and their modules


DRAFTS = "drafts"  # a part with a model of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = *KERNELS, *WHOLE, DRAFTS
    parser.add_argument("--part", action="append", choices=(*every, *MESH), help="may be repeated; default all")
    parser.add_argument("--mesh", default=None, help="the whole model on several devices instead, such as 1x2")
    parser.add_argument("--layers", type=int, default=43, help="of the whole model")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU; of the whole model alone")
    options = parser.parse_args()
    if options.mesh is None and not options.tiny:
        # Layers share weights, which XLA counts once for each. It would try to save the memory that they do not take.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_disable_hlo_passes=rematerialization"
    if options.mesh is None and set(options.part or ()) & set(MESH):
        parser.error(f"{', '.join(MESH)} are with --mesh")
    parts = options.part or every
    out = [] if options.out is None else ["--out", str(options.out)]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)

    def run(module: str, arguments: list[str]) -> None:
        began = time.perf_counter()
        print(f"{module}:", flush=True)
        importlib.import_module(f"benchmarks.model_parts.{module}").main([*arguments, *out])
        print(f"    {module}: {time.perf_counter() - began:.0f} s", flush=True)

    if options.mesh is not None:
        arguments = ["--mesh", options.mesh, "--layers", str(options.layers), *(["--tiny"] if options.tiny else [])]
        run("mesh", [*arguments, *(word for part in options.part or () for word in ("--part", part))])
        return
    for part, module in KERNELS.items():
        if part in parts:
            run(module, [])
    arguments = ["--layers", str(options.layers), *(["--tiny"] if options.tiny else [])]
    if whole := [part for part in WHOLE if part in parts]:
        run("whole", [*arguments, *(word for part in whole for word in ("--part", part))])
    if DRAFTS in parts:
        run("drafts", arguments)


if __name__ == "__main__":
    main()
