# Two commands for a newcomer: `make demo` and `make test`. Both make their own environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

# keep Ray quiet about GPUs on machines without
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO = 0
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION = 1
export FLWR_TELEMETRY_ENABLED ?= 0

.PHONY: help env demo test test-slow bench lint clean
help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /: /'

env: $(READY)  ## the environment in .venv, from python3 >= 3.11 and pip

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Keel needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

DEMO = method="fedintr" num-rounds=10 local-epochs=3 batch-size=32 lr=0.05
demo: $(READY)  ## FedIntR on scikit-learn's digits with 10 simulated clients, through `flwr run`
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/flwr run . --stream \
	  --run-config '$(DEMO)' \
	  --federation-config 'num-supernodes=10 client-resources-num-cpus=1'

test: lint  ## style, types and all tests but the slow ones
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m 'not slow'

test-slow: $(READY)  ## the tests that take minutes each
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m slow --timeout 1800

bench: $(READY)  ## speed, as ratios against bare loops and FedAvg: bench.json, bench.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove the environment and caches; runs under ~/.keel stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
