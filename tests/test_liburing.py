"""Finding a liburing: what serves, why the others do not, and that what serves runs on any CPU."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def in_child(code: str, check: bool = True) -> dict:
    """Run code in a fresh interpreter, where no library is loaded yet; return the dict it leaves in `out`."""
    script = f"import json\nfrom fastcache_ext import liburing\nout = {{}}\n{code}\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    if check:
        assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else {"crash": done.returncode}


@pytest.fixture(scope="module")
def served() -> dict:
    """What a child finds here; skips where nothing serves, or where making a ring is refused or kills the child."""
    found = in_child("liburing.load(); out = {'source': liburing.source(), 'steps': liburing.steps()}")
    if found["source"] is None:
        pytest.skip(f"no liburing here: {found['steps']}")
    probe = in_child("liburing.load(); out = {'errno': liburing.probe()}", check=False)
    if probe.get("errno") != 0:
        pytest.skip(f"no io_uring here: {probe}")
    return found


def test_importing_opens_nothing_and_imports_no_liburing():
    out = in_child("""
import sys
from pathlib import Path
maps = Path("/proc/self/maps").read_text().splitlines()
out["imported"] = "liburing" in sys.modules
out["mapped"] = [line for line in maps if "uring" in line and "fastcache_ext" not in line]
out["found"] = [liburing.source(), liburing.version(), liburing.steps(), liburing.function_addresses()]
""")
    assert out == {"imported": False, "mapped": [], "found": [None, "", [], {}]}


def test_loading_finds_the_wheel_without_importing_it():
    spec = importlib.util.find_spec("liburing")
    if spec is None:
        pytest.skip("the liburing package is not installed")
    out = in_child("""
import sys
out["loaded"] = liburing.load()
out["imported"] = "liburing" in sys.modules
out["source"] = liburing.source()
out["version"] = liburing.version()
""")
    assert out["loaded"] and not out["imported"]
    assert Path(out["source"]).parent == Path(spec.origin).parent
    assert re.fullmatch(r"\d+\.\d+", out["version"])


def test_each_step_that_fails_keeps_its_reason_in_order():
    out = in_child("""
out["loaded"] = liburing.load(["/nowhere/liburing.so", "libm.so.6"])
out["again"] = liburing.load()
out["steps"] = liburing.steps()
out["source"] = liburing.source()
out["refusal"] = liburing.refusal(38)
""")
    (first, why_first), (second, why_second) = out["steps"]
    assert not out["loaded"] and not out["again"] and out["source"] is None
    assert first == "/nowhere/liburing.so" and "No such file" in why_first
    assert second == "libm.so.6" and why_second == "exports no io_uring_queue_init_params"
    assert why_first in out["refusal"] and why_second in out["refusal"]


def test_a_later_candidate_serves_and_earlier_reasons_stay(served):
    out = in_child(f"""
out["loaded"] = liburing.load(["libm.so.6", {served["source"]!r}, "/never/tried.so"])
out["source"] = liburing.source()
out["steps"] = [path for path, _ in liburing.steps()]
""")
    assert out == {"loaded": True, "source": served["source"], "steps": ["libm.so.6"]}


def test_what_serves_is_never_exchanged(served):
    out = in_child("""
liburing.load()
before = liburing.function_addresses()
out["still"] = liburing.load(["libm.so.6"])
out["same"] = before == liburing.function_addresses()
""")
    assert out == {"still": True, "same": True}


def test_a_missing_package_is_a_step_with_a_reason():
    out = in_child("""
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path]
liburing.load()
out["steps"] = liburing.steps()
""")
    assert out["steps"][0] == ["the liburing package", "is not installed"]


def test_a_package_without_the_library_is_a_step_with_a_reason(tmp_path):
    (tmp_path / "liburing").mkdir()
    (tmp_path / "liburing" / "__init__.py").write_text("raise AssertionError('imported')")
    out = in_child(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
liburing.load()
out["steps"] = liburing.steps()
""")
    assert out["steps"][0] == ["the liburing package", "has no shared object of that name"]


def test_a_file_that_is_no_library_is_passed_over(tmp_path, served):
    (tmp_path / "liburing").mkdir()
    (tmp_path / "liburing" / "__init__.py").write_text("")
    broken = tmp_path / "liburing" / "liburing.so"
    broken.write_text("not an object")
    out = in_child(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
liburing.load()
out["steps"] = liburing.steps()
""")
    path, reason = out["steps"][0]
    assert path == str(broken) and ("file too short" in reason or "invalid ELF header" in reason)


def test_loading_from_many_threads_loads_once(served):
    out = in_child("""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    out["all"] = list(pool.map(lambda _: liburing.load(), range(64)))
out["steps"] = len(liburing.steps())
""")
    assert all(out["all"]) and out["steps"] == len(served["steps"])


def test_a_ring_can_be_made_and_dropped_many_times(served):
    out = in_child("""
import os
liburing.load()
before = len(os.listdir("/proc/self/fd"))
out["errnos"] = sorted({liburing.probe() for _ in range(100)})
out["leaked"] = len(os.listdir("/proc/self/fd")) - before
""")
    assert out == {"errnos": [0], "leaked": 0}


def test_a_refused_ring_is_told_in_words():
    out = in_child("""
import errno
for name in ("EPERM", "ENOSYS", "ENOMEM", "EMFILE"):
    out[name] = liburing.refusal(getattr(errno, name))
""")
    for name, text in out.items():
        assert text.startswith(f"{name}: ")
    assert "seccomp" in out["EPERM"] or "io_uring_disabled" in out["EPERM"]
    assert "RLIMIT_MEMLOCK" in out["ENOMEM"]


def disassembly(path: str) -> dict[str, list[str]]:
    """Return {function: its instructions} of a shared object."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    ).stdout
    functions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = re.fullmatch(r"[0-9a-f]+ <(.+)>:", line)
        if head:
            lines = functions.setdefault(head[1], [])
        elif line:
            lines.append(line)
    return functions


def test_the_functions_in_use_need_no_wide_vectors(served):
    """One wheel serves every x86-64 CPU: a ymm or zmm register in a function in use kills an older one's process."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here")
    addresses = in_child("liburing.load(); out = liburing.function_addresses()")
    functions = {path: disassembly(path) for path, _ in addresses.values()}
    todo = [(path, name) for name, (path, _) in addresses.items()]
    seen = set(todo)
    while todo:
        path, name = todo.pop()
        code = "\n".join(functions[path][name])
        assert code and not re.search(r"%[yz]mm|%k[0-7]", code), f"{name} in {path} uses wide vectors"
        for callee in re.findall(r"\b(?:call|jmp)\w*\s+[0-9a-f]+ <([^>+@]+)(?:@plt)?>", code):
            if callee in functions[path] and (path, callee) not in seen:
                seen.add((path, callee))
                todo.append((path, callee))
    assert len(seen) > len(addresses)  # the calls inside were followed
