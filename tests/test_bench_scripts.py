"""The scripts of bench/: each says what it does when asked, and measures nothing meanwhile."""

import ast
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastcache_ext import built

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
SCRIPTS = sorted(path for path in BENCH.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
if not SCRIPTS:
    pytest.skip("bench/ is not here", allow_module_level=True)


def run(script, *arguments, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def helped(tmp_path_factory):
    """What every script answers to --help, in a directory for temporary files of its own; a few at a time."""
    place = {script: tmp_path_factory.mktemp(script.stem) for script in SCRIPTS}
    before = {path: path.stat().st_mtime_ns for path in BENCH.rglob("*.json")}
    with ThreadPoolExecutor(4) as pool:
        answers = dict(
            zip(SCRIPTS, pool.map(lambda each: run(each, "--help", TMPDIR=str(place[each])), SCRIPTS), strict=True)
        )
    assert before == {path: path.stat().st_mtime_ns for path in BENCH.rglob("*.json")}, "a receipt was written"
    return {script: (answers[script], list(place[script].iterdir())) for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_is_the_docstring_and_runs_nothing(helped, script):
    answer, left = helped[script]
    assert answer.returncode == 0, answer.stderr
    doc = ast.get_docstring(ast.parse(script.read_text()), clean=False)
    assert doc.strip() in answer.stdout
    assert answer.stdout.startswith("usage: ") and not answer.stderr
    assert left == []


def test_every_file_of_bench_is_a_script_or_is_imported_or_collected():
    """A script without the usual last lines would be missed above."""
    modules = {"machine", "shards", "traffic", "workloads"}
    for path in set(BENCH.glob("*.py")) - set(SCRIPTS):
        assert path.stem in modules or path.stem.startswith(("test_", "bench_")), path
        assert "sys.argv[1" not in path.read_text()


def test_a_word_too_many_is_an_error_and_not_ignored():
    answer = run(BENCH / "size_classes.py", "all")
    assert answer.returncode == 2 and "unrecognized arguments: all" in answer.stderr


def checkout(directory):
    """A copy of bench/ and the packages, as another checkout has them."""
    for name in ("bench", "fastcache", "fastcache_ext"):
        ignored = shutil.ignore_patterns("__pycache__", "*.c", "receipts")
        shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    return directory


FACTS = "import json, machine; print(json.dumps(machine.facts()))"


def facts(root, home):
    """machine.facts() of the bench/ under `root`, with the packages of `home`."""
    env = os.environ | {"PYTHONPATH": f"{home}:{root / 'bench'}"}
    return subprocess.run([sys.executable, "-c", FACTS], env=env, cwd="/", capture_output=True, text=True, check=False)


def test_a_receipt_says_how_the_modules_were_built():
    if built.KIND != "release":
        pytest.skip(f"a {built.KIND} build is here")
    found = facts(ROOT, ROOT)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)["build"]
    assert told == {"kind": "release", "flags": built.FLAGS, "compiler": built.COMPILER}
    assert "-O2" in told["flags"].split() and told["compiler"]


def test_packages_of_another_checkout_are_not_measured(tmp_path):
    other = checkout(tmp_path / "other")
    found = facts(other, ROOT)
    assert found.returncode != 0
    assert f"WrongBuild: fastcache comes from {ROOT}, this script from {other}: run it with PYTHONPATH={other}" in (
        found.stderr
    )
    done = run(other / "bench" / "size_classes.py")  # at once, and not after the measurement
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(f"Error: fastcache comes from {ROOT}, ") and done.stderr.count("\n") == 1


def test_a_build_that_is_no_release_is_not_measured(tmp_path):
    other = checkout(tmp_path / "other")
    for module in (other / "fastcache_ext").glob("built.*"):
        module.unlink()
    for kind, flags in (("quick", "-O0"), ("asan", "-O1 -fsanitize=address"), ("release", "-fsanitize=thread -O2")):
        text = f"KIND, FLAGS, COMPILER = {kind!r}, {flags!r}, 'GCC'"
        (other / "fastcache_ext" / "built.py").write_text(text)
        found = facts(other, other)
        assert found.returncode != 0
        assert f"WrongBuild: the compiled modules in {other} are a {kind} build ({flags}), whose times" in found.stderr
