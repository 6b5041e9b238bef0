"""What all tests share: one BLAS thread, a clean environment, engines that are there, files that are really on disk."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: sums in one order
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
import functools
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = (
    "FASTCACHE_EXPERT_CACHE_BYTES",
    "FASTCACHE_CHUNK",
    "FASTCACHE_POLICY",
    "FASTCACHE_OVERFLOW",
    "FASTCACHE_SPECULATION",
    "FASTCACHE_GHOSTS",
    "FASTCACHE_GUESS_BYTES",
    "FASTCACHE_GUESS_SHARE",
    "FASTCACHE_SSD_STREAMING",
)
ENGINES = ("uring", "pread")
LOCKS, OPENED = pytest.StashKey[str](), pytest.StashKey[list[IO[str]]]()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without Ctrl-C

hypothesis.settings.register_profile("fastcache", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("fastcache")


@functools.cache
def _refusal(engine: str) -> str:
    """Why this machine has no such engine; empty where it has."""
    import fastcache  # not above: what reads only the sources runs before a build too
    from fastcache import fixture

    with tempfile.TemporaryDirectory() as scratch:
        path = fixture.write_seed_shard(scratch)
        try:
            fastcache.open(path, engine=engine).close()
        except (fastcache.FastcacheError, OSError) as error:
            return f"{engine} is not available here: {error}"
    return ""


# Tests in several processes (pytest-xdist): one that is marked `alone` runs while no other does.


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each worker where the two locks are that make it wait."""
    if LOCKS not in node.config.stash:
        folder = tempfile.TemporaryDirectory(prefix="fastcache-locks-")
        node.config.stash[LOCKS] = folder.name
        node.config.add_cleanup(folder.cleanup)
    node.workerinput["locks"] = node.config.stash[LOCKS]


def pytest_configure(config: pytest.Config) -> None:
    if worker := getattr(config, "workerinput", None):
        files = [open(os.path.join(worker["locks"], name), "w") for name in ("queue", "field")]  # noqa: SIM115
        config.stash[OPENED] = files


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("alone")) and "clock" in mark.args[0]:
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun="^TooSlow"))  # a stall of the machine is rare
    if OPENED in config.stash:
        items.sort(key=alone)  # last, so that none waits for the end of a long one elsewhere


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout looks at the clock
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if OPENED not in item.config.stash:
        return (yield)
    queue, field = item.config.stash[OPENED]
    fcntl.flock(queue, fcntl.LOCK_EX)  # who waits for the field waits here, so that nobody overtakes
    fcntl.flock(field, fcntl.LOCK_EX if alone(item) else fcntl.LOCK_SH)
    fcntl.flock(queue, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        fcntl.flock(field, fcntl.LOCK_UN)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: a run that is cut off later has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when}): {report.longreprtext}", file=sys.__stderr__, flush=True)


@pytest.hookimpl(optionalhook=True, wrapper=True, tryfirst=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> Generator[None, object, object]:
    """A crash is a failure: pytest-rerunfailures would try again whatever is marked `flaky`."""
    result = yield
    report.outcome = "failed"
    return result


def alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the shell reaches a test, but FASTCACHE_ENGINE, by which the whole suite runs on either engine."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that the machine has. A forced engine never falls back."""
    name: str = request.param
    if reason := _refusal(name):
        pytest.skip(reason)
    return name


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """A directory on a real file system (tmpfs takes unaligned direct reads), or where FASTCACHE_TEST_DIR says."""
    bases = ["/var/tmp", str(ROOT)]
    base = os.environ.get("FASTCACHE_TEST_DIR") or next(
        (base for base in bases if os.access(base, os.W_OK) and _file_system(base) != "tmpfs"), None
    )
    if base is None:
        pytest.skip("no file system on a disk; name a directory in FASTCACHE_TEST_DIR")
    with tempfile.TemporaryDirectory(prefix="fastcache-test-", dir=base) as scratch:
        yield Path(scratch)


def _file_system(path: str) -> str:
    """The type of the mount that `path` is on, from /proc/self/mountinfo."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"


@pytest.fixture(scope="session")
def seed_shard(disk: Path) -> Path:
    """The seed's shard; read-only by agreement."""
    from fastcache import fixture

    return fixture.write_seed_shard(disk / "seed")


@pytest.fixture(scope="session")
def large(disk: Path) -> Path:
    """Sixteen experts of 4 MiB: long enough in flight to be met there. Read-only by agreement."""
    path = disk / "large.bin"
    path.write_bytes(random.Random(1).randbytes(64 << 20))
    return path


@pytest.fixture(scope="session")
def stress_seconds() -> float:
    """How long a stress test runs."""
    return float(os.environ.get("FASTCACHE_STRESS_SECONDS", "30"))
