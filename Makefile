# make demo   the default model, with a draft and without
# make test   the tests, about half an hour on two cores
# make test-slow  the long ones: every draft length on twenty prompts, and the like
# make check  formatting, lint, types and import layers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow check lock clean

demo: $(READY)
	$(BIN)/outrider demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TEST)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal $(SLOW)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The lock pins every version, torch's above all: an open range may take another build.
$(READY): requirements/lock.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $(READY)

# Writes the versions that are installed now; run it after changing pyproject.toml.
lock:
	$(BIN)/python -m pip install --quiet --editable '.[dev]' 'torch==2.13.0'
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements/lock.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
