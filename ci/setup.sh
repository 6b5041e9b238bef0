#!/usr/bin/env bash
# Make VENV (default .venv) of PYTHON (default python3) with fastcache built in place: ci/setup.sh ["" | test | dev]
# Does nothing when nothing that matters has changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-} venv=${VENV:-.venv}
stamp="$venv/fastcache-setup-${extra:-run}"
case ${extra:-run} in run) enough="run test dev" ;; test) enough="test dev" ;; *) enough=dev ;; esac
now=$({ cat pyproject.toml setup.py fastcache_ext/*.p[yx][xd]; echo "${PYTHON:-python3} ${FASTCACHE_BUILD:-} $PWD"; } | sha256sum)
for have in $enough; do
    [ -x "$venv/bin/python" ] && [ "$(cat "$venv/fastcache-setup-$have" 2>/dev/null)" = "$now" ] &&
        ls fastcache_ext/*.so >/dev/null 2>&1 && exit 0
done
built=
for have in run test dev; do
    [ "$(cat "$venv/fastcache-setup-$have" 2>/dev/null)" = "$now" ] && ls fastcache_ext/*.so >/dev/null 2>&1 && built=yes
done
bash ci/system.sh
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install -q --no-compile "$@"; } # most of what comes is never imported
if [ -n "$built" ]; then # what is installed has the right extras, only not what they name
    install "fastcache-moe[$extra]"
    echo "$now" >"$stamp"
    exit 0
fi
mapfile -t build < <("$venv/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
install "${build[@]}"
rm -f fastcache_ext/views.c # it fits the NumPy only that another environment may have had
install --no-build-isolation -e ".${extra:+[$extra]}"
echo "$now" >"$stamp"
