# Two commands: `make quickstart` trains a small model on this machine, `make test` runs every test.
# Everything goes into .venv; stamp files make a repeated call fast.

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_FLAGS ?= --quiet

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif

ifndef RUN_DIR
RUN_DIR := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
endif

# On Linux, plain `torch` is a CUDA build of several gigabytes. Without a GPU the CPU build is installed first, and
# no other is taken in its place. pip must find it: TORCH_INDEX adds the address of a package index that has it.
ifndef TORCH
ifeq ($(shell uname -s)$(shell nvidia-smi -L 2>/dev/null | head -c 3),Linux)
TORCH := torch==2.13.0+cpu
else
TORCH := torch>=2.8
endif
endif
TORCH_INDEX ?=

.PHONY: help install quickstart test check lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1: \2/p' Makefile

install: $(VENV)/.installed  ## make .venv with everything the quickstart needs

quickstart: install  ## train configs/quickstart.yaml; RUN_DIR=... puts the run folder elsewhere
	$(BIN)/miles train configs/quickstart.yaml run.dir=$(RUN_DIR) $(ARGS)

test: $(VENV)/.dev  ## install what tests need and run all of them; ARGS=... goes to pytest
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## lint, and the tests that start no processes
	$(BIN)/python -m pytest -m "not real" $(ARGS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; name one: make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	@echo "installing $(TORCH) into $(VENV), a few minutes the first time"
	@$(BIN)/pip install $(PIP_FLAGS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)" || { \
		echo "error: pip found no $(TORCH) for $(PYTHON). Either name an index with CPU builds of PyTorch" >&2; \
		echo "       (make TORCH_INDEX=...), or take whatever build there is: make TORCH=torch" >&2; exit 2; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install $(PIP_FLAGS) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@
