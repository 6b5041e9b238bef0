"""Objects of compiled classes that nobody has filled in: using one is an exception, never a crash.

What a store makes for its callers cannot be made by them; what can be made with nothing in it says so when it is used.
"""

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fastcache_ext
from fastcache_ext.batch import Batch
from fastcache_ext.handles import Prefetch, Ready
from fastcache_ext.views import ExpertLease

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(found.name for found in pkgutil.iter_modules(fastcache_ext.__path__))
CLASSES = [
    (module, name)
    for module in MODULES
    for name, each in sorted(vars(import_module(f"fastcache_ext.{module}")).items())
    if isinstance(each, type) and each.__module__ == f"fastcache_ext.{module}" and not issubclass(each, tuple)
]


def child(*arguments):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tests" / "bare.py", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "gone", f"{done.returncode} after {lines[-1:]}: {done.stderr[-2000:]}"


def test_the_compiled_classes_are_found():
    assert {("serve", "Server"), ("views", "ExpertLease"), ("handles", "Prefetch"), ("tape", "Tape")} <= set(CLASSES)
    assert len(CLASSES) >= 20


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_bare_object_is_refused_or_raises_whatever_is_done_with_it(module, name):
    child(module, name)


@pytest.mark.parametrize("module", MODULES)
def test_functions_refuse_what_is_no_store_and_a_bare_one(module):
    child(module)


def test_a_store_open_or_closed_takes_whatever_is_given_to_its_methods():
    child("store")


@pytest.mark.parametrize("made_by_calls", [ExpertLease, Prefetch, Ready, Batch])
def test_what_the_calls_of_a_store_make_cannot_be_made_by_hand(made_by_calls):
    for new in (
        made_by_calls,
        lambda: made_by_calls.__new__(made_by_calls),
        lambda: made_by_calls(1, x=2),
        lambda: object.__new__(made_by_calls),
    ):
        with pytest.raises(TypeError, match=r"only the calls of a store make one|is not safe"):
            new()
