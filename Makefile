# make demo              the demo on the CPU: out/occupancy.png and a table
# make demo DEVICE=gpu   layers of V4-Flash's size on an NVIDIA GPU
# make test              all but the slowest tests, in JOBS=2 processes; ARGS="-k name" goes to pytest
# make test-gpu          all tests to which a GPU matters, on one GPU, in as many processes as there are cores
# make check             what every change must pass: lint, test, the slowest tests, check-newest, docs
# make sweeps            the cases that make check leaves out: for a release, and for whoever changes what they are about
# make check-newest      import, README's example and the audit of products, on the newest jax, jaxlib and CUDA plugin
# make lint              ruff and pyright
# make docs              the pages of docs/ and the API, as out/site; a warning is an error
# make clean             remove what the others made, the environment too
#
# The first use makes .venv with a Python that .ci/venv.sh finds, and installs into it; a changed pyproject.toml installs
# again. Where there is no network, name an interpreter that has everything already, and nothing is installed:
#
#     make test PYTHON=/path/to/python

.PHONY: demo test test-slow sweeps test-gpu check check-newest lint docs clean

# The runs of a target, and the programs that tests start, read what the first one has compiled of Python's files.
unexport PYTHONDONTWRITEBYTECODE

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

# On a CPU, tests spend most of their time in XLA, which is told to optimize little, to emit fusions as it did before it
# had an emitter in MLIR, and to compile a program in one piece: a layer then compiles in a quarter of the time. Slow
# tests of the rules and of recorded layers, and audits, compile as users do. Those that compare two programs bit for bit
# need the emitter of today.
quickly := JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	XLA_FLAGS="--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters \
		--xla_cpu_parallel_codegen_split_count=1 $(XLA_FLAGS)"
pytest := $(python) -m pytest -n $(JOBS) --dist worksteal --durations=15

test: $(call installed,test)
	$(quickly) $(pytest) -m "not slow" $(ARGS)

slow := slow and not sweep

# ARGS may leave one of the two runs without tests, for which pytest exits with 5.
test-slow: $(call installed,test)
	$(quickly) $(pytest) -m "$(slow) and not (optimized or two_programs)" $(ARGS); quick=$$?; \
	$(pytest) -m "$(slow) and (optimized or two_programs)" $(ARGS); whole=$$?; \
	case $$quick$$whole in 00$(if $(ARGS),|05|50)) ;; *) exit 1 ;; esac

sweeps: slow := sweep
sweeps: test-slow

# Without autotuning, because the timings of processes that share a GPU disturb each other, and so choose by chance.
test-gpu: $(call installed,test-gpu)
	XLA_FLAGS="--xla_gpu_autotune_level=0 $(XLA_FLAGS)" $(python) -m pytest -n $(GPU_JOBS) --dist worksteal \
		-m "not simulated and (gpu or not (slow or any_device))" --durations=15 tests/test_*.py tests/cache tests/kernels tests/language tests/layer \
		tests/requests tests/triton_gpu tests/weights tests/model tests/docs/test_generate.py tests/docs/test_readme.py $(ARGS)

# What leaves a core idle runs beside something else.
check:
	$(MAKE) --jobs=2 lint docs $(if $(PYTHON),,check-newest)
	$(MAKE) test
	$(MAKE) test-slow

# An environment of its own, because the one for tests has an older CUDA plugin, which compiles faster kernels.
check-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest tests/audits/test_products.py tests/docs/test_readme.py -k "products or example"

.venv-newest/installed: pyproject.toml .python-version .ci/venv.sh
	.ci/venv.sh newest
	touch $@

lint: $(call installed,test)
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright --pythonpath $(python)

docs: $(call installed,test)
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

.venv/installed-%: pyproject.toml .python-version .ci/venv.sh
	.ci/venv.sh $*
	touch $@

clean:
	rm -rf .venv .venv-newest .jax_cache out build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
