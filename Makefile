# `make demo` runs a demonstration; CI runs `make lint test`.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
AUDIT := .cache/audit-venv
IMAGE := .cache/image-venv
VLLM := $(or $(FIRSTTOKEN_VLLM_VENV),.cache/vllm-venv)

.PHONY: help setup demo test lint bench field chaos fuzz soak dashboards clients browser importing vllm envoy chart chart-write wheel lock audit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) ## install firsttoken and its development tools into .venv

demo: $(CORE) ## run simulated engines, the gateway, traffic and a live table: no GPU, no key (ARGS="--port 8181")
	@$(BIN)/firsttoken demo $(ARGS)

test: export PYTHONDONTWRITEBYTECODE := # hundreds of tests start a process
test: $(DEV) ## run the tests, side by side (PYTEST_ARGS="-k relay" selects, "-n0 -x --pdb" debugs)
	@$(BIN)/python scripts/prometheus_setup.py
	@$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

lint: $(DEV) ## run ruff, mypy --strict and the layer contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(DEV) ## compare with nginx, three routers in Rust, LiteLLM and the last committed result (BENCH_ARGS="--rounds 1")
	@$(BIN)/python -m benchmarks.suite --write $(BENCH_ARGS)
	@$(BIN)/python -m benchmarks.truth
	@$(BIN)/python -m benchmarks.mixed

field: $(DEV) ## 2,000 conversations of eleven clients before fakes of 19 APIs that verify (ARGS="--conversations 200")
	@$(BIN)/python -m tests.programs.field $(ARGS)

chaos: $(DEV) ## run the catalogue of faults and write docs/reliability.md (ARGS="--only 2-4 --quick")
	@$(BIN)/python -m tests.programs.chaos --page docs/reliability.md $(ARGS)

fuzz: $(DEV) ## random bytes, bodies and chunks against a gateway, frames and messages against a picker (CASES=100000)
	@$(BIN)/python -m tests.programs.chaos.fuzz $(or $(CASES),100000)
	@$(BIN)/python -m tests.programs.envoy.fuzz $(or $(CASES),100000)

soak: $(DEV) ## mixed callers and random faults: memory, descriptors, gauges (MINUTES=60 SEED=1)
	@$(BIN)/python -m tests.programs.chaos.soak $(or $(MINUTES),60) $(or $(SEED),1)

dashboards: $(DEV) ## generate the dashboards of the chart from deploy/grafana/*.py
	@$(BIN)/python -m deploy.grafana.generate

clients: $(DEV) ## test released clients against a gateway, write docs/clients.md (2 GB once; ARGS="--only codex")
	-@$(BIN)/python -m scripts.clients_setup
	@$(BIN)/python -m tests.programs.clients --page docs/clients.md $(ARGS)

browser: $(DEV) ## test the dashboard in a real browser (needs chromium: apt install chromium)
	@$(BIN)/python -m pytest tests/programs/browser -o addopts="-q --strict-markers" -rs $(PYTEST_ARGS)

importing: $(DEV) ## imported files beside the real LiteLLM, 12 files, 10 minutes (installs 700 MB once; ARGS="--only dead")
	@$(BIN)/python scripts/litellm_setup.py
	@$(BIN)/python -m tests.programs.importing --keep $(ARGS)

vllm: $(DEV) ## run the tests with real vLLM servers, on CPU, and released clients (installs 5.5 GB once)
	@$(BIN)/python scripts/vllm_setup.py
	-@$(BIN)/python -m scripts.clients_setup
	@$(VLLM)/bin/python scripts/vllm_models.py
	@$(BIN)/python scripts/vllm_servers.py -- $(BIN)/python -m pytest tests/programs/vllm -s $(PYTEST_ARGS)

wheel: $(DEV) ## build the wheel into dist/, install it into a fresh environment and try its commands there
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python -m pytest tests/programs/wheel -o addopts="-q --strict-markers" $(PYTEST_ARGS)

envoy: $(DEV) ## run the endpoint picker behind three versions of the real Envoy (installs 260 MB once)
	@$(BIN)/python scripts/envoy_setup.py
	@$(BIN)/python -m pytest tests/programs/envoy -o addopts="-q --strict-markers" -s $(PYTEST_ARGS)

chart: $(DEV) ## render the Helm chart by Helm, compare with the kept renders, validate (installs 250 MB once)
	@$(BIN)/python scripts/chart_setup.py
	@$(BIN)/python -m pytest tests/programs/chart -o addopts="-q --strict-markers" $(PYTEST_ARGS)

chart-write: export FIRSTTOKEN_WRITE_CHART := 1
chart-write: $(DEV) ## generate the chart's schema, and write its kept renders
	@$(BIN)/python -m deploy.helm.generate
	@$(MAKE) --no-print-directory chart

lock: $(AUDIT) ## resolve the dependencies of the container image anew, with hashes, into deploy/locks
	@$(AUDIT)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
	  --custom-compile-command "make lock" --extra kvevents --extra otel --extra pick --extra redis --extra schemas \
	  --extra tokenizers --output-file deploy/locks/image.txt pyproject.toml
	@echo 'hatchling>=1.27' | $(AUDIT)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --upgrade --custom-compile-command "make lock" --output-file deploy/locks/build.txt -

audit: $(AUDIT) ## check the locked dependencies: known vulnerabilities, licences, hashes; writes dist/sbom.cdx.json
	@$(PYTHON) -m venv --clear $(IMAGE)
	@$(IMAGE)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r deploy/locks/image.txt
	@mkdir -p dist
	@$(AUDIT)/bin/pip-licenses --python $(IMAGE)/bin/python --ignore-packages pip setuptools --format csv \
	  --partial-match --allow-only "$$(cat deploy/locks/licences.txt)" > dist/licences.csv
	@$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file dist/sbom.cdx.json $(IMAGE)/bin/python
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes -r deploy/locks/image.txt

clean: ## remove .venv and all caches
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "firsttoken needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Choose another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# Stamp files, as new as the installed pyproject.toml; the development install includes the core.
$(CORE): pyproject.toml | $(BIN)/python
	@echo "Installing firsttoken into $(VENV) ..." >&2
	@$(INSTALL) --editable .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "Installing firsttoken and its development tools into $(VENV) ..." >&2
	@$(INSTALL) --editable '.[dev]'
	@touch $(CORE) $@

$(AUDIT):
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check pip-audit cyclonedx-bom pip-licenses uv || { rm -rf $@; exit 1; }
