#!/usr/bin/env bash
# Make .venv where there is none, and install what one make target needs: demo-cpu, demo-gpu, test or test-gpu.
# The target newest has an environment of its own, .venv-newest: the newest jax with the newest jaxlib and CUDA plugin.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
use_uv=$(command -v uv || true)

# Prints the executable of the first Python >= 3.12 that runs: a pyenv shim may be on PATH and still refuse. Without uv
# it must be able to make an environment too, which some systems package apart.
find_python() {
    local candidate root=
    if command -v pyenv >/dev/null; then root=$(pyenv root); fi
    for candidate in "python$(cat .python-version)" python3.12 python3.13 python3.14 python3 python \
        ${root:+"$root"/versions/*/bin/python}; do
        "$candidate" -c "import sys; sys.exit(sys.version_info < (3, 12))" >/dev/null 2>&1 || continue
        [[ $use_uv ]] || "$candidate" -c "import ensurepip, venv" >/dev/null 2>&1 || continue
        "$candidate" -c "import sys; print(sys.executable)"
        return
    done
    return 1
}

sees_gpu() {
    env -u JAX_PLATFORMS "$1" -c "import jax; jax.devices('gpu')" >/dev/null 2>&1
}

make_venv() {
    local python options=()
    if ! python=$(find_python); then
        # uv can fetch an interpreter; pip cannot.
        if [[ $use_uv ]] && uv venv --quiet --clear --python "$(cat .python-version)" "$venv"; then return; fi
        echo "No usable Python >= 3.12 found: put one on PATH, or name one that has the dependencies:" >&2
        echo "    make test PYTHON=/path/to/python" >&2
        exit 1
    fi
    # A JAX that already drives this machine's GPU is kept, not replaced.
    if [[ $target == *-gpu ]] && sees_gpu "$python"; then options=(--system-site-packages); fi
    echo "Making $venv with $python"
    if [[ $use_uv ]]; then
        uv venv --quiet --clear "${options[@]}" --python "$python" "$venv"
    else
        "$python" -m venv --clear "${options[@]}" "$venv"
    fi
}

install() {
    if [[ $use_uv ]]; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        # Only errors are printed. Python compiles each file when it is first used; pip would take a minute for all.
        "$venv/bin/python" -m pip install -qq --no-compile "$@"
    fi
}

target=$1
venv=.venv
if [[ $target == newest ]]; then venv=.venv-newest; fi
if [[ $target == *-gpu && ! -e /dev/nvidiactl ]] && ! command -v nvidia-smi >/dev/null; then
    echo "No NVIDIA GPU on this machine: make demo and make test run on the CPU." >&2
    exit 1
fi
if ! "$venv/bin/python" -c "" 2>/dev/null; then make_venv; fi
echo "Installing what '$target' needs into $venv; the first time takes some minutes"
case $target in
demo-cpu) install -e ".[demo]" ;;
demo-gpu) if sees_gpu "$venv/bin/python"; then install -e ".[demo]"; else install -e ".[gpu,demo]"; fi ;;
test) install -e ".[dev,cross,triton,docs]" ;;
test-gpu) if sees_gpu "$venv/bin/python"; then install -e ".[dev,triton]"; else install -e ".[gpu,dev,triton]"; fi ;;
newest)
    install --upgrade -e . "pytest>=8" "hypothesis>=6.100"
    # The plugin that compiles for GPUs must be of jaxlib's own version, which is known only once jaxlib is there.
    jaxlib=$("$venv/bin/python" -c "import jaxlib; print(jaxlib.__version__)")
    install "jax-cuda13-plugin==$jaxlib" "nvidia-cuda-nvcc>=13,<14" "nvidia-nvjitlink>=13,<14"
    ;;
*)
    echo "unknown target '$target': demo-cpu, demo-gpu, test, test-gpu or newest" >&2
    exit 1
    ;;
esac
