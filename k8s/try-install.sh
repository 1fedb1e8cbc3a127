#!/usr/bin/env bash
# Runs the image's install steps in a clean environment, for machines without a container engine: copies the build
# context that Dockerfile.dockerignore allows, runs install.sh on it, and then the check at the end of the Dockerfile.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/home"
sed -n 's/^!//p' k8s/Dockerfile.dockerignore | xargs cp --recursive --parents --target-directory "$work/source"
find "$work/source" -name __pycache__ -prune -exec rm -r {} +
sh "$work/source/k8s/install.sh" "$work/source" "$work/exspec"
# No variable of this shell reaches the check, and its folder is not the source's.
cd "$work/home"
clean=(env -i "PATH=$work/exspec/bin:/usr/bin:/bin" "HOME=$work/home" PYTHONDONTWRITEBYTECODE=1)
"${clean[@]}" exspec --help >/dev/null
"${clean[@]}" ray --version
"${clean[@]}" python -c 'import exspec.pipeline.run, exspec.jobs.commands.run; print(exspec.__file__)'
"${clean[@]}" exspec messages messages --rows 8 --shards 1
"${clean[@]}" exspec plan --input messages --output out | tail -n 1
if "${clean[@]}" python -m pip --version 2>/dev/null; then
  echo "pip is left in the environment" >&2
  exit 1
fi
echo "installed in a clean environment, and runs"
