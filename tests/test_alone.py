"""A test that is marked `alone` has the machine to itself, however many processes run the others."""

import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("xdist")

TESTS = """
import time
import pytest

def stay(name):
    begun = time.monotonic()
    time.sleep(0.03)
    with open("when", "a") as file:
        file.write(f"{name} {begun} {time.monotonic()}\\n")

@pytest.mark.parametrize("n", range(40))
def test_together(n):
    stay("together")

@pytest.mark.alone("watches")
@pytest.mark.parametrize("n", range(8))
def test_alone(n):
    stay("alone")

@pytest.mark.parametrize("n", range(40))
def test_together_again(n):
    stay("together")
"""


def test_no_other_test_runs_beside_one_that_is_marked_so(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "3", "--dist", "worksteal"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "88 passed" in done.stdout, done.stdout + done.stderr
    rows = [line.split() for line in (tmp_path / "when").read_text().splitlines()]
    runs = sorted((float(begun), float(end), name) for name, begun, end in rows)
    beside = [(a[2], b[2]) for a, b in combinations(runs, 2) if b[0] < a[1]]
    assert beside and all("alone" not in pair for pair in beside), runs
