"""The distribution: its metadata, what its archives hold, and that it builds from its own sdist without a network."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILDABLE = all(importlib.util.find_spec(name) for name in ("setuptools", "Cython"))


def sources(kind: str) -> set[str]:
    return {path.name for path in (ROOT / "fastcache_ext").glob(f"*.{kind}")}


def test_the_distribution_is_fastcache_moe_under_apache_2():
    metadata = importlib.metadata.metadata("fastcache-moe")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Version"] == PROJECT["project"]["version"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="fastcache")
    assert script.value == "fastcache.cli:main"


def test_types_are_shipped_for_every_compiled_module():
    assert (ROOT / "fastcache" / "py.typed").exists()
    assert (ROOT / "fastcache_ext" / "py.typed").exists()
    typed = {name.removesuffix(".pyi") for name in sources("pyi")}
    assert typed >= {name.removesuffix(".pyx") for name in sources("pyx")}


def test_every_python_folder_is_a_package():
    for path in (ROOT / "fastcache").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), f"{path} would not be installed"


def test_compiled_code_needs_no_newer_cpu_than_the_baseline():
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    for path in (ROOT / "fastcache_ext").glob("*.so"):
        code = subprocess.run([objdump, "-d", path], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"%[yz]mm\d", code), f"{path.name} holds AVX code"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist of a copy of the tree: setuptools writes into the tree that it packs."""
    if not BUILDABLE:
        pytest.skip("setuptools and Cython are not installed here")
    copy = tmp_path_factory.mktemp("tree") / "fastcache"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    out = tmp_path_factory.mktemp("sdist")
    run(f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", copy)
    (archive,) = out.iterdir()
    return archive


def run(code: str, cwd: Path) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_sdist_holds_every_source_and_nothing_generated(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for kind in ("pyx", "pxd", "pyi"):
        assert {f"fastcache_ext/{name}" for name in sources(kind)} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "fastcache").rglob("*.py")} <= names
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "ci/test.sh", ".ci/run"}
    wanted |= {"fastcache/py.typed", "fastcache_ext/py.typed", "tests/conftest.py"}
    assert wanted <= names
    assert not [name for name in names if name.endswith((".c", ".so", ".pyc"))]


@pytest.mark.slow
def test_a_wheel_builds_from_the_sdist_offline(sdist, tmp_path):
    subprocess.run(["tar", "-xf", sdist, "-C", tmp_path], check=True)  # extractall(filter=) is newer than 3.11.2
    (tree,) = tmp_path.iterdir()
    offline = "import socket\ndef refuse(*a, **k): raise OSError('offline')\nsocket.socket.connect = refuse\n"
    out = tmp_path / "wheel"
    quick = "import os\nos.environ['FASTCACHE_BUILD'] = 'quick'\n"  # what is built is what matters, not how well
    run(f"{offline}{quick}from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", tree)
    (wheel,) = out.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {re.sub(r"\..*", "", os.path.basename(name)) for name in names if name.endswith(".so")}
    assert modules == {name.removesuffix(".pyx") for name in sources("pyx")}
    assert {f"fastcache_ext/{name}" for kind in ("pyi", "pxd") for name in sources(kind)} <= names
    assert {"fastcache/py.typed", "fastcache_ext/py.typed"} <= names
    assert not [name for name in names if name.endswith((".pyx", ".c")) or name.startswith("tests")]
    assert any(name.endswith("licenses/LICENSE") for name in names)
