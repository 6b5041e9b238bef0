#!/usr/bin/env bash
# The core's quick tests on a copy of the tree whose compiled half is built with AddressSanitizer. Options go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(bash ci/sanitized.sh asan)
python="$(cd "${VENV:-.venv}/bin" && pwd)/python"
cd "$copy"
[ $# -gt 0 ] || set -- tests/test_{table,policy,flights,faults,leases,prefetch,waiting,python_source,reentry,edges,promise,engines,budgets,ghost,auto,switch,all_at_once,mixed_sizes}.py
trap 'cat fault.* 2>/dev/null || true' EXIT # pytest keeps what a process that is gone wrote on stderr
rm -f fault.*
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:log_path=$PWD/fault PYTHONMALLOC=malloc FASTCACHE_SANITIZED=address
LD_PRELOAD=$("${CC:-gcc}" -print-file-name=libasan.so) "$python" -m pytest -m "not stress and not slow" \
    -p no:cacheprovider "$@"
