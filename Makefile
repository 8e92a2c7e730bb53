# Two commands for a newcomer: `make demo` and `make test`. Both create the environment first.
# Several machines: docs/how-to/deployment.md.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
JOBS   ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n > 8 ? 8 : n)))
# end-to-end tests wait for processes half of their time: two workers a core, up to twelve
WAITING_JOBS ?= $(shell n=$(JOBS); echo $$((n > 6 ? 12 : 2 * n)))

# silences Ray's warning about GPUs on machines that have none
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO = 0
# by default Ray's workers run at niceness 15 and would wait for all other tests
export RAY_worker_niceness = 0
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION = 1
export FLWR_TELEMETRY_ENABLED ?= 0

.PHONY: help env demo check test test-all test-slow test-deployment test-cluster coverage docs \
  image register deploy-server deploy-client end-server end-client clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /: /'

env: $(READY)  ## the environment in .venv, from Python 3.11 or newer and pip

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Keel needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)  ## compare FedAvg with FedRCL on scikit-learn's digits, over three seeds
	@$(BIN)/keel demo

# --- checks and tests ------------------------------------------------------------------------
# byte code is kept, or every process that a test starts compiles Keel and its tests anew
PYTEST = PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest
# $(call checked,JOBS,OPTIONS): style, then types beside the tests; pytest's summary comes last
checked = $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . || exit 1; \
  log=$$(mktemp); $(BIN)/mypy >$$log 2>&1 & types=$$!; \
  $(PYTEST) --quiet --durations 15 --numprocesses $(1) $(2); tests=$$?; \
  wait $$types || { cat $$log; tests=1; }; \
  rm -f $$log; exit $$tests

check: $(READY)  ## style, types, architecture and unit tests: a minute on two cores
	@$(call checked,$(JOBS),-m 'not end_to_end and not slow and not deployment and not cluster' \
	  --ignore-glob '*/end_to_end/*')

test: $(READY)  ## check, end-to-end tests and a deployment on loopback
	@$(call checked,$(WAITING_JOBS),-m 'not slow and not deployment and not cluster')

test-all: test test-slow test-deployment test-cluster  ## all tests

test-slow: $(READY)  ## the tests that take minutes each
	$(PYTEST) -m 'slow and not deployment and not cluster' --timeout 1800

test-deployment: $(READY)  ## network namespaces and containers; as root, installs Debian packages
	$(PYTEST) -m deployment --timeout 3600 -rs

test-cluster: $(READY)  ## two Ray nodes in network namespaces: as root, with iproute2 and util-linux
	$(PYTEST) -m cluster --timeout 3600 -rs

coverage: $(READY)  ## line coverage of client_app, strategies and server_app; files under 90 %
	$(PYTEST) --numprocesses $(WAITING_JOBS) -m 'not slow and not deployment and not cluster' --cov --cov-report=
	@$(BIN)/python -m coverage report
	@echo 'Under 90 %:'; $(BIN)/python -m coverage report | awk '/\.py/ && $$NF + 0 < 90 {print "  " $$1, $$NF}'

# --- documentation ---------------------------------------------------------------------------
docs: $(READY)  ## the documentation as a site, in build/site
	@$(BIN)/python -c 'import mkdocs, mkdocstrings_handlers.python, l2m4m' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# --- deployment ------------------------------------------------------------------------------
# `docker compose` if the plugin is installed, else docker-compose 1.28 or newer
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
CREDENTIALS ?= credentials
export KEEL_IMAGE ?= keel
# Containers run as the owner of the secrets; root gives the secrets to the image's user.
export KEEL_UID ?= $(shell [ $$(id -u) = 0 ] && echo 10001 || id -u)
give_secrets = [ $$(id -u) != 0 ] || chown -R $(KEEL_UID)
# Docker would make a directory, owned by root, in place of what is missing
there = case '$(1)' in /*) [ $(2) '$(1)' ];; *) false;; esac || \
  { echo '$(1): no such $(3), or its path is not absolute; see docs/how-to/deployment.md'; exit 1; }
# new containers each time: a compose that finds nothing changed would leave those that read the old
# secrets and certificates when they started
UP = up -d --force-recreate
SERVER = $(COMPOSE) -p keel-server -f docker/compose.server.yml
CLIENT = $(COMPOSE) -p "keel-$$(echo '$(KEEL_CLIENT)' | tr A-Z. a-z-)" -f docker/compose.client.yml

image:  ## the container image, from BASE (python:3.12.11-slim-bookworm), with PIP_OPTIONS, CONSTRAINTS
	docker build -f docker/Dockerfile -t $(KEEL_IMAGE) \
	  $(if $(BASE),--build-arg BASE='$(BASE)') $(if $(PIP_OPTIONS),--build-arg PIP_OPTIONS='$(PIP_OPTIONS)') \
	  $(if $(CONSTRAINTS),--build-arg CONSTRAINTS='$(CONSTRAINTS)') .

deploy-server: export KEEL_CREDENTIALS ?= $(CURDIR)/$(CREDENTIALS)/server
deploy-server:  ## SuperLink and ServerApp executor on this machine; variables: docs/environment.md
	@$(call there,$(KEEL_CREDENTIALS)/executor.secret,-f,file)
	@$(if $(KEEL_DATA),$(call there,$(KEEL_DATA),-d,directory))
	$(give_secrets) '$(KEEL_CREDENTIALS)'
	$(SERVER) $(UP)

register: export KEEL_CREDENTIALS ?= $(CURDIR)/$(CREDENTIALS)/server
register:  ## sites with the SuperLink on this machine: REQUESTS="site-a.pub site-b.pub"
	@$(foreach file,$(REQUESTS),$(call there,$(abspath $(file)),-f,file) &&) true
	$(if $(REQUESTS),cat $(REQUESTS) |) $(SERVER) exec -T superlink \
	  python -m keel deploy register --credentials /credentials --wait 120 $(if $(REQUESTS),-)

deploy-client: export KEEL_CREDENTIALS ?= $(CURDIR)/$(CREDENTIALS)/$(KEEL_CLIENT)
deploy-client:  ## one client on this machine; variables: docs/environment.md
	@$(foreach name,KEEL_CLIENT KEEL_SERVER KEEL_DATA,[ '$($(name))' ] || \
	  { echo '$(name) is not set; see docs/environment.md'; exit 1; };)
	@$(foreach name,executor.secret ca.pem,$(call there,$(KEEL_CREDENTIALS)/$(name),-f,file) &&) true
	@$(call there,$(KEEL_DATA),-d,directory)
	@for name in $$(env | sed -n 's/^\(export\)\{0,1\} *\(KEEL_PRIVACY_[^ =:]*\) *[=:] *[^ ].*/\2/p' \
	    - $(wildcard .env docker/.env)); do \
	  grep -q " $$name:" docker/compose.client.yml || \
	    { echo "$$name is not a site limit; see docs/environment.md"; exit 1; }; \
	done
	$(give_secrets) '$(KEEL_CREDENTIALS)'
	$(CLIENT) $(if $(findstring cuda,$(KEEL_DEVICE)),-f docker/compose.gpu.yml) $(UP)

end-server:  ## stop what deploy-server started; its volumes stay
	$(SERVER) down

end-client:  ## stop what deploy-client started, of KEEL_CLIENT; its volumes stay
	@[ '$(KEEL_CLIENT)' ] || { echo 'KEEL_CLIENT is not set; see docs/environment.md'; exit 1; }
	KEEL_CLIENT='$(KEEL_CLIENT)' KEEL_SERVER=- KEEL_DATA=/ $(CLIENT) down

clean:  ## remove the environment and caches; runs under ~/.keel stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
