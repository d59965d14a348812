"""Compile for an NVIDIA GPU on a machine that has none, and report: python -m tests.support.compile_for_gpu h200

XLA gets a description of the device instead of the device. It produces what would run there. Its buffer assignment
shows which donated bytes are updated in place, and what else the program allocates. There is one target per process.
Needs the extra ``cross``.
"""

import argparse
import functools
import glob
import importlib.util
import json
import math
import os
import site
import subprocess
import sys
from typing import Any

TARGETS = {
    "h200": ("NVIDIA H200", 9, 132, 150_000_000_000),
    "b200": ("NVIDIA B200", 10, 148, 150_000_000_000),
    "full": ("NVIDIA H200", 9, 132, 1_000_000_000),  # has room for a GB beside what others keep there
}

DEVICE = """
gpu_device_info {{
  name: "{name}" cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: 1.9 device_address_bits: 64
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: {memory}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" device_description_str: "{name}" dnn_version_info {{ major: 9 minor: 10 }}
"""


def prepare_environment() -> None:
    """Set the environment, before JAX is imported: use the CPU and the wheels' ptxas, and skip autotuning.

    Autotuning would need a device.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    tools = [path for root in site.getsitepackages() for path in glob.glob(f"{root}/nvidia/cu13/bin")]
    os.environ["PATH"] = os.pathsep.join([*tools, os.environ["PATH"]])


@functools.cache
def meshes(target: str, sizes: tuple[int, ...] = (1,), names: tuple[str, ...] = ("x",)):
    """Return meshes of GPUs of one host: one to place arrays on, and an abstract one that describes the target."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh

    name, major, cores, memory = TARGETS[target]
    device = DEVICE.format(name=name, major=major, cores=cores, memory=memory)
    topology = topologies.get_topology_desc(platform="cuda", target_config=device, topology=f"1x1x{math.prod(sizes)}")
    mesh = topologies.make_mesh(topology, sizes, names)
    # The compute capability of the abstract device decides which backend is chosen and what kernels are compiled for.
    device_type = type("Device", (AbstractDevice,), {"compute_capability": f"{major}.0"})
    return mesh, AbstractMesh(
        mesh.abstract_mesh.axis_sizes,
        mesh.abstract_mesh.axis_names,
        axis_types=mesh.abstract_mesh.axis_types,
        abstract_device=device_type(device_kind=name, num_cores=cores, platform="gpu"),
    )


def lower_for(target: str, function, *args, **jit_options):
    """Lower ``function`` for a target; args are pytrees of arrays or ShapeDtypeStructs."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh, abstract = meshes(target)
    sharding = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(abstract):
        return jax.jit(function, **jit_options).lower(*args)


def compile_for(target: str, function, *args, **jit_options):
    """As ``lower_for``, and compile it."""
    return lower_for(target, function, *args, **jit_options).compile()


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module``, which compiles for a GPU, and return what it wrote.

    Skips the test if compiling for a GPU is not possible.

    It runs in a process of its own, because there is one target per process, and it must not see this process's
    backend.
    """
    import pytest

    from tests.support.paths import ROOT

    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for a GPU without one needs the extra 'cross'")
    command = [sys.executable, "-m", module, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished


def report_of(module: str, target: str, *options: str) -> dict[str, Any]:
    """Return the JSON that ``python -m module target`` prints last; as ``run_module``."""
    return json.loads(run_module(module, target, *options).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--all", action="store_true", help="all programs, not a decode step alone")
    options = parser.parse_args()
    prepare_environment()
    # Products by cuBLAS, which may be what XLA chooses on a device, too: code of its own for them takes as long to
    # compile as all else, and neither what is aliased nor what grows with the cache depends on it.
    os.environ["XLA_FLAGS"] += " --xla_gpu_enable_triton_gemm=false"
    from tests.support import in_place

    compiler = functools.partial(compile_for, options.target)
    reports = {name: audit(compiler) for name, audit in (in_place.ALL if options.all else in_place.STEP).items()}
    prefill = {}
    for layer, kind in enumerate(("swa", "csa", "hca") if options.all else ()):
        function, args = in_place.flash_prefill(layer, "bfloat16")
        prefill[kind] = in_place.memory_of(compiler(function, *args, donate_argnums=2)).temp_size_in_bytes
    grants = [
        (compiler(function, *args).as_text() or "").count(" gather(") for function, args in map(in_place.grants, (1, 8))
    ]
    print(json.dumps(reports | {"prefill temporaries": prefill, "reads of grants": grants}))


if __name__ == "__main__":
    main()
