# `make` builds .venv; every other target builds it first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := setup
.PHONY: setup demo test test-oldest lint types format clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# The main job on the embedded pair: calibrate, fit and evaluate three designs, then compare them.
demo: setup
	$(BIN)/kvxfer demo

test: setup
	WANDB_MODE=offline $(BIN)/python -m pytest -n 2 --dist loadfile

# The other end of the supported range of transformers.
$(OLDEST)/.ready: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e ".[dev]"
	touch $@

test-oldest: $(OLDEST)/.ready
	WANDB_MODE=offline $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) dist .mypy_cache .pytest_cache .ruff_cache
