# `make run` and `make test` do all of their own set-up: they need Python with venv, make and a
# package index, and no root.

PYTHON ?= python3
CONFIG = etc/mlxd.toml

SYSTEM := $(shell uname -s)-$(shell uname -m)

# What MLX computes with on Linux: cpu, or cuda13. `make clean` before changing it: the two wheels
# hold the same files. macOS has Metal in its plain wheel.
BACKEND = $(if $(findstring Linux,$(SYSTEM)),cpu,metal)

comma := ,
extras = $(subst $() $(),$(comma),$(strip $(filter-out metal,$(BACKEND)) $(1)))
package = .$(if $(call extras,$(1)),[$(call extras,$(1))])

VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-$(BACKEND)
DEV_STAMP := $(VENV)/.installed-$(BACKEND)-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: run test soak check bench setup fetch clean

run: fetch
	exec $(BIN)/mlxd --config $(CONFIG)

test: $(DEV_STAMP) fetch
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# A load that never rests, for this long; `make test` has some seconds of it.
SOAK_SECONDS = 1200
soak: $(DEV_STAMP) fetch
	SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -s tests/e2e/test_soak.py

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: fetch
	$(BIN)/mlxd bench $(BENCH_ARGS)

# What serving needs, and no model.
setup: $(RUN_STAMP)

# Once: what is in the cache is not fetched again.
fetch: $(RUN_STAMP)
	$(BIN)/mlxd fetch --config $(CONFIG)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mlxd needs Python 3.11 or later, and $(PYTHON) is not:" \
	    "say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv package" \
	    "(Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing mlxd into $(VENV)"
	$(PIP) --editable '$(call package,)'
ifeq ($(SYSTEM)-$(BACKEND),Linux-x86_64-cpu)
	@$(BIN)/python -m mlxd.blas >/dev/null || { \
	  echo "no OpenBLAS on this system: installing MKL, about 1 GB"; \
	  $(PIP) --editable '$(call package,mkl)'; }
endif
	@touch $@

$(DEV_STAMP): pyproject.toml $(RUN_STAMP)
	@echo "installing the tools that tests and checks need"
	$(PIP) --quiet --editable '$(call package,dev)'
	@touch $@
