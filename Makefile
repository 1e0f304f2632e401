# Everything a user types. Each target sets up what it needs in .venv, once.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPTS := --prompt "It was a fine morning in May, and" --prompt "She had not been long in the room when" \
  --prompt "Mr. Darcy looked at her with" --prompt "The letter which Emma received from her sister"
DEMO_ARGS ?= --max-new-tokens 128
SMOLLM2_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
# As it was built last, so that SPECMETA_CUDA=0 need not be said again with every target.
LAST_BUILT := $(patsubst $(VENV)/.built-%,%,$(firstword $(wildcard $(VENV)/.built-*)))
SPECMETA_CUDA ?= $(or $(LAST_BUILT),auto)
BUILT := $(VENV)/.built-$(SPECMETA_CUDA)
# vLLM's environment: its torch is the same, its transformers is older.
VLLM := .venv-vllm
VLLM_ARGS ?=
export SPECMETA_CUDA
CXX_SOURCES = $(shell find csrc tests/cpp tests/emulator -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup build demo smollm2 bench test fuzz test-vllm docs lint format wheel clean

help:
	@echo "make demo    generate text with the built-in model, speculating through specmeta"
	@echo "make smollm2 let SmolLM2 answer a question (93 MB are downloaded the first time)"
	@echo "make test    run every test"
	@echo "make fuzz    random walks against the reference, under sanitizers (FUZZ_ARGS=\"--minutes 30\")"
	@echo "make test-vllm  serve with vLLM on the CPU, in an environment of its own (VLLM_ARGS=...)"
	@echo "make docs    build the documentation into build/docs/index.html"
	@echo "make lint    ruff, mypy, clang-format"
	@echo "make bench   measure every operation beside what one would write instead (BENCH_ARGS=--short)"
	@echo "make wheel   build dist/*.whl and run it in a clean environment"
	@echo "make build   build the library only (SPECMETA_CUDA=auto|0|1)"

setup: $(VENV)/.installed
build: $(BUILT)

$(VENV)/.installed: requirements.txt
	@echo "== setting up $(VENV) (torch is large: the first time takes minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "transformers needs Python 3.11 or later: make PYTHON=python3.11")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "no virtual environment: install python3-venv (Debian, Ubuntu) or use make PYTHON=..."; exit 1; }
	@$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

$(BUILT): $(VENV)/.installed setup.py pyproject.toml CMakeLists.txt specmeta/include/specmeta.h $(filter csrc/%,$(CXX_SOURCES))
	@echo "== building the library (SPECMETA_CUDA=$(SPECMETA_CUDA))"
	@rm -f $(VENV)/.built-*
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

demo: build
	@echo "== four prompts in one batch, with and without speculation"
	@$(BIN)/python -m specmeta generate $(PROMPTS) $(DEMO_ARGS)

smollm2: build
	@echo "== SmolLM2 answers, with and without speculation"
	@$(BIN)/python -m specmeta generate --model smollm2 --prompt "What is the capital of France?" $(SMOLLM2_ARGS)

bench: build
	@echo "== every operation beside its alternatives (minutes)"
	@$(BIN)/python -m bench $(BENCH_ARGS)

test: build
	@echo "== running the tests"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest

fuzz: build
	@$(BIN)/python tests/fuzz.py $(FUZZ_ARGS)

$(VLLM)/.installed: tools/vllm-requirements.txt
	@echo "== setting up $(VLLM)"
	@test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet $$(grep ^torch== requirements.txt)
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

test-vllm: build $(VLLM)/.installed
	@echo "== serving with vLLM"
	@rm -rf build/lib* build/bdist* build/vllm
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/vllm .
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --force-reinstall build/vllm/specmeta-*.whl
	@SPECMETA_VLLM_PYTHON="$(CURDIR)/$(VLLM)/bin/python" $(BIN)/python -m pytest tests/test_vllm.py $(VLLM_ARGS)

docs: build
	@echo "== building the documentation"
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

lint: build
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

wheel: setup
	@rm -rf build/lib* build/bdist* dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@tools/check_wheel.sh dist/specmeta-*.whl

clean:
	rm -rf build dist *.egg-info specmeta/*.so $(VENV)/.built-*
