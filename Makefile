# `make demo` and `make test` set up .venv if it is missing. PYTHON is the interpreter. .ci/run runs the tests of
# `make test` and `make slow`; `make rare` runs cases that add little to these.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -u -m pytest -n auto --maxprocesses 4 --dist loadgroup
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test slow rare setup

demo: setup
	$(BIN)/exspec messages out/messages --rows 256 --shards 4
	$(BIN)/exspec run --input out/messages --output out/completions
	@echo "next, with rows of your own: source .venv/bin/activate; exspec plan --input FILE --output FOLDER"

test: setup
	$(PYTEST) -m "not slow and not rare"

slow: setup
	$(PYTEST) -m "slow and not rare" --ignore tests/hosts --durations 20

rare: setup
	$(PYTEST) -m rare

setup: .venv/installed

# Runs again when the dependencies change. The package itself is an editable install of the checkout.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'exspec needs Python 3.11 or newer; set PYTHON')"
	@echo "setting up .venv with torch, Ray and other dependencies; this takes a few minutes and prints nothing"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
