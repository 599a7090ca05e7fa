# `make demo` and `make test` need only Python >= 3.11 with pip; everything else is installed here.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# The S3 server of the tests: its botocore conflicts with aiobotocore's, so it has a venv of its own.
MOTO := .venv-moto/bin/moto_server
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

$(MOTO): | $(STAMP)
	-$(BIN)/python -m venv .venv-moto && .venv-moto/bin/python -m pip install --quiet 'moto[server]'

test: lint $(MOTO)
	$(BIN)/python -m pytest -m "not long"

test-long: lint $(MOTO)
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .venv-moto demo
