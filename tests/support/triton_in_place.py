"""A step of layers compiled for an A100 on a machine that has none, where kernels in Triton run by default.

python -m tests.support.triton_in_place prints as one JSON line what it does to a donated cache, and how many kernels
in Triton a step of three layers launches. Needs the extras ``cross`` and ``triton``.
"""

import functools
import json

from tests.support import compile_for_gpu


def main() -> None:
    compile_for_gpu.prepare_environment()
    compile_for_gpu.TARGETS["a100"] = ("NVIDIA A100-SXM4-80GB", 8, 108, 80_000_000_000)
    compile_for_gpu.DEVICE = compile_for_gpu.DEVICE.replace("feature_extension: ACCELERATED_FEATURES", "")
    from tests.support import in_place

    compiler = functools.partial(compile_for_gpu.compile_for, "a100")
    launches = []

    def counted(function, *args, **options):
        compiled = compiler(function, *args, **options)
        launches.append((compiled.as_text() or "").count('custom_call_target="triton_kernel_call"'))
        return compiled

    cases = {
        "decode step": in_place.forward(cfg=in_place.PUBLISHED, kv_format="fp8_tile64", indexer_format="mxfp4"),
    }
    reports = {}
    for name, case in cases.items():
        launches.clear()
        reports[name] = case(counted) | {"launches": launches[0]}
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
