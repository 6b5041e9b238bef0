#!/usr/bin/env bash
# The README and its pages keep their word: their Python runs on a small checkpoint under the name it opens, what they name exists.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
exec "${VENV:-.venv}/bin/python" -m pytest tests/test_readme.py "$@"
