# Every target sets up what it needs by itself; `scripts/setup` is quick when there is nothing to do.
.DEFAULT_GOAL := help
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup setup-test agent run demo test test-slow soak fairness upstream-openmanus check bench format generate clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## install what is missing, make .venv, compile the agent
	@scripts/setup

agent: ## compile the agent into src/atoll/bin
	@scripts/setup agent

run: setup ## start the server; ARGS="--port 8080" for another port
	@$(BIN)/atoll serve $(ARGS)

demo: setup ## show a sandbox working
	@$(BIN)/atoll demo

setup-test:
	@scripts/setup test

# They look at the whole machine before and after, so nothing that is not theirs may run beside them.
ALONE := tests/native tests/network tests/oci tests/security
# They start Docker engines of their own, which the others would see.
DOCKER := tests/docker tests/openmanus

test: setup-test ## all tests but the slow ones
ifdef ARGS
	@$(PYTEST) -m "not slow" $(ARGS)
else
	@scripts/run-tests -m "not slow" -n 2 $(addprefix --ignore=,$(ALONE) $(DOCKER))
	@scripts/run-tests -m "not slow and not docker" -n 2 $(ALONE)
	@scripts/run-tests -m "not slow" -n 2 $(DOCKER)
	@scripts/run-tests -m "not slow and docker" -n 2 tests/network
endif

test-slow: setup-test ## the slow tests: long runs, fuzzing, memory
	@$(PYTEST) -m slow $(ARGS)

soak: setup-test ## a server under load for 40 minutes: nothing may grow; ARGS="--minutes 2 --kill-minutes 2"
	@PYTHONPATH=tests $(BIN)/python -m soak $(ARGS)

fairness: setup-test ## what an ordinary user notices of a hostile one; ARGS="--seconds 5 --runs 1 --trips 10" for a quick look
	@PYTHONPATH=tests $(BIN)/python -W ignore -m fairness.suite $(ARGS)

upstream-openmanus: setup-test ## OpenManus's own tests on our classes; CHECKOUT=/path/to/its/clone
	@$(BIN)/python tests/upstream/openmanus.py $(CHECKOUT)

check: setup ## format, lint, types, layers, generated files, docs
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/generate_sync.py --check
	@$(BIN)/python scripts/generate_openapi.py --check
	@$(BIN)/python scripts/check_docs.py

bench: setup ## measure every promise against its peers; results in benchmarks/results
	@$(BIN)/python -m benchmarks $(ARGS)

format: setup ## let ruff fix and format everything
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: setup ## write the generated files again
	@$(BIN)/python scripts/generate_sync.py
	@$(BIN)/python scripts/generate_openapi.py

clean: ## remove everything that can be made again
	rm -rf .venv .venv-tools src/atoll/bin agent/build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
