# Two commands: `make demo` and `make test`. Both set up .venv where it is missing; PYTHON picks the interpreter.
# `make slow` runs the tests that `make test` leaves out, and .ci/run runs everything.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -u -m pytest -n auto --maxprocesses 4 --dist loadgroup
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test slow setup

demo: setup
	$(BIN)/exspec messages out/messages --rows 256 --shards 4
	$(BIN)/exspec run --input out/messages --output out/completions

test: setup
	$(PYTEST) -m "not slow"

slow: setup
	$(PYTEST) -m slow --durations 20

setup: .venv/installed

# Made again when the dependencies change. The package itself is installed from the checkout, in place.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'exspec needs Python 3.11 or newer; set PYTHON')"
	@echo "setting up .venv: torch, Ray and what else is needed; a few minutes, and no word until it is done"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
