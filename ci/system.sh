#!/usr/bin/env bash
# What pip cannot install: a Python >= 3.11 with headers and venv, and a C compiler. As root, apt installs what is missing.
set -euo pipefail
python=${PYTHON:-python3}
missing=()
command -v gcc >/dev/null || command -v cc >/dev/null || missing+=(gcc)
echo '#include <stdio.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 || missing+=(libc6-dev)
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing+=(python3)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "fastcache needs ${missing[*]} (Debian's names); install them, or set PYTHON to a Python >= 3.11 that has them" >&2
    exit 1
fi
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
