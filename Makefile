# The same targets here and in CI. `make demo` and `make test` set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONPATH := tests/kit

.PHONY: demo test check faults mutants verify format image cluster down clean requirements

demo: $(STAMP) ## The whole loop on a real Kubernetes: TASKS= ROLLOUTS= KILL= KILLS= DURING= CLUSTER= KEEP=
	@$(BIN)/python -m gym_kit.demo

test: $(STAMP) ## All tests; the last line says what ran and what could not
	@$(BIN)/python -m gym_kit.suites

check: $(STAMP) ## Format, lint, types, import contracts, generated files, fast tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory verify
	@$(BIN)/pytest -q tests/unit tests/servers

faults: $(STAMP) ## Random faults against a whole cell: N= sequences, other ones each time
	@PYTHONPATH=servers:tests/kit $(BIN)/python -W error -m gym_faults.run

mutants: $(STAMP) ## Does the random machine, alone, find each mutation of the product? N= SECONDS= ONLY=
	@PYTHONPATH=servers:tests/kit $(BIN)/python -m gym_faults.mutate

verify: $(STAMP) ## Generated files are fresh
	@$(BIN)/python -m gym_operator.crds --check

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

image: $(STAMP) ## The container image
	@$(BIN)/python -m gym_kit image

cluster: $(STAMP) ## A cluster to work with; `make down` removes it
	@$(BIN)/python -m gym_kit up

down: $(STAMP)
	@$(BIN)/python -m gym_kit down

requirements: ## Lock again: needs uv; hashes, no index addresses
	uv pip compile $(LOCK) pyproject.toml -o requirements/runtime.txt
	uv pip compile $(LOCK) --group dev --group cluster pyproject.toml -o requirements/dev.txt
LOCK := --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

clean:
	rm -rf build dist

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: set PYTHON="; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { echo "python3-venv is needed: apt-get install python3-venv"; exit 1; }
	@echo "installing Python packages (a minute or two the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
