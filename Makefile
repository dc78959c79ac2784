# Tokenmill: what people type. Every target makes its own virtual environment first; a second run is instant.
#   make demo             real prompts through Redis, Celery, the engine and SQL, with a report
#   make test             the whole suite, in two processes;  make test ARGS="tests/unit -k bulk"  runs a part
#   TORCH_REQUIREMENT     which torch to install, e.g.  make setup TORCH_REQUIREMENT='torch==2.13.0+cpu'

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Processes that the whole suite is spread over, see tests/conftest.py; a part of it runs in one, unless this is set.
PROCESSES ?= $(if $(ARGS),0,$(shell test "$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 1)" -lt 2 && echo 0 || echo 2))
export VENV
# First, so that a Redis server that a package brought is found.
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench chaos clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make the virtual environment with everything in it
	@scripts/bootstrap

demo: setup  ## run 24+ real prompts through the whole of it and report (ARGS="--backend echo" needs no model)
	@$(BIN)/tokenmill demo $(ARGS)

test: setup  ## run the tests
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) $(ARGS)

lint: setup  ## ruff, formatting and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## compare the engine with its peers on this machine
	@$(BIN)/tokenmill bench $(ARGS)

chaos: setup  ## kill, freeze and cut off real workers, and count what was lost (MINUTES=10 SEED=1 for a long run)
	@$(BIN)/python -m tests.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

clean:  ## remove the environment, the caches and what demo and bench left
	rm -rf $(VENV) demo-run bench-run chaos-run .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
