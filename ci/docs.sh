#!/usr/bin/env bash
# The README keeps its word: its Python runs on a small checkpoint under the name it opens, its commands and options exist.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
exec "${VENV:-.venv}/bin/python" -m pytest tests/test_readme.py "$@"
