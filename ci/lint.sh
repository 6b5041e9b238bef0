#!/usr/bin/env bash
# Everything that reads the code without running it; pre-commit runs this too.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh dev
export PATH="$PWD/${VENV:-.venv}/bin:$PATH"
ruff check .
ruff format --check .
cython-lint fastcache_ext
mypy
python -m mypy.stubtest fastcache_ext --concise --ignore-missing-stub --ignore-disjoint-bases --allowlist ci/stubs.txt --ignore-unused-allowlist
codespell
