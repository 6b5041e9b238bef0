"""How much memory there is, by the kernel's files; explicit huge pages, never assumed, never beyond the budget."""

import contextlib
from pathlib import Path

import pytest
from rig import Experts, layers_of, until

import fastcache
from fastcache.memory import available_bytes

GIB = 1 << 30
UNLIMITED = 9223372036854771712  # what version 1 says where there is no limit


@pytest.fixture
def machine(tmp_path):
    """A function that writes /proc and /sys/fs/cgroup as given, and returns what is available by them."""

    def available(files, cgroup="0::/\n", free=16 * GIB):
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        cgroups.mkdir()
        (proc / "meminfo").write_text(
            f"MemTotal: {64 * GIB >> 10} kB\nMemFree: 1024 kB\nMemAvailable: {free >> 10} kB\nHugePages_Total: 0\n"
        )
        if cgroup is not None:
            (proc / "self/cgroup").write_text(cgroup)
        for name, content in files.items():
            path = cgroups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir()  # cannot be read, whoever asks
            else:
                path.write_text(f"{content}\n")
        return available_bytes(proc, cgroups)

    return available


V2, V1 = "0::/user/job\n", "9:cpu,cpuacct:/elsewhere\n5:memory:/user/job\n1:name=systemd:/elsewhere\n"
INACTIVE = f"anon 1\nfile 2\ninactive_file {GIB}\nactive_file 3"
TOTAL_INACTIVE = f"inactive_file 7\ntotal_inactive_file {GIB}"

CASES = {
    "no cgroup file": ({}, None, 16 * GIB),
    "no cgroup directory": ({}, V2, 16 * GIB),
    "v2, no limit": ({"user/job/memory.max": "max", "user/job/memory.current": GIB}, V2, 16 * GIB),
    "v2, max": ({"user/job/memory.max": 4 * GIB, "user/job/memory.current": GIB}, V2, 3 * GIB),
    "v2, high is lower": (
        {
            "user/job/memory.max": 4 * GIB,
            "user/job/memory.high": 2 * GIB,
            "user/job/memory.current": GIB,
        },
        V2,
        GIB,
    ),
    "v2, high alone": (
        {"user/job/memory.max": "max", "user/job/memory.high": 2 * GIB, "user/job/memory.current": GIB},
        V2,
        GIB,
    ),
    "v2, inactive pages can be had": (
        {"user/job/memory.max": 4 * GIB, "user/job/memory.current": 3 * GIB, "user/job/memory.stat": INACTIVE},
        V2,
        2 * GIB,
    ),
    "v2, more inactive than used": (
        {"user/job/memory.max": 4 * GIB, "user/job/memory.current": 1, "user/job/memory.stat": INACTIVE},
        V2,
        4 * GIB,
    ),
    "v2, above is tighter": (
        {
            "user/job/memory.max": 4 * GIB,
            "user/job/memory.current": GIB,
            "user/memory.max": 5 * GIB,
            "user/memory.current": 4 * GIB,
        },
        V2,
        GIB,
    ),
    "v2, below is tighter": (
        {
            "user/job/memory.max": 2 * GIB,
            "user/job/memory.current": GIB,
            "user/memory.max": 9 * GIB,
            "user/memory.current": GIB,
        },
        V2,
        GIB,
    ),
    "v2, the root of a container": ({"memory.max": 3 * GIB, "memory.current": GIB}, "0::/\n", 2 * GIB),
    "v2, beside the root of a container": ({"memory.max": 3 * GIB, "memory.current": GIB}, "0::/../job\n", 2 * GIB),
    "v2, a name with a colon": (
        {"a:b/memory.max": 3 * GIB, "a:b/memory.current": GIB},
        "0::/a:b\n",
        2 * GIB,
    ),
    "v2, a limit beyond the machine": (
        {"user/job/memory.max": 400 * GIB, "user/job/memory.current": GIB},
        V2,
        16 * GIB,
    ),
    "v2, used up": ({"user/job/memory.max": GIB, "user/job/memory.current": 2 * GIB}, V2, 0),
    "v2, a limit that cannot be read": ({"user/job/memory.max": None, "user/job/memory.current": GIB}, V2, 16 * GIB),
    "v2, a use that cannot be read": ({"user/job/memory.max": GIB, "user/job/memory.current": None}, V2, 16 * GIB),
    "v2, nonsense in the statistics": (
        {"user/job/memory.max": 4 * GIB, "user/job/memory.current": GIB, "user/job/memory.stat": "inactive_file many"},
        V2,
        3 * GIB,
    ),
    "v1, a limit": (
        {
            "memory/user/job/memory.limit_in_bytes": 4 * GIB,
            "memory/user/job/memory.usage_in_bytes": 3 * GIB,
            "memory/user/job/memory.stat": TOTAL_INACTIVE,
        },
        V1,
        2 * GIB,
    ),
    "v1, no limit": (
        {"memory/user/job/memory.limit_in_bytes": UNLIMITED, "memory/user/job/memory.usage_in_bytes": GIB},
        V1,
        16 * GIB,
    ),
    "v1, a limit above": (
        {
            "memory/user/job/memory.limit_in_bytes": UNLIMITED,
            "memory/user/job/memory.usage_in_bytes": GIB,
            "memory/memory.limit_in_bytes": 5 * GIB,
            "memory/memory.usage_in_bytes": 2 * GIB,
        },
        V1,
        3 * GIB,
    ),
    "v1, a path of the host's in a container": (
        {"memory/memory.limit_in_bytes": 5 * GIB, "memory/memory.usage_in_bytes": GIB},
        "4:memory:/docker/0123\n",
        4 * GIB,
    ),
    "v1, memory is not among the controllers": ({"memory/memory.limit_in_bytes": GIB}, "4:cpu:/\n", 16 * GIB),
    "both, v1 has memory": (
        {
            "memory/user/job/memory.limit_in_bytes": 4 * GIB,
            "memory/user/job/memory.usage_in_bytes": GIB,
        },
        V1 + V2,
        3 * GIB,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_available_memory_is_the_least_of_the_machines_and_every_cgroups(machine, case):
    files, cgroup, right = CASES[case]
    assert machine(files, cgroup) == right


def test_without_proc_nothing_is_known_to_be_available(tmp_path):
    assert available_bytes(tmp_path / "none", tmp_path / "none") == 0


def test_the_machine_that_runs_this_has_some_memory():
    assert 1 << 20 < available_bytes() < 1 << 50


# ---- locked memory


def test_locked_bytes_are_all_that_is_locked_whoever_locked_it(disk, engine):
    experts = Experts(disk, layers_of(2, 4, 9_000))
    try:
        store = fastcache.open(experts.source, "all", engine=engine, mlock="require")
    except fastcache.FeatureUnavailable as error:
        pytest.skip(str(error))
    with store:
        told = store.describe()
        assert told["mlock"]["used"] == "all" and told["mlock"]["locked_bytes"] == told["arena_bytes"] > 0
        by_whom = "by io_uring's registration" if engine == "uring" else ""
        assert told["mlock"]["reason"] == by_whom
        assert told["registered"]["registered_bytes"] == (told["arena_bytes"] if engine == "uring" else 0)
    with fastcache.open(experts.source, "all", engine=engine, mlock="off", progress=lambda *_: None) as store:
        assert (store.describe()["mlock"]["used"], store.describe()["mlock"]["locked_bytes"]) == ("none", 0)


# ---- explicit huge pages

POOL = Path("/proc/sys/vm/nr_hugepages")
SPARE = Path("/proc/sys/vm/nr_overcommit_hugepages")
HUGE = 2 << 20


def to_spare():
    """Huge pages that nobody has, nor was promised."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    told = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    if told.get("Hugepagesize") != 2048:
        pytest.skip("this kernel's huge pages are not of 2 MiB")
    return told["HugePages_Free"] - told["HugePages_Rsvd"]


@contextlib.contextmanager
def pool(pages):
    """Let there be so many huge pages to spare, or skip."""
    try:
        was = [(path, path.read_text()) for path in (POOL, SPARE)]
        SPARE.write_text("0")
        POOL.write_text("0")
    except OSError as error:
        pytest.skip(f"no pool of huge pages to set: {error}")
    try:
        POOL.write_text(str(pages))
        if to_spare() != pages:
            pytest.skip(f"the kernel gives {to_spare()} huge pages, not {pages}")
        yield
    finally:
        for path, text in was:
            path.write_text(text)


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(1, 100, 100_000))


@pytest.mark.root
def test_explicit_huge_pages_that_are_not_there_are_refused_at_open(experts, engine):
    with pool(0), pytest.raises(fastcache.FeatureUnavailable, match="arena"):
        fastcache.open(experts.source, "8MiB", engine=engine, hugepages="hugetlb")


@pytest.mark.root
@pytest.mark.parametrize("budget", [2 * HUGE, 3 * HUGE - 1, 3 * HUGE + 100_001, "all"])
def test_explicit_huge_pages_never_exceed_the_budget(experts, engine, budget):
    with pool(8):
        with fastcache.open(experts.source, budget, engine=engine, hugepages="hugetlb", progress=print) as store:
            told = store.describe()
            whole = store.budget_bytes // HUGE * HUGE
            assert whole - told["slot_bytes"] < told["arena_bytes"] <= whole <= store.budget_bytes
            assert (8 - to_spare()) * HUGE == whole
            assert told["hugepages"]["used"] == "2 MiB pages" and told["hugepages"]["fraction"] == 1
            for _ in range(2):
                for expert in range(100):
                    assert experts.right((0, expert), store[0, expert])
        until(lambda: to_spare() == 8, "their return")  # the kernel ends a ring's hold on memory in its own time


@pytest.mark.root
def test_a_budget_below_one_huge_page_has_no_slots_and_serves_all_the_same(experts, engine):
    with pool(8), fastcache.open(experts.source, HUGE - 1, engine=engine, hugepages="hugetlb") as store:
        assert store.describe()["arena_bytes"] == 0 and to_spare() == 8
        assert experts.right((0, 3), store[0, 3]) and not store.is_resident(0, 3)
