#!/usr/bin/env bash
# Build fastcache in .venv with what tests need, and run them, as many at once as there are processors, at most four.
# Options go to pytest (-n 0: one after the other).
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
exec "${VENV:-.venv}/bin/python" -m pytest -n logical --maxprocesses 4 --dist worksteal "$@"
