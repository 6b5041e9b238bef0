"""What a receipt says of the machine and the build it was made on, and how much of the time the machine was taken away.

Only a release build of this very checkout is measured: what comes from elsewhere is not what the receipt's commit says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECEIPTS = ROOT / "bench" / "receipts"


def steal_and_total() -> tuple[int, int]:
    """Return (stolen, all) CPU ticks since boot."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7], sum(fields)


class Steal:
    """Context manager; `.share` is the share of CPU time that the hypervisor took meanwhile."""

    share = 0.0

    def __enter__(self) -> Steal:
        self._before = steal_and_total()
        return self

    def __exit__(self, *exc: object) -> None:
        stolen, total = (now - was for now, was in zip(steal_and_total(), self._before, strict=True))
        self.share = stolen / total if total else 0.0


class Script(argparse.ArgumentParser):
    """The arguments of a script. `--help` is its docstring and runs nothing; and a release build alone is measured."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        options = super().parse_args(*args, **kwargs)
        try:
            build()
        except WrongBuild as error:
            self.exit(1, f"Error: {error}\n")
        return options


def processes(script: str, count: int, *arguments: str, one: str = "") -> list[dict[str, Any]]:
    """Return what `count` runs of `script` print as JSON: where code and memory lie, each process has by chance."""
    command = [sys.executable, script, *arguments, f"--one={one}" if one else "--one"]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(count)]
    return [json.loads(printed) for printed in runs]


class WrongBuild(RuntimeError):
    """What is imported is not what a receipt could speak of."""


def build() -> dict[str, str]:
    """Return how the compiled modules were built.

    Raises
    ------
    WrongBuild
        Not for release, or the packages come from another place than this script.
    """
    import fastcache
    import fastcache_ext

    for package in (fastcache, fastcache_ext):
        home = Path(str(package.__file__)).resolve().parents[1]
        if home != ROOT:
            raise WrongBuild(
                f"{package.__name__} comes from {home}, this script from {ROOT}: run it with PYTHONPATH={ROOT}, "
                f"after `bash ci/setup.sh` there"
            )
    from fastcache_ext import built

    if built.KIND != "release" or "-fsanitize" in built.FLAGS:
        raise WrongBuild(
            f"the compiled modules in {ROOT} are a {built.KIND} build ({built.FLAGS}), whose times mean nothing: build "
            f"them again without FASTCACHE_BUILD and CFLAGS"
        )
    return {"kind": built.KIND, "flags": built.FLAGS, "compiler": built.COMPILER}


def facts(directory: Path | None = None) -> dict[str, Any]:
    """Return CPU, kernel, commit, build, Python, NumPy, and the file system of `directory`.

    Raises
    ------
    WrongBuild
        As `build` does.
    """
    import numpy

    import fastcache

    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "build": build(),
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "fastcache": fastcache.__version__,
    }
    if directory is not None:
        device = os.stat(directory).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == wanted:
                found["file_system"], found["device"] = line.partition(" - ")[2].split()[:2]
                break
    return found


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write_receipt(name: str, receipt: dict[str, Any]) -> Path:
    """Write bench/receipts/NAME.json and return its path."""
    RECEIPTS.mkdir(exist_ok=True)
    path = RECEIPTS / f"{name}.json"
    path.write_text(json.dumps(receipt, indent=1) + "\n")
    return path
