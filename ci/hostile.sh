#!/usr/bin/env bash
# The store's tests where the machine refuses things: io_uring, locked memory, direct I/O, small sectors. Root only.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh test
python="${VENV:-.venv}/bin/python" scratch=$(mktemp -d /var/tmp/fastcache-hostile-XXXXXX) knob=/proc/sys/kernel/io_uring_disabled
was=$(cat $knob 2>/dev/null || true) loop=
restore() {
    [ -z "$was" ] || echo "$was" >$knob
    umount "$scratch/mount" 2>/dev/null || true
    [ -z "$loop" ] || losetup -d "$loop"
    rm -rf "$scratch"
}
trap restore EXIT
tests=(-m "not stress and not slow" tests/test_{budgets,leases,promise,cli,moe_oracle,python_source,checkpoint_files}.py)
run() { printf '\n-- %s\n' "$1" && shift && "$@" -p no:cacheprovider -q "${tests[@]}"; }

[ -z "$was" ] || { echo 2 >$knob && run "kernel.io_uring_disabled=2" "$python" -m pytest && echo "$was" >$knob; }
run "a seccomp filter that refuses io_uring" "$python" tests/refuse_io_uring.py -m pytest
run "no memory may be locked" setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock prlimit --memlock=0:0 "$python" -m pytest
mkdir -p "$scratch/mount" && FASTCACHE_TEST_DIR=/dev/shm run "tmpfs" "$python" -m pytest
truncate -s 3G "$scratch/disk" && loop=$(losetup --find --show --sector-size 4096 --direct-io=on "$scratch/disk")
mkfs.ext4 -q "$loop" && mount "$loop" "$scratch/mount"
FASTCACHE_TEST_DIR=$scratch/mount run "sectors of 4,096 bytes" "$python" -m pytest
