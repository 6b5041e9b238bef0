"""setup.py: what was built with other flags is built anew, however new it is; with the same flags it is left alone."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("setuptools", "Cython")),
        reason="setuptools and Cython are not installed here",
    ),
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "gcc").split()[0]) is None, reason="no C compiler"),
]
TINY = '''
cdef extern from *:
    """
    #ifdef __OPTIMIZE__
    #define TINY 1
    #else
    #define TINY 0
    #endif
    """
    int TINY
OPTIMIZED = bool(TINY)
'''
LOOK = """
import json
from fastcache_ext import built, tiny
print(json.dumps([built.KIND, *[flag for flag in built.FLAGS.split() if flag.startswith("-O")], tiny.OPTIMIZED]))
"""
RELEASE, QUICK = ["release", "-O2", True], ["quick", "-O0", False]


@pytest.fixture
def tree(tmp_path):
    """The repository's setup.py, with two modules."""
    (tmp_path / "fastcache_ext").mkdir()
    (tmp_path / "fastcache_ext" / "__init__.py").touch()
    (tmp_path / "fastcache_ext" / "tiny.pyx").write_text(TINY)
    shutil.copy(ROOT / "fastcache_ext" / "built.pyx", tmp_path / "fastcache_ext")
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


def build(tree, kind="", *options):
    env = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "LDFLAGS", "FASTCACHE_WERROR")}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", *options]
    env |= {"FASTCACHE_BUILD": kind, "FASTCACHE_BUILD_JOBS": "0"}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


def found(tree):
    """How the modules in place were built, by their own words, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=tree, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def made(tree):
    return {str(path): path.stat().st_mtime_ns for path in tree.rglob("*") if path.suffix in (".so", ".o")}


def test_other_flags_build_anew_and_the_same_do_not(tree):
    assert build(tree, "quick").returncode == 0
    assert found(tree) == QUICK
    assert build(tree).returncode == 0
    assert found(tree) == RELEASE
    before = made(tree)
    assert len(before) == 6  # objects, modules, and their copies in place
    assert build(tree).returncode == 0
    assert made(tree) == before


def test_a_build_whose_objects_are_elsewhere_leaves_nothing_in_place_that_the_next_would_keep(tree):
    assert build(tree).returncode == 0
    elsewhere = ["--build-temp", str(tree / "t"), "--build-lib", str(tree / "l")]  # as pip does
    assert build(tree, "quick", *elsewhere).returncode == 0
    assert found(tree) == QUICK
    assert build(tree).returncode == 0
    assert found(tree) == RELEASE


def test_after_a_build_that_failed_all_is_built_anew(tree):
    assert build(tree).returncode == 0
    broken = tree / "fastcache_ext" / "worse.pyx"  # the last by name
    broken.write_text('cdef extern from *:\n    """\n    #error "no"\n    """\n')
    assert build(tree, "quick").returncode != 0
    broken.unlink()
    (tree / "fastcache_ext" / "worse.c").unlink()
    assert build(tree).returncode == 0
    assert found(tree) == RELEASE


def test_a_kind_of_build_that_is_none_is_an_error(tree):
    done = build(tree, "fast")
    assert done.returncode != 0 and "FASTCACHE_BUILD=fast: one of release, quick, debug, asan, tsan" in done.stderr
