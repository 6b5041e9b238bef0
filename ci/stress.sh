#!/usr/bin/env bash
# The stress tests, FASTCACHE_STRESS_SECONDS each (default ten minutes; CI: 30). Options go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
export FASTCACHE_STRESS_SECONDS=${FASTCACHE_STRESS_SECONDS:-600}
exec "${VENV:-.venv}/bin/python" -m pytest -m stress --timeout=$((FASTCACHE_STRESS_SECONDS + 300)) \
    -o faulthandler_timeout=$((FASTCACHE_STRESS_SECONDS + 330)) "$@"
