#!/usr/bin/env bash
# The promise's stress on a copy of the tree whose compiled half is built with ThreadSanitizer; any race it sees is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(bash ci/sanitized.sh tsan)
python="$(cd "${VENV:-.venv}/bin" && pwd)/python"
cd "$copy"
trap 'cat race.* 2>/dev/null || true' EXIT
rm -f race.*
export TSAN_OPTIONS=exitcode=66:report_signal_unsafe=0:log_path=race FASTCACHE_STRESS_SECONDS=${FASTCACHE_STRESS_SECONDS:-30} FASTCACHE_SANITIZED=thread
LD_PRELOAD=$("${CC:-gcc}" -print-file-name=libtsan.so) "$python" -m pytest -p no:cacheprovider -m stress \
    tests/test_{promise,adding_up,switch,all_at_once}.py "$@"
