"""Strictness for every test, and the devices they run on."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    # The cross-compilation wheels make JAX look for a GPU; on a machine without one it must not try.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# On a GPU the default is TF32; an op that means fp32 says so itself, so tests run under the default.

# Derandomised in CI: the same examples every time, and no deadline, because the first example compiles.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=20)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=20)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
