# All that a person or continuous integration runs. `make` alone lists it.
#
# One virtual environment, two stamps in it: `demo.stamp` (what the demo needs) and `dev.stamp` (all
# extras and the tools). Nothing is installed again until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: pip's progress is noise in a log. Its errors are still shown.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install
# Without plugins that dependencies bring: they cost each worker half a second.
PYTEST := $(BIN)/python -m pytest -p no:hydra_pytest -p no:anyio
# One worker per core. The tests of a file stay together because they share a server, and the longest files
# come first (tests/conftest.py), not those of most tests. A worker that crashes ends the run: a single worker
# that restarts would hang it.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# In `make test` two more than cores: its tests wait for servers and programs for half of their time.
WORKERS = $(shell $(BIN)/python -c 'import os; print(os.cpu_count() + 2)')
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
SETTINGS := pyproject.toml constraints.txt
OLDEST := .venv-oldest-torch
# Of the line `torch = ["torch>=2.6"]`.
OLDEST_TORCH = $(shell sed -n 's/^torch = \["torch>=\([0-9.]*\)"\]/\1/p' pyproject.toml)
TRACER_TESTS := tests/unit/tracer tests/unit/trace tests/integration/tracer

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test check lint format types contracts wheel unit docs docs-serve gallery bench bench-layers bench-ranks comparison estimate-bench insight gpu-checks limits test-oldest-torch clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/demo.stamp ## train a small GPT and log its memory to MLflow (ARGS="--help": its options)
	@$(BIN)/memlog demo $(ARGS)
	@echo "(memlog and mlflow are in $(BIN); to have them as commands: . $(BIN)/activate)"

test: $(VENV)/dev.stamp ## everything that must pass: the checks, the wheel, all tests
	@$(MAKE) -j4 lint types contracts wheel
	$(PYTEST) $(PARALLEL) -n $(WORKERS)

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
	$(PYTEST) $(PARALLEL) tests/unit -m "not integration and not slow and not gpu"

docs: $(VENV)/dev.stamp ## build the documentation's site into site/; a broken link or a missing docstring fails
	$(MKDOCS) build --strict

docs-serve: $(VENV)/dev.stamp ## show the documentation's site, and build it again at each change
	$(MKDOCS) serve

gallery: $(VENV)/dev.stamp ## make the documentation's reports again, in some minutes (ARGS: their names)
	$(BIN)/python -m docs_site.gallery $(ARGS)

test-oldest-torch: $(OLDEST)/made.stamp ## the tracer's tests on the oldest torch supported, in its own environment
	$(OLDEST)/bin/python -m pytest $(TRACER_TESTS)

bench: $(VENV)/dev.stamp ## what a training step costs, with and without memlog: writes docs/benchmarks.md
	$(BIN)/python -m benchmarks --write docs/benchmarks.md $(ARGS)
	$(BIN)/python -m docs_site.overhead_chart

bench-layers: $(VENV)/dev.stamp ## what tracing steps costs, beside other tools: writes docs/benchmarks-layers.md
	$(BIN)/python -m benchmarks.layers --write docs/benchmarks-layers.md $(ARGS)
	$(BIN)/python -m docs_site.overhead_chart

bench-ranks: $(VENV)/dev.stamp ## what rank 0's helper process does for up to 1,000 ranks: writes docs/scaling.md
	$(BIN)/python -m benchmarks.ranks --write docs/scaling.md $(ARGS)

comparison: $(VENV)/dev.stamp ## memlog beside other tools (ARGS="--python TraceML=…/bin/python …"): writes docs/comparison.md
	$(BIN)/python -m benchmarks.comparison --write docs/comparison.md $(ARGS)

insight: $(VENV)/dev.stamp ## how well memlog explains growth (hours; ARGS="--help"): writes docs/insight.md
	$(BIN)/python -m benchmarks.insight.run --seeds 20 --jobs 2 --write docs/insight.md $(ARGS)

# torchvision apart from the environment: its wheel is for CUDA, and transformers would try to import it.
estimate-bench: $(VENV)/dev.stamp ## how close memlog.estimate is to the allocator: writes into docs/estimates.md
	$(PIP) --no-deps --target $(VENV)/torchvision --upgrade torchvision==0.28.0
	PYTHONPATH=$(VENV)/torchvision $(BIN)/python -m benchmarks.estimates --write docs/estimates.md $(ARGS)

gpu-checks: $(VENV)/dev.stamp ## on a machine with a GPU: its tests and its benchmark (see docs/gpu-checks.md)
	$(PYTEST) -m gpu
	$(BIN)/python -m benchmarks.layers --device cuda --write docs/benchmarks-layers-gpu.md $(ARGS)

limits: $(VENV)/dev.stamp ## what a long run takes: writes docs/limits.md
	$(BIN)/python -m benchmarks.limits --write docs/limits.md $(ARGS)

clean: ## remove the environments, builds and caches (recorded runs stay)
	rm -rf $(VENV) $(OLDEST) dist build site *.egg-info
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
	@echo "installing memlog with torch and MLflow (some minutes the first time)"
	@$(PIP) -c constraints.txt -e '.[torch,mlflow]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/made.stamp $(SETTINGS)
	@echo "installing memlog with all extras and the development tools (some minutes the first time)"
	@$(PIP) -c constraints.txt -e '.[all]' --group dev
	@touch $@ $(VENV)/demo.stamp # which is a part of this
