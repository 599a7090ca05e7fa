# `make demo` and `make test` need only Python >= 3.11 with pip; everything else is installed here.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Distributed tests and the demo run several ranks on few cores: one thread a rank, no busy waiting.
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo cpu)
export OMP_WAIT_POLICY := PASSIVE

.PHONY: install demo test test-long lint clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/lacuna demo --out demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not long"

test-long: lint
	$(BIN)/python -m pytest

clean:
	rm -rf .venv demo
