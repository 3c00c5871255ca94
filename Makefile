# All that a person or continuous integration runs. `make` alone lists it.
#
# One virtual environment, two stamps in it: `demo.stamp` (what the demo needs) and `dev.stamp` (all
# extras and the tools). Another one has torch's CUDA build on simulated devices, with a stamp for each part. Nothing
# is installed again until pyproject.toml or constraints.txt changes, and nothing compiled until a source changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: pip's progress is noise in a log. Its errors are still shown.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install
# The same, with a line as pip begins a download of 10 MB or more, and one as it unpacks. The pipe hides its status.
telling = { $(subst -qq,,$(PIP)) --progress-bar off $(1) || touch $@.failed; } | awk ' \
  /^ *Downloading .*\(([0-9][0-9]+(\.[0-9]+)? MB|[0-9.]+ GB)\)/ { print "  downloading", $$2, $$3, $$4; fflush() } \
  /^Installing collected/ { print "  unpacking (about a minute)"; fflush() }'; ! rm $@.failed 2> /dev/null
COMMA := ,
# Without plugins that dependencies bring: they cost each worker half a second.
PYTEST := $(BIN)/python -m pytest -p no:hydra_pytest -p no:anyio
# One worker per core. The tests of a file stay together because they share a server, and the longest files
# come first (tests/conftest.py), not those of most tests. A worker that crashes ends the run: a single worker
# that restarts would hang it.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# In `make test` two more than cores: its tests wait for servers and programs for half of their time.
WORKERS = $(shell $(BIN)/python -c 'import os; print(os.cpu_count() + 2)')
# A test that fails runs again after all others, alone: on two busy cores a program can get no time for seconds.
# The first that fails twice ends this. What passes the second time stays in the output, as a fault of the test.
REMEMBERED := -o cache_dir=.pytest_cache/of-make-test
again = { test $$? -eq 1 && $(1) $(REMEMBERED) --last-failed --last-failed-no-failures none --maxfail 1 -v $(2); }
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
SETTINGS := pyproject.toml constraints.txt
OLDEST := .venv-oldest-torch
# Of the line `torch = ["torch>=2.6"]`.
OLDEST_TORCH = $(shell sed -n 's/^torch = \["torch>=\([0-9.]*\)"\]/\1/p' pyproject.toml)
TRACER_TESTS := tests/unit/tracer tests/unit/trace tests/integration/tracer
# PyTorch's own CUDA build on libraries of tests/cuda_runtime in place of NVIDIA's: for tests without a GPU.
CUDA := .venv-cuda
CUDA_RUNTIME := tests/cuda_runtime
pinned = $(shell sed -n 's/^$(1)==//p' constraints.txt)
TORCH = $(call pinned,torch)
CUDA_SITE = $(abspath $(CUDA))/lib/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages
CUDA_SOURCES := $(wildcard $(CUDA_RUNTIME)/*.[ch] $(CUDA_RUNTIME)/*.py) $(CUDA_RUNTIME)/Makefile
CUDA_PIP := $(CUDA)/bin/python -m pip --disable-pip-version-check -qq
# The helper process loads NVML without torch, which finds its libraries by itself.
WITH_CUDA = LD_LIBRARY_PATH=$(CUDA_SITE)/nvidia/cu13/lib OMP_NUM_THREADS=1
CUDA_PYTEST = $(WITH_CUDA) MEMLOG_TESTS_NEED_CUDA=1 $(CUDA)/bin/python -m pytest -p no:anyio
# Only these files are read: others need packages that this environment lacks.
CUDA_TESTS = $(shell grep -rlE 'pytest\.mark\.(cuda|gpu)\b' tests --include='test_*.py' | sort)

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test check lint format types contracts wheel unit docs docs-serve gallery bench bench-layers bench-ranks comparison estimate-bench estimate-bench-cuda estimate-bench-ranks estimate-bench-ranks-cuda plans-bench gate-bench insight leaks cuda-env cuda-tests gpu-checks limits test-oldest-torch truth release-check clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/demo.stamp ## train a small GPT and log its memory to MLflow (ARGS="--help": its options)
	@$(BIN)/memlog demo $(ARGS)
	@echo "(memlog and mlflow are in $(BIN); to have them as commands: . $(BIN)/activate)"

test: $(VENV)/dev.stamp ## everything that must pass: the checks, the wheel, all tests
	@$(MAKE) -j4 lint types contracts wheel
	@rm -rf .pytest_cache/of-make-test
	$(PYTEST) $(PARALLEL) -n $(WORKERS) $(REMEMBERED) || $(call again,$(PYTEST))
	@test "$$(uname)" != Linux || $(MAKE) cuda-tests

check: $(VENV)/dev.stamp ## the quick part of `make test`, in about a minute
	@$(MAKE) -j4 lint types contracts unit

lint: $(VENV)/dev.stamp ## ruff: rules and formatting
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

format: $(VENV)/dev.stamp ## let ruff repair what it can
	$(BIN)/ruff check --quiet --fix . || true
	$(BIN)/ruff format .

types: $(VENV)/dev.stamp ## mypy, strict
	$(BIN)/mypy

contracts: $(VENV)/dev.stamp ## import-linter: who may import whom
	$(BIN)/lint-imports --no-logo

wheel: $(VENV)/dev.stamp ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null

unit: $(VENV)/dev.stamp ## the unit tests alone
	$(PYTEST) $(PARALLEL) tests/unit -m "not integration and not slow and not gpu and not cuda"

docs: $(VENV)/dev.stamp ## build the documentation's site into site/; a broken link or a missing docstring fails
	$(MKDOCS) build --strict

docs-serve: $(VENV)/dev.stamp ## show the documentation's site, and build it again at each change
	$(MKDOCS) serve

gallery: $(VENV)/dev.stamp ## make the documentation's reports again, in some minutes (ARGS: their names)
	$(BIN)/python -m docs_site.gallery $(ARGS)

test-oldest-torch: $(OLDEST)/made.stamp ## the tracer's tests on the oldest torch supported, in its own environment
	$(OLDEST)/bin/python -m pytest $(TRACER_TESTS)

bench: $(VENV)/dev.stamp ## what a training step costs, with and without memlog: writes docs/project/benchmarks.md
	$(BIN)/python -m benchmarks --write docs/project/benchmarks.md $(ARGS)
	$(BIN)/python -m docs_site.overhead_chart

bench-layers: $(VENV)/dev.stamp ## what tracing steps costs, beside other tools: writes docs/project/benchmarks-layers.md
	$(BIN)/python -m benchmarks.layers --write docs/project/benchmarks-layers.md $(ARGS)
	$(BIN)/python -m docs_site.overhead_chart

bench-ranks: $(VENV)/dev.stamp ## what rank 0's helper process does for up to 1,000 ranks: writes docs/project/scaling.md
	$(BIN)/python -m benchmarks.ranks --write docs/project/scaling.md $(ARGS)

comparison: $(VENV)/dev.stamp ## memlog beside other tools (ARGS="--python TraceML=…/bin/python …"): writes docs/project/comparison.md
	$(BIN)/python -m benchmarks.comparison --write docs/project/comparison.md $(ARGS)

# With --device: in the environment with torch's CUDA build. Only the first bytes of each copy to a device are
# made, so that the simulated device's memory does not count as the host's.
insight: $(if $(findstring --device cuda,$(ARGS)),$(CUDA)/made.stamp,$(VENV)/dev.stamp) ## how well memlog explains growth (hours; ARGS="--help", ARGS="--device cuda"): writes docs/project/insight.md
	$(if $(findstring --device cuda,$(ARGS)),$(WITH_CUDA) FAKE_CUDA_COPY=4k $(CUDA)/bin/python,$(BIN)/python) \
	  -m benchmarks.insight.run --seeds 20 --jobs 2 --write docs/project/insight.md $(ARGS)

leaks: $(VENV)/dev.stamp ## how well memlog explains generated leaks, and leaves their healthy twins alone (two hours; ARGS="--help"): writes into docs/project/insight.md
	$(BIN)/python -m benchmarks.insight.generated.run --write docs/project/insight.md $(ARGS)

plans-bench: $(VENV)/dev.stamp ## how close plans for runs are to trainings that make their changes (ten minutes): writes into docs/project/accuracy.md
	$(BIN)/python -m benchmarks.plans --write docs/project/accuracy.md $(ARGS)

# torchvision apart from the environment: its wheel is for CUDA, and transformers would try to import it.
estimate-bench: $(VENV)/dev.stamp ## how close memlog.estimate is to the allocator: writes into docs/project/accuracy.md
	$(PIP) --no-deps --target $(VENV)/torchvision --upgrade -c constraints.txt torchvision
	PYTHONPATH=$(VENV)/torchvision $(BIN)/python -m benchmarks.estimates --write docs/project/accuracy.md $(ARGS)

estimate-bench-cuda: $(CUDA)/made.stamp ## the same for CUDA's allocator, on simulated devices: writes into docs/project/accuracy.md (ARGS=--every-optimizer: all)
	$(WITH_CUDA) $(CUDA)/bin/python -m benchmarks.estimates.on_device --write docs/project/accuracy.md $(ARGS)

estimate-bench-ranks: $(VENV)/dev.stamp ## the same for two real ranks, with gloo on the CPU (needs a C compiler): writes into docs/project/accuracy.md
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.estimates.ranks.gloo --write docs/project/accuracy.md $(ARGS)

estimate-bench-ranks-cuda: $(CUDA)/made.stamp ## the same for a rank on a simulated device: writes into docs/project/accuracy.md
	$(WITH_CUDA) $(CUDA)/bin/python -m benchmarks.estimates.ranks.on_device --write docs/project/accuracy.md $(ARGS)

cuda-env: $(CUDA)/made.stamp ## torch's CUDA build on simulated devices, in an environment of its own (about two minutes)
	@echo "LD_LIBRARY_PATH=$(CUDA_SITE)/nvidia/cu13/lib $(CUDA)/bin/python sees $$($(WITH_CUDA) $(CUDA)/bin/python -c 'import torch; print(torch.cuda.device_count())') simulated device(s)"

cuda-tests: $(CUDA)/made.stamp ## the tests that need a CUDA allocator, on simulated devices (ARGS: pytest's)
	@rm -rf .pytest_cache/of-make-test
	$(CUDA_PYTEST) $(PARALLEL) -m cuda $(REMEMBERED) $(CUDA_TESTS) $(ARGS) || $(call again,$(CUDA_PYTEST),-m cuda $(CUDA_TESTS))

gpu-checks: $(VENV)/dev.stamp ## on a machine with a GPU: its tests and its benchmark (see docs/project/gpu-checks.md)
	MEMLOG_TESTS_NEED_CUDA=1 $(PYTEST) -m "gpu or cuda" $(CUDA_TESTS)
	$(BIN)/python -m benchmarks.layers --device cuda --write docs/project/benchmarks-layers-gpu.md $(ARGS)

gate-bench: $(VENV)/dev.stamp ## how often gates judge a steady and a 1 % heavier training wrongly (half an hour): writes into docs/project/gates.md
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gate --write docs/project/gates.md $(ARGS)

truth: $(VENV)/dev.stamp ## compare what all surfaces say about 1,000 runs (ten minutes): writes into docs/project/truth.md
	PYTHONPATH=tests $(BIN)/python -m support.measure_truth --write docs/project/truth.md $(ARGS)

# Without a network: pip uses no index, npm its cache.
release-check: $(VENV)/dev.stamp ## everything that a release needs, without a network (ARGS="--help")
	@$(BIN)/python .ci/release_check.py $(ARGS)

limits: $(VENV)/dev.stamp ## what a long run takes: writes docs/project/limits.md
	$(BIN)/python -m benchmarks.limits --write docs/project/limits.md $(ARGS)

clean: ## remove the environments, builds and caches (recorded runs stay)
	rm -rf $(VENV) $(OLDEST) $(CUDA) dist build site *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "memlog needs Python 3.10 or newer; name one: make PYTHON=python3.12 (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "$(PYTHON) can't make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1' # the first that knows --group
	@touch $@

# No part of `make test`: where no index of CPU builds is named (PIP_EXTRA_INDEX_URL), this torch comes with
# CUDA's libraries, several gigabytes.
$(OLDEST)/made.stamp: pyproject.toml
	@echo "making $(OLDEST) with torch $(OLDEST_TORCH)"
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check -qq install 'torch==$(OLDEST_TORCH).*' \
	  -e . numpy pytest pytest-timeout hypothesis
	@touch $@

# The constraints matter most for torch: unpinned, pip takes a build of several gigabytes.
$(VENV)/demo.stamp: $(VENV)/made.stamp $(SETTINGS)
	@echo "installing memlog with torch and MLflow, some minutes the first time; large downloads are named:"
	@$(call telling,-c constraints.txt -e '.[torch$(COMMA)mlflow]')
	@touch $@

$(VENV)/dev.stamp: $(VENV)/made.stamp $(SETTINGS)
	@echo "installing memlog with all extras and the development tools (some minutes the first time)"
	@$(PIP) -c constraints.txt -e '.[all]' --group dev
	@touch $@ $(VENV)/demo.stamp # which is a part of this

# The libraries that torch asks for are left out of its metadata: pip would fetch several gigabytes of them.
# "===" takes no local version, such as a CPU build in a folder of wheels.
$(CUDA)/torch.stamp: constraints.txt
	@echo "making $(CUDA) with torch's CUDA build (527 MB)"
	@test -d $(CUDA) || $(PYTHON) -m venv $(CUDA)
	@$(CUDA_PIP) install --upgrade 'pip>=25.1'
	@$(CUDA_PIP) install --no-deps 'torch===$(TORCH)'
	@sed -i -E '/^Requires-Dist: (cuda|nvidia|triton)/d' $(CUDA_SITE)/torch-$(TORCH).dist-info/METADATA
	@touch $@

$(CUDA)/packages.stamp: $(CUDA)/torch.stamp $(SETTINGS)
	@$(CUDA_PIP) install -c constraints.txt -e . --group cuda
	@$(CUDA_PIP) install -c constraints.txt --no-deps torchvision
	@touch $@

# The headers alone: the packages of CUDA's libraries would be loaded in place of those that are built here.
$(CUDA)/headers.stamp: $(CUDA)/torch.stamp
	@rm -rf $(CUDA)/headers
	@$(CUDA_PIP) download -c constraints.txt --no-deps -d $(CUDA)/headers nvidia-cuda-runtime
	@$(CUDA)/bin/python -m zipfile -e $(CUDA)/headers/nvidia_cuda_runtime-*.whl $(CUDA)/headers
	@touch $@

$(CUDA)/made.stamp: $(CUDA)/packages.stamp $(CUDA)/headers.stamp $(CUDA_SOURCES)
	@command -v $(CC) > /dev/null && command -v nm > /dev/null || { \
	  echo "simulated devices need a C compiler and binutils; on Debian: apt-get install gcc libc6-dev binutils" >&2; exit 1; }
	@$(MAKE) -s -C $(CUDA_RUNTIME) install PYTHON=$(abspath $(CUDA)/bin/python) BUILD=$(abspath $(CUDA)/cuda-runtime) \
	  TORCH=$(CUDA_SITE)/torch HEADERS=$(abspath $(CUDA)/headers/nvidia/cu13/include)
	@touch $@
