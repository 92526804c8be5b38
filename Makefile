# Every target makes its own environment in .venv the first time, and again after pyproject.toml has changed.
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX_ARGS ?=
ARGS ?=

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help train test test-debug fuzz lint bench clean

help:
	@echo 'make train       train a small language model: on every GPU, or on 2 CPU processes; writes runs/lm'
	@echo 'make test        run the tests'
	@echo 'make test-debug  run them with released weights filled with NaN, so that a stale read shows'
	@echo 'make fuzz        train random models beside plain PyTorch: ARGS="--draws 2000"'
	@echo 'make lint        check style and types'
	@echo 'make bench       measure host overhead and layout padding'
	@echo 'make clean       delete the environment, caches and builds; runs/ stays'
	@echo ''
	@echo 'ARGS="..." is passed on: make train ARGS="--help", make test ARGS="-k layout"'
	@echo 'Of the environment: PYTHON ($(PYTHON)), TORCH_VERSION ($(TORCH_VERSION)),'
	@echo 'TORCH_INDEX_ARGS (arguments for pip when it installs torch, as --index-url URL)'

# torch comes first and alone: its version is pinned, and the rest is resolved around it.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python >= 3.11 is needed, \
	and $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV_PYTHON) -m pip install $(TORCH_INDEX_ARGS) torch==$(TORCH_VERSION)
	$(VENV_PYTHON) -m pip install -e '.[dev,docs]'
	@touch $@

# exec: an interrupt reaches the launcher itself, which ends the processes that it started.
train: $(INSTALLED)
	@exec $(VENV_PYTHON) docs/examples/train_lm.py --launch $(ARGS)

test: $(INSTALLED)
	@exec $(VENV_PYTHON) -m pytest $(ARGS)

test-debug: export FSDP_FN_RELEASE := poison
test-debug: test

fuzz: $(INSTALLED)
	@cd tests && exec ../$(VENV_PYTHON) random_models.py $(ARGS)

lint: $(INSTALLED)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

bench: $(INSTALLED)
	$(VENV_PYTHON) benchmarks/host_overhead.py
	$(VENV_PYTHON) benchmarks/layout_padding.py

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
