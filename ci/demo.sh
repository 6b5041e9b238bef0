#!/usr/bin/env bash
# Build fastcache in .venv and run the demo. Options go to `fastcache demo` (see --help).
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh
exec "${VENV:-.venv}/bin/fastcache" demo "$@"
