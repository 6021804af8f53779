# Where pip finds torch: TORCH_PIP_ARGS="--index-url URL" or "--find-links FOLDER"; empty: as pip is set up.
TORCH_PIP_ARGS ?=
PYTHON ?= python3
PROMPT ?= What is the capital of France?
BIN := .venv/bin

.PHONY: setup demo test check proto bench clean

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -c constraints.txt $(TORCH_PIP_ARGS) torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[tokenizer,engine,dev]"
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
