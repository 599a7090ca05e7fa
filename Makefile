# `make demo` and `make test` need only Python 3.11 or 3.12 with pip; everything else is installed here.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# The S3 server of the tests: its botocore conflicts with aiobotocore's, so it has a venv of its own.
MOTO := .venv-moto/bin/moto_server
# Distributed tests and the demo run several ranks on few cores: one thread a rank, no busy waiting.
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo cpu)
export OMP_WAIT_POLICY := PASSIVE

# Test files at a time: launches wait much, so two cores have room for two. Tests of one file share fixtures and stay together.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: install demo docs test test-long lint clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/lacuna demo --out demo

docs: $(STAMP)
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet
	@echo 'the site is in build/site: open build/site/index.html'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff check --target-version py312 --select E9,F .
	$(BIN)/mypy

$(MOTO): | $(STAMP)
	-$(BIN)/python -c 'from tests.helpers.s3_server import install; print(install() or "moto is installed")'

test: lint $(MOTO)
	$(PYTEST) -m "not long" --durations=15

test-long: lint $(MOTO)
	$(PYTEST) --durations=30

clean:
	rm -rf .venv .venv-moto .venv-moto.lock .venv-exchange .venv-exchange.lock .venv-loggers .venv-loggers.lock \
		demo build dist
