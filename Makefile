# TORCH_PIP_ARGS: where pip finds torch, e.g. "--index-url URL" of a CPU index or "--find-links FOLDER"
# of wheels; empty: wherever pip is set up to look.
TORCH_PIP_ARGS ?=
PYTHON ?= python3
PROMPT ?= What is the capital of France?
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: setup demo test check proto bench clean

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt $(TORCH_PIP_ARGS) torch
	$(PIP) -c constraints.txt -e ".[tokenizer,engine,dev]"
	touch $@

demo: setup
	$(BIN)/millstream demo "$(PROMPT)"

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	deploy/tools/check_protos.sh

proto: setup
	deploy/tools/gen_protos.sh

bench: setup
	$(BIN)/python -m tests.bench

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
