"""The kernels in Triton compiled for a GPU on a machine that has none: python -m tests.support.triton_kernels

Prints a JSON line: of each GPU and each kernel at V4-Flash's sizes, the bytes of shared memory, the registers of a
thread and the bytes that it spills. Needs the extra ``triton``, which brings NVIDIA's assembler with it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1")
# KiB of shared memory that a block may have: of A100; RTX 30; L40S, RTX 40; H100; B200; RTX 50; GB10.
_SHARED_KIB = (163, 99, 99, 227, 227, 99, 99)
SHARED_BYTES = {capability: kib << 10 for capability, kib in zip(CAPABILITIES, _SHARED_KIB, strict=True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch that was recorded: the kernel, how it is launched, and what its pointers point to."""

    kernel: Any
    config: Any
    dtypes: tuple[str, ...]


def recorded(capability: str, calls: list[Callable[[], Any]]) -> dict[str, Launch]:
    """Trace calls for a GPU of this compute capability. Returns their launches by name of the kernel and format."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.triton_gpu import launch
    from tests.support.lane_kernels import mesh_of

    found: dict[str, Launch] = {}

    def note(kernel: Any, config: Any, inputs: Any, results: Any, aliases: Any) -> list[Any]:
        del aliases
        one = Launch(kernel=kernel, config=config, dtypes=tuple(str(x.dtype) for x in (*inputs, *results)))
        forms = [
            getattr(value, name, "") for value in config.constants.values() for name in ("kv_format", "key_format")
        ]
        form = next(filter(None, forms), "")
        found.setdefault(f"{kernel.__name__} {form} {len(found)}", one)
        return [jnp.zeros(result.shape, result.dtype) for result in results]

    compiled, launch._compiled = launch._compiled, note
    try:
        with jax.sharding.use_abstract_mesh(mesh_of(capability, "NVIDIA")):
            for call in calls:
                jax.eval_shape(call)
    finally:
        launch._compiled = compiled
    return found


def compiled(launch: Launch, capability: str) -> dict[str, int]:
    """Compile a launch, and assemble it as XLA would. Returns shared memory, registers and spilled bytes."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "uint8": "u8"}
    number, kernel, constants = int(capability.replace(".", "")), launch.kernel, dict(launch.config.constants)
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= {name: f"*{types[dtype]}" for name, dtype in zip(names, launch.dtypes, strict=True)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in names}
    options = {"num_warps": launch.config.warps, "num_stages": launch.config.stages}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    architecture = re.findall(r"\.target (\w+)", made.asm["ptx"])[0]
    tools = Path(nvidia.__file__).parent / "bin"
    assembler = tools / ("ptxas-blackwell" if number >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(made.asm["ptx"])
        command = [assembler, "-v", f"-arch={architecture}", "kernel.ptx", "-o", "kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", log)
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)[0]
    return {"shared": made.metadata.shared, "registers": int(registers), "spilled": int(stores) + int(loads)}


def steps(cfg: Any, batch: int, tokens: int, **formats: Any) -> Callable[[], Any]:
    """A forward pass through a layer of each kind with a cache of V4-Flash's sizes, and the gathers of its entries."""
    import jax
    import jax.numpy as jnp

    import dsv4jax as d4
    from dsv4jax.weights.params import param_shapes

    plan = d4.plan_cache(cfg, max_requests=256, max_context=131072, **formats)
    params = [param_shapes(cfg, spec.attn) for spec in d4.config.layer_schedule(cfg)]
    cache = d4.cache.abstract_cache(plan)
    x = jax.ShapeDtypeStruct((batch, tokens, cfg.hidden_size), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def step(params: Any, x: Any, cache: Any, slots: Any, num_new: Any) -> Any:
        cache, _ = d4.prepare_forward(cache, slots, num_new)
        for layer in range(cfg.num_layers):
            y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, backend="triton")
            x = x + y.astype(x.dtype)
        handle = d4.acquire(cache, cfg.num_layers // 2, slots, num_new, backend="triton")
        found = handle.gather_compressed(jnp.zeros((batch, 8), jnp.int32)), handle.gather_all_compressed()
        return x, cache, found

    return functools.partial(jax.eval_shape, step, params, x, cache, row, row)


# Batch, tokens and formats.
CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (1, 1, dict(kv_format="fp8_row", indexer_format="nvfp4", hca_tail="online")),
    (256, 1, dict(kv_format="fp8_tile64", indexer_format="mxfp4")),
    (8, 4, dict(kv_format="bf16", indexer_format="bf16")),
)
# On the oldest GPU also one token whose rows have no scales: a kernel gets None there.
WITHOUT_SCALES = 64, 1, dict(kv_format="bf16", indexer_format="f32")
# The others take few registers and little shared memory.
LARGE = ("decode_attention_kernel", "indexer_scores_kernel", "top_k_kernel")


def main() -> None:
    import dsv4jax as d4

    all_kinds = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(0, 4, 128))
    report: dict[str, dict[str, dict[str, int]]] = {}
    for capability in sys.argv[1:] or CAPABILITIES:
        # All kernels are compiled for the oldest GPU, and for the others those of a CSA layer that may not fit.
        is_oldest = capability == CAPABILITIES[0]
        cfg = all_kinds if is_oldest else dataclasses.replace(all_kinds, compress_ratios=(4,))
        report[capability] = {}
        for batch, tokens, formats in (*CASES, WITHOUT_SCALES) if is_oldest else CASES:
            for name, launch in recorded(capability, [steps(cfg, batch, tokens, **formats)]).items():
                if is_oldest or launch.kernel.__name__ in LARGE:
                    report[capability][f"B{batch} T{tokens} {name}"] = compiled(launch, capability)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
