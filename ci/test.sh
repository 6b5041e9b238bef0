#!/usr/bin/env bash
# Build fastcache in .venv with what tests need, and run them. Options go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
exec "${VENV:-.venv}/bin/python" -m pytest "$@"
