# Every target sets up what it needs by itself; `scripts/setup` is quick when there is nothing to do.
.DEFAULT_GOAL := help
# Compiled modules are kept whatever the environment says: without them each start of a program takes seconds longer.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup setup-test agent run demo test test-all test-rest test-slow soak fairness upstream-openmanus check bench format generate clean

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

test: setup-test ## the tests of every promise; ARGS="-k removal -x" runs pytest with these options
ifdef ARGS
	@$(PYTEST) -m "not slow" $(ARGS)
else
	@$(BIN)/python scripts/run_tests.py
endif

test-all: setup-test ## also what repeats a promise on one more engine, and other versions of Python
	@$(BIN)/python scripts/run_tests.py all $(ARGS)

test-rest: setup-test ## what test-all has and test has not; ARGS="--minutes 10" for as much as begins in that time
	@$(BIN)/python scripts/run_tests.py rest $(ARGS)

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
	@$(BIN)/python scripts/generate_exports.py --check
	@$(BIN)/python scripts/generate_sync.py --check
	@$(BIN)/python scripts/generate_openapi.py --check
	@$(BIN)/python scripts/generate_options.py --check
	@$(BIN)/python scripts/check_docs.py

bench: setup ## measure every promise against its peers; results in benchmarks/results
	@$(BIN)/python -m benchmarks $(ARGS)

format: setup ## let ruff fix and format everything
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: setup ## write the generated files again
	@$(BIN)/python scripts/generate_exports.py
	@$(BIN)/python scripts/generate_sync.py
	@$(BIN)/python scripts/generate_openapi.py
	@$(BIN)/python scripts/generate_options.py

clean: ## remove everything that can be made again
	rm -rf .venv .venv-3.* .venv-tools src/atoll/bin native/build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
