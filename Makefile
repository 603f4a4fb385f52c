# pdgate. `make` lists the targets; each works from a clean clone.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(VENV)/.base: requirements/base.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pdgate needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Set PYTHON=python3.12, say.")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --disable-pip-version-check -q -r requirements/base.txt
	@$(BIN)/pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.base
	@$(BIN)/pip install --disable-pip-version-check -q -r requirements/dev.txt
	@touch $@

.PHONY: setup
setup: $(VENV)/.base ## Make .venv with pdgate (no torch)

.PHONY: up
up: setup ## Run the whole stack here, in the foreground (ARGS="--engine timed")
	@exec $(BIN)/pdgate up $(ARGS)

.PHONY: proto
proto: $(VENV)/.dev ## Rebuild the protobuf code
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. contracts/v1/worker.proto
