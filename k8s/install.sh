#!/bin/sh
# Installs the package from a source tree into a new virtual environment: install.sh SOURCE ENVIRONMENT.
# TORCH_INDEX: the package index that torch comes from, CUDA or CPU; without it the default one. PYTHON: the interpreter.
# EXTRAS: of the package, with commas between, such as gcs,azure.
set -eu
source=$1 environment=$2
"${PYTHON:-python3}" -m venv "$environment"
pip() {
    "$environment/bin/python" -m pip --disable-pip-version-check "$@"
}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip wheel --quiet --no-deps --wheel-dir "$wheels" "$source"
pip install --quiet --constraint "$source/constraints.txt" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
pip install --quiet --constraint "$source/constraints.txt" "$(echo "$wheels"/*.whl)${EXTRAS:+[$EXTRAS]}"
pip check
# Nothing is installed at run time, and what is not there has no vulnerabilities.
pip uninstall --quiet --yes pip
