# make demo | test | test-all | lint | format | clean. The environment is made on first use, and again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
PYTEST_ARGS ?=
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile

.PHONY: install demo test test-all lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

# The trade-off at three budgets, in a few minutes: a table here, figures and curves under outputs/.
demo: $(STAMP)
	$(BIN)/python -m recals_exp budget=0.125,0.25,0.5 -m

# Everything that ends within a few minutes; `make test-all` adds what is marked slow.
test: lint
	$(BIN)/python $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: lint
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
