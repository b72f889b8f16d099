# Everything a newcomer needs: `make demo` and `make test` set themselves up, on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint types format docs dist clean

demo: $(READY)  ## the whole walk on real digits, ends in runs/demo/report.html
	$(BIN)/sens demo

# Compiled code is kept (git ignores it): otherwise each worker rewrites every test, and each program that a test starts
# compiles the whole package.
test: lint types  ## lint, types and all tests; what CI runs
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## the documentation, offline, every warning an error: docs/_build/html/index.html
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

dist: $(READY)  ## a wheel in dist/, built with the packages of .venv
	$(BIN)/python -m hatchling build -t wheel -d dist

clean:
	rm -rf .venv dist docs/_build docs/auto_gallery .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Pinned versions first (torch from a CPU wheel), then ourselves without looking for anything else.
$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
