#!/bin/sh
# Installs the package from a source tree into a new virtual environment: install.sh SOURCE ENVIRONMENT.
# TORCH_INDEX: the package index for torch, CUDA or CPU. Default: the default index. PYTHON: the interpreter.
# EXTRAS: optional dependencies of the package, separated by commas, such as gcs,azure.
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
# Nothing is installed at run time, and without pip there are no vulnerabilities of pip.
pip uninstall --quiet --yes pip
