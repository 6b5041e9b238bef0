"""`fastcache generate`: flags that contradict each other, and what a terminal shows."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastcache import moe

PATH = Path(__file__).parent / "data" / "qwen3_moe" / "bf16"
IDS = [1, 5, 7, 9]


@pytest.fixture
def model():
    with moe.load(PATH, budget="all") as model:
        yield model


def run(*arguments):
    command = [sys.executable, "-m", "fastcache", "generate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_flags_of_sampling_without_a_temperature_are_refused_and_not_ignored():
    for flags in (("--top-k", 3), ("--top-p", 0.5), ("--seed", 1), ("--seed", 0, "--top-k", 2, "--temperature", 0)):
        refused = run(PATH, "--ids", "1,2", "--max-tokens", 1, *flags)
        assert refused.returncode == 2 and "would do nothing" in refused.stderr and refused.stdout == ""
        assert all(flag in refused.stderr for flag in flags if flag in ("--top-k", "--top-p", "--seed"))
    assert run(PATH, "--ids", "1,2", "--max-tokens", 1, "--temperature", 1, "--seed", 0).returncode == 0


@pytest.mark.parametrize("redirected", [False, True])
def test_on_a_terminal_the_tokens_come_first_and_the_figures_after_them(tmp_path, model, redirected):
    """A pseudo-terminal as stderr, and as stdout too unless that goes into a file."""
    ours, theirs = os.openpty()
    file = tmp_path / "out"
    command = [sys.executable, "-m", "fastcache", "generate", PATH, "--ids", ",".join(map(str, IDS))]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    with file.open("wb") as out, subprocess.Popen(
        [*command, "--max-tokens", "6", "--budget", "2 cycles", "--ignore-eos"],
        stdout=out if redirected else theirs, stderr=theirs, env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: the other end was closed
            while data := os.read(ours, 4096):
                seen += data
    os.close(ours)
    assert process.returncode == 0
    tokens = " ".join(map(str, model.generate(IDS, 6, stop=())))
    lines = (file.read_bytes() + seen).decode().splitlines()
    assert lines[0].strip() == tokens and b"6 tokens, " in seen
    if not redirected:
        assert len(lines) == 2 and lines[1].startswith("6 tokens, ") and b"\x1b[" not in seen
