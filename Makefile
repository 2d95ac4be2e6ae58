# The README's commands. VENV may name a folder elsewhere; PYTHON, the interpreter that makes it.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install test slow lint package demo

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev,datasets]"
	touch $@

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

slow: install
	$(BIN)/python -m pytest -m slow

# Builds a wheel, installs it into a virtual environment of its own and runs it there. Quiet, so that
# the closing line of `make test` is easy to find in the log of CI.
package: install
	$(BIN)/python -m pytest -q -m slow tests/test_packaging.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Resumes an interrupted run; remove runs/tiny_ocr to start from scratch.
demo: install
	$(BIN)/flowgrpo train configs/tiny_ocr.yaml $(if $(wildcard runs/tiny_ocr/config.yaml),--resume)
	@echo "Before and after: runs/tiny_ocr/compare.png"
