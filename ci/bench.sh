#!/usr/bin/env bash
# Run the benchmarks one BLAS thread at a time and leave a receipt in build/. Options go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
mkdir -p build
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
exec "${VENV:-.venv}/bin/python" -m pytest bench --timeout=0 -o faulthandler_timeout=0 --benchmark-json=build/bench.json "$@"
