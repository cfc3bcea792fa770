# The same targets here and in CI. `make demo` and `make test` set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
export PYTHONPATH := tests/kit

.PHONY: help demo test test-vllm tiny-model check bench-operator bench-ledger faults mutants verify format image cluster down clean requirements

help: ## What can be made
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(STAMP) $(if $(filter vllm,$(POLICY)),$(VLLM_STAMP)) ## The whole loop on a real Kubernetes: TASKS= ROLLOUTS= KILL= HOW= KILLS= DURING= POLICY= ENGINE= CLUSTER= KEEP=
	@$(BIN)/python -m gym_kit.demo

test: $(STAMP) ## All tests; the last line says what ran and what could not
	@$(BIN)/python -m gym_kit.suites

test-vllm: $(VLLM_STAMP) ## Kills inside of generations, with vLLM on this machine: N= more rounds, SEED= as an earlier run printed
	@PYTHONPATH=servers:tests/kit $(VLLM)/bin/pytest -q -rP tests/vllm

tiny-model: $(VLLM_STAMP) ## Train the tiny model of these tests anew: STEPS= SEED=
	@PYTHONPATH=servers:tests/kit $(VLLM)/bin/python -m gym_vllm.train --steps $(or $(STEPS),800) --seed $(or $(SEED),0)

check: $(STAMP) ## Format, lint, types, import contracts, generated files, fast tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory verify
	@$(BIN)/pytest -q tests/unit tests/servers

bench-operator: $(STAMP) ## What the operator costs: STACKS= CHECKPOINTS= SCHEDULES= REST= CHANGES=
	@$(BIN)/python -m gym_bench.operator

faults: $(STAMP) ## Random faults against a whole cell: N= sequences, other ones each time; PROCESSES=
	@PYTHONPATH=servers:tests/kit $(BIN)/python -m gym_faults.many

bench-ledger: $(STAMP) ## Memory, files and times of the capture ledger at 10,000 rollouts: build/bench/ledger.json
	@$(BIN)/python -m gym_bench.ledger

mutants: $(STAMP) ## Does the random machine, alone, find each mutation of the product? N= SECONDS= ONLY=
	@PYTHONPATH=servers:tests/kit $(BIN)/python -m gym_faults.mutate

verify: $(STAMP) ## Generated files are fresh
	@$(BIN)/python -m gym_operator.crds --check

format: $(STAMP) ## Format, and mend what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

image: $(STAMP) ## The container image
	@$(BIN)/python -m gym_kit image

cluster: $(STAMP) ## A cluster to work with; `make down` removes it
	@$(BIN)/python -m gym_kit up

down: $(STAMP) ## Remove the clusters that `make cluster` and `make demo` brought up
	@$(BIN)/python -m gym_kit down

requirements: ## Lock again: needs uv; hashes, no index addresses
	uv pip compile $(LOCK) pyproject.toml -o requirements/runtime.txt
	uv pip compile $(HASHES) --universal --python-version 3.13 --extra vllm pyproject.toml -o requirements/served.txt
	uv pip compile $(LOCK) --group dev --group cluster pyproject.toml -o requirements/dev.txt
	uv pip compile $(BARE) --extra vllm --group dev --group vllm --override requirements/vllm-overrides.txt pyproject.toml \
	  -o requirements/vllm.txt
HASHES := --quiet --generate-hashes --no-emit-index-url --no-header
BARE := $(HASHES) --python-version 3.11
LOCK := $(BARE) --universal

clean: ## Remove build and dist
	rm -rf build dist

$(VLLM_STAMP): requirements/vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON="; exit 1; }
	@$(PYTHON) -m gym_kit.vllm

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON="; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "the virtual environment could not be made, as told above; on Debian and Ubuntu it needs: apt-get install python3-venv"; exit 1; }
	@echo "installing Python packages (a minute or two the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
