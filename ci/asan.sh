#!/usr/bin/env bash
# The core's quick tests on a copy of the tree whose compiled half is built with AddressSanitizer. Options go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
python="$(cd "${VENV:-.venv}/bin" && pwd)/python" copy=build/asan
mkdir -p "$copy" && rm -rf "$copy/fastcache" "$copy/tests"
cp -r pyproject.toml setup.py MANIFEST.in LICENSE README.md fastcache fastcache_ext tests "$copy"
cd "$copy" && rm -f fastcache_ext/*.so
FASTCACHE_BUILD=asan "$python" setup.py -q build_ext --inplace
[ $# -gt 0 ] || set -- tests/test_{table,policy,flights,faults,leases,prefetch,python_source,reentry,edges,promise,engines,budgets,ghost,auto,switch,all_at_once,mixed_sizes}.py
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 PYTHONMALLOC=malloc FASTCACHE_SANITIZED=address
LD_PRELOAD=$("${CC:-gcc}" -print-file-name=libasan.so) exec "$python" -m pytest -m "not stress and not slow" \
    -p no:cacheprovider "$@"
