#!/usr/bin/env bash
# Make build/KIND, a copy of the tree whose compiled half has that instrumentation, and print its place: ci/sanitized.sh asan|tsan
# Compiles nothing when nothing that matters has changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1 copy=build/$1
bash ci/setup.sh test >&2
python="$(cd "${VENV:-.venv}/bin" && pwd)/python"
mkdir -p "$copy" && rm -rf "$copy"/{fastcache,fastcache_ext/*.p[yx]*,tests}
cp -rp pyproject.toml setup.py MANIFEST.in LICENSE README.md fastcache tests "$copy"
# The C comes along, no older than what it was made from: it need not be translated again. views.c fits one NumPy only.
find fastcache_ext -type f ! -name "*.so" ! -name "*.pyc" ! -name views.c ! -name ".built*" -exec cp -p --parents -t "$copy" {} +
cd "$copy"
now=$({ cat setup.py fastcache_ext/*.p[yx][xd]; echo "$kind ${CC:-} ${FASTCACHE_WERROR:-} $python"; } | sha256sum)
if [ "$(cat built 2>/dev/null)" != "$now" ]; then
    rm -f built fastcache_ext/*.so fastcache_ext/views.c
    FASTCACHE_BUILD=$kind "$python" setup.py -q build_ext --inplace >&2
    echo "$now" >built
fi
pwd
