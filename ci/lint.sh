#!/usr/bin/env bash
# Everything that reads the code without running it; pre-commit runs this too.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh dev
export PATH="$PWD/${VENV:-.venv}/bin:$PATH"
ruff check .
ruff format --check .
codespell
# The slow ones at once: each takes one processor.
jobs=()
cython-lint fastcache_ext & jobs+=($!)
mypy & jobs+=($!)
python -m mypy.stubtest fastcache_ext --concise --ignore-missing-stub --ignore-disjoint-bases --allowlist ci/stubs.txt \
    --ignore-unused-allowlist & jobs+=($!)
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
exit $failed
