# Each target does all of its own set-up. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help install quickstart test lint bench clean

help: ## the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	@echo "==> installing into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,postgres,docker,kubernetes]'
	@touch $(READY)

install: $(READY) ## the virtual environment with agentrl in it

quickstart: $(READY) ## train the demo agent on this machine and show that it got better
	$(BIN)/agentrl train examples/quickstart.toml

lint: $(READY) ## style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint ## lint, then every test (PYTEST_ARGS passes options on)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(READY) ## engine, rollout, sandbox and learning benches, one JSON each
	for bench in engine rollout sandbox learning; do $(BIN)/python tests/bench/$$bench.py; done

clean: ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
