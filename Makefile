# make demo              the demo on the CPU: out/occupancy.png and a table
# make demo DEVICE=gpu   layers of V4-Flash's size on an NVIDIA GPU
# make test              the tests but the slowest, in JOBS=2 processes; ARGS="-k name" goes to pytest
# make test-gpu          all that a GPU can run, on one GPU, in as many processes as there are cores
# make check             all that a change must pass: lint, every test with the slowest, docs
# make lint              ruff and pyright
# make docs              the pages of docs/ and the API, as out/site; a warning is an error
# make clean             remove what the others made, the environment too
#
# The first use makes .venv with a Python that .ci/venv.sh finds, and installs into it; a changed pyproject.toml installs
# again. Where there is no network, name an interpreter that has everything already, and nothing is installed:
#
#     make test PYTHON=/path/to/python

.PHONY: demo test test-all test-gpu check lint docs clean
.NOTPARALLEL:

DEVICE ?= cpu
JOBS ?= 2
GPU_JOBS ?= auto

ifdef PYTHON
python := $(PYTHON)
installed =
export PYTHONPATH := $(CURDIR)
else
python := .venv/bin/python
installed = .venv/installed-$(1)
endif

demo: $(call installed,demo-$(DEVICE))
	$(python) examples/demo.py --device $(DEVICE) --out out

# Compiling is most of what tests do on a CPU: here XLA spends little on it, in check as much as it does for users.
test: $(call installed,test)
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(python) -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-all: $(call installed,test)
	$(python) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Without autotuning: processes that share a GPU would time kernels beside each other's and choose by chance.
test-gpu: $(call installed,test-gpu)
	XLA_FLAGS="--xla_gpu_autotune_level=0 $(XLA_FLAGS)" $(python) -m pytest -n $(GPU_JOBS) --dist worksteal \
		-m "not simulated" --durations=15 tests/test_*.py tests/cache tests/kernels tests/language tests/layer \
		tests/requests tests/weights tests/docs/test_generate.py tests/docs/test_readme.py $(ARGS)

check: lint test-all docs

lint: $(call installed,test)
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright --pythonpath $(python)

docs: $(call installed,docs)
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

.venv/installed-%: pyproject.toml .python-version .ci/venv.sh
	.ci/venv.sh $*
	touch $@

clean:
	rm -rf .venv .jax_cache out build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
