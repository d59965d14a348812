"""How long a 61-layer V4-Pro decode step takes to trace and compile when it scans over its layers.

python -m benchmarks.compile_time
"""

import time

import jax

from tests.support import in_place

if __name__ == "__main__":
    function, args = in_place.pro_scan()
    begin = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=2).lower(*args)
    traced = time.perf_counter()
    lowered.compile()
    compiled = time.perf_counter()
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: traced in {traced - begin:.1f} s, "
        f"compiled in {compiled - traced:.1f} s"
    )
