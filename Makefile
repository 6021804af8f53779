# TORCH_PIP_ARGS: where pip finds torch, e.g. "--index-url URL" of a CPU index or "--find-links FOLDER"
# of wheels; empty: wherever pip is set up to look.
TORCH_PIP_ARGS ?=
PYTHON ?= python3
PROMPT ?= What is the capital of France?
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test check proto bench up compose-test examples examples-test gateway-setup gateway-test clean

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --upgrade pip
	$(PIP) install -c constraints.txt $(TORCH_PIP_ARGS) torch
	$(PIP) install -c constraints.txt -e ".[tokenizer,engine,dev]"
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
	PYTHON=$(BIN)/python deploy/tools/check_protos.sh

proto: setup
	PYTHON=$(BIN)/python deploy/tools/gen_protos.sh

bench: setup
	$(BIN)/python -m tests.bench.wire --runner instant
	$(BIN)/python -m tests.bench.wire --num-seqs 8 --max-tokens 64
	$(BIN)/python -m tests.bench.decode
	$(BIN)/python -m tests.bench.encode
	$(BIN)/python -m tests.bench.startup

# The image's torch: the one that pip finds here, for the image's Python.
wheelhouse/.stamp: constraints.txt | .venv/.stamp
	rm -f wheelhouse/torch-*.whl
	$(PIP) download --no-deps --only-binary=:all: --python-version 3.11 -d wheelhouse \
	    -c constraints.txt $(TORCH_PIP_ARGS) torch
	touch $@

up: wheelhouse/.stamp
	TORCH_PIP_ARGS= docker compose up --build

# Needs Docker; `deploy/tools/docker_engine.sh start` gets it on a bare Debian.
compose-test: wheelhouse/.stamp
	TORCH_PIP_ARGS= $(BIN)/python -m pytest -m docker -s --durations=5 tests/compose

# Needs Debian's C++ and gRPC packages and npm; deploy/tools/examples_toolchain.sh gets them.
GOOGLEAPIS = $(shell $(BIN)/python -c 'import google.rpc; print(list(google.rpc.__path__)[0] + "/../..")')
examples: setup
	$(MAKE) -C examples/cpp GOOGLEAPIS=$(GOOGLEAPIS)
	PROTOC="$(abspath $(BIN))/python -m grpc_tools.protoc" GOOGLEAPIS=$(GOOGLEAPIS) \
	    npm --prefix examples/node run build

examples-test: examples
	$(BIN)/python -m pytest -m examples tests/e2e/test_examples.py

gateway-setup: .venv/.gateway-stamp

.venv/.gateway-stamp: .venv/.stamp
	$(PIP) install -c constraints.txt -e ".[gateway-test]"
	touch $@

# Shepherd Model Gateway and OpenAI's client in front of one engine and of two.
gateway-test: gateway-setup
	$(BIN)/python -m pytest -m gateway --durations=5 tests/gateway

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache examples/*/build examples/node/node_modules \
	    examples/node/src/stubs
