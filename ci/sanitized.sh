#!/usr/bin/env bash
# Make build/KIND, a copy of the tree whose compiled half has that instrumentation, and print its place: ci/sanitized.sh asan|tsan
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1 copy=build/$1
bash ci/setup.sh test >&2
python="$(cd "${VENV:-.venv}/bin" && pwd)/python"
mkdir -p "$copy" && rm -rf "$copy/fastcache" "$copy/tests"
cp -r pyproject.toml setup.py MANIFEST.in LICENSE README.md fastcache fastcache_ext tests "$copy"
cd "$copy"
rm -f fastcache_ext/*.so fastcache_ext/views.c # views.c fits one NumPy only
FASTCACHE_BUILD=$kind "$python" setup.py -q build_ext --inplace >&2
pwd
