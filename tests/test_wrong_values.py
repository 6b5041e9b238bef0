"""Wrong values are refused where they are given: by name, in one line, and never taken for the default."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rig import Experts, layers_of
from routing import tokens

import fastcache
from fastcache.cli import main
from fastcache.curve import LiveCurve
from fastcache.errors import CheckpointError, CheckpointNotFound, InvalidBudget, InvalidSource, TraceError
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.moe import Speculator, load_block
from fastcache.predictors import HotList, RouterLookahead
from fastcache.traces import read, write_trace


def call(*arguments, **env):
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False, env=env)


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 4, 9_000), top_k=2)


@pytest.fixture(scope="module")
def trace(disk):
    write_trace(tokens(layers=2, experts=8, top_k=2, count=20), disk / "wrong.trace")
    return disk / "wrong.trace"


@pytest.mark.parametrize("value", ["", ","])
@pytest.mark.parametrize(
    ("command", "option"),
    [("replay", "--policy"), ("replay", "--fractions"), ("replay", "--slots"), ("mrc", "--policy")],
)
def test_a_list_of_nothing_is_refused_and_not_taken_for_the_default(trace, command, option, value):
    result = call(command, trace, option, value)
    assert result.exit_code == 2
    assert f"{option} '{value}' names nothing" in result.stderr


def test_a_share_that_is_no_number_is_called_a_fraction(trace):
    for value in ("x", "nan", "1/0"):
        result = call("replay", trace, "--policy", "lru", "--fractions", value)
        assert result.exit_code == 2
        assert f"a fraction of '{value}': give a number between 0 and 1" in result.stderr


def test_experts_of_no_bytes_are_refused(trace):
    result = call("replay", trace, "--expert-bytes", "0")
    assert result.exit_code == 2
    assert "'--expert-bytes': must be at least 1; got 0" in result.stderr


def test_a_budget_in_cycles_of_a_trace_without_top_k_asks_for_the_option(tmp_path):
    np.asarray([(0, 1), (0, 2), (1, 1)], "<i4").tofile(tmp_path / "a.bin")
    result = call("replay", tmp_path / "a.bin", "--format", "kimi-k3", "--expert-bytes", "1MiB", "--budget", "2 cycles")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "give --top-k" in result.stderr


def test_a_curve_is_written_only_to_a_name_that_says_what_it_is(trace, tmp_path):
    result = call("mrc", trace, "--out", tmp_path / "curve")
    assert result.exit_code == 2
    assert "end it in .json, .png or .svg" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert call("mrc", trace, "--policy", "lru", "--out", tmp_path / "curve.JSON").exit_code == 0
    assert json.loads((tmp_path / "curve.JSON").read_text())["curves"].keys() == {"lru"}


def test_replay_seed_refuses_a_chunk_in_one_line(disk):
    result = call("replay-seed", "--dir", disk, FASTCACHE_CHUNK="zz")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: FASTCACHE_CHUNK (for chunk) 'zz' is not a size")
    assert result.stderr.count("\n") == 1
    assert call("replay-seed", "--dir", disk, "--chunk", "1").stderr.startswith("Error: chunk must be from 512 bytes")


def test_advise_heeds_its_top_k_where_the_model_has_one(disk, tmp_path):
    shape = DemoShape(layers=2, experts=8, hidden=64, intermediate=32, top_k=2)
    write_demo_checkpoint(disk / "top-k", shape=shape)
    write_trace(tokens(layers=2, experts=8, top_k=2, count=20), tmp_path / "a.trace")
    cycles = []
    for options in ([], ["--top-k", "4"]):
        result = call("advise", disk / "top-k", "--trace", tmp_path / "a.trace", "--json", *options)
        assert result.exit_code == 0, result.output
        cycles.append(json.loads(result.stdout)["cycle"]["experts"])
    assert cycles == [2 * 2, 2 * 4]


def test_no_array_of_numpy_is_not_advised_to_be_unpickled(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"something else altogether")
    with pytest.raises(TraceError, match=r"not an array of numpy\.save: it starts like none$"):
        read(tmp_path / "a.npy", "vllm")


@pytest.mark.parametrize("name", ["queue_depth", "io_threads"])
@pytest.mark.parametrize("value", ["x", 1.5, True])
def test_a_count_that_is_no_integer_is_named(experts, name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer; got {value!r}"):
        fastcache.open(experts.source, "all", **{name: value})


def test_a_share_is_no_bool(experts):
    with pytest.raises(ValueError, match="guess_share must be above 0"):
        fastcache.open(experts.source, "all", guess_share=True)


@pytest.mark.parametrize("value", ["soon", [], -1, float("nan")])
def test_a_timeout_that_is_none_is_named_wherever_it_is_given(experts, value):
    match = r"timeout must be a number of seconds >= 0, or None; got"
    with pytest.raises(ValueError, match=match):
        fastcache.open(experts.source, "all", timeout=value)
    with fastcache.open(experts.source, "all") as store:
        for wait in (lambda: store.acquire(0, 1, timeout=value), lambda: store.prefetch(0, [1]).wait(value)):
            with pytest.raises(ValueError, match=match):
                wait()
        with pytest.raises(ValueError, match=match):
            store.close(timeout=value)


def test_a_budget_that_is_too_large_is_not_told_of_other_spellings(experts):
    with pytest.raises(InvalidBudget, match=r"larger than 8 EiB$"):
        fastcache.open(experts.source, "99999999999TB")


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (-1, CheckpointError, r"expert_nbytes\(\(0, 0\)\) must be from 0 to 1,099,511,627,776; got -1"),
        (2**62, InvalidSource, r"expert_nbytes\(\(0, 0\)\) must be from 0 to 1,099,511,627,776; got 46"),
        (10**30, ValueError, r"expert_nbytes\(\(0, 0\)\) must be from 0"),
        (1.5, TypeError, r"expert_nbytes\(\(0, 0\)\) must be an integer; got 1.5"),
        ("x", TypeError, r"expert_nbytes\(\(0, 0\)\) must be an integer; got 'x'"),
    ],
)
def test_a_source_whose_sizes_are_none_is_refused_when_it_is_opened(size, error, match):
    class Source:
        def keys(self):
            return [(0, 0)]

        def expert_nbytes(self, key):
            return size

        def read_expert(self, key):
            return b""

    with pytest.raises(error, match=match):
        fastcache.open(Source(), "1MiB")


def test_an_empty_path_is_not_the_working_directory():
    with pytest.raises(CheckpointNotFound, match="the path of the checkpoint is empty"):
        fastcache.open("", "1MiB")


def test_a_predictor_that_is_none_is_refused_before_a_token_is_computed(disk):
    with pytest.raises(TypeError, match="a predictor has name, observe, predict and stats; got 5"):
        Speculator(5)
    write_demo_checkpoint(disk / "block", shape=DemoShape(layers=1, experts=4, hidden=64, intermediate=32, top_k=2))
    with pytest.raises(TypeError, match=r"speculator is a Speculator, .* got 5"):
        load_block(disk / "block", 0, experts="resident", speculator=5)


def test_the_modules_that_the_readme_names_need_no_import_of_their_own():
    code = "import fastcache as f; f.predictors.HotList; f.traces.replay_exact; f.moe.Speculator"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_is_in_the_face_of_the_package():
    raised = {name for name, value in vars(fastcache.errors).items() if isinstance(value, type)}
    raised = {name for name in raised if getattr(fastcache.errors, name).__module__ == "fastcache.errors"}
    assert len(raised) > 30 and raised <= set(fastcache.__all__)
    assert all(getattr(fastcache, name) is getattr(fastcache.errors, name) for name in raised)


def test_what_docstrings_name_of_the_package_exists():
    files = (Path(fastcache.__file__).parent).rglob("*.py")
    named = {name for file in files for name in re.findall(r"`(fastcache(?:\.\w+)+)", file.read_text())}
    named = {name for name in named if not name.startswith("fastcache.pad")}  # tensors of packed files
    assert "fastcache.integrity.checksum" in named and "fastcache.open" in named
    for name in sorted(named):
        found = fastcache
        for part in name.split(".")[1:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{part}")


def test_a_progress_that_cannot_be_called_and_keys_that_are_none_are_refused_at_once(disk):
    write_demo_checkpoint(disk / "early", shape=DemoShape(layers=1, experts=4, hidden=64, intermediate=32, top_k=2))
    with pytest.raises(TypeError, match="progress is a callable or None; got 5"):
        fastcache.open(disk / "early", progress=5)
    with fastcache.open(disk / "early") as store:
        with pytest.raises(TypeError, match="progress is a callable or None; got 5"):
            store.warm(progress=5)
        for keys in (5, "ab", [5], ["ab", (0, 1)]):
            with pytest.raises(TypeError, match=r"keys is an iterable of \(layer, expert\)"):
                store.warm(keys)
        assert store.stats().prefetch_issued == 0
        described = store.describe()
        assert json.loads(json.dumps(described)) == described.to_dict()
        handle = store.prefetch(0, [1, 2])
        handle.wait()
        assert repr(handle) == "<Prefetch of 2 experts, done>"


def test_a_live_curve_prints_as_a_short_table():
    curve = LiveCurve(
        slots=(1, 2, 4, 8), nbytes=(1 << 20, 2 << 20, 4 << 20, 8 << 20), hit_rates=(0.0, 0.25, 0.5, 0.5),
        policies={"lru": 0.25, "next_use": 0.3}, used="lru", requests=2000, sampled=1000, lost=0, rate=0.5, switches=0,
    )  # fmt: skip
    first, second, *rows = str(curve).splitlines()
    assert first == "2,000 requests, 1,000 of them sampled (50.0% of the experts)"
    assert second == "lru runs; ghosts at this size, lately: next_use 30.0%, lru 25.0%"
    assert [row.split() for row in rows] == [
        ["lru", "curve", "1", "experts", "1.0", "MiB", "0.0%"],
        ["lru", "curve", "2", "experts", "2.0", "MiB", "25.0%"],
        ["lru", "curve", "4", "experts", "4.0", "MiB", "50.0%"],
    ]


MISTAKES = {
    "a layer that is text": (lambda store: store.experts("a"), TypeError, "layer must be an integer; got 'a' (str)"),
    "a name that is a number": (
        lambda store: fastcache.open("x", name=5),
        TypeError,
        "name is a string or None; got 5",
    ),
    "half a token": (lambda store: store.mark_token(1.5), TypeError, "n must be an integer; got 1.5"),
    "an array for a lease": (
        lambda store: fastcache.linear(np.ones(4), np.ones((2, 4)), "gate"),
        TypeError,
        "wants a lease or a mapping with 'gate'; got ndarray",
    ),
    "text for bytes": (
        lambda store: fastcache.MemorySource({(0, 3): "abc"}),
        TypeError,
        "expert (0, 3): wants a bytes-like object; got str",
    ),
    "a list of experts": (
        lambda store: fastcache.MemorySource([b"abc"]),
        TypeError,
        "wants a mapping of (layer, expert) to buffers; got list",
    ),
    "a list of ranges": (
        lambda store: fastcache.FileRangeSource([], [(0, 1)]),
        TypeError,
        "wants a mapping of (layer, expert) to ranges; got list",
    ),
    "no experts to look ahead for": (lambda store: RouterLookahead(0), ValueError, "at least 1; got 0"),
    "fewer than no experts": (lambda store: HotList("x", n=-1), ValueError, "at least 1; got -1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_called_what_it_is(experts, mistake):
    call, error, says = MISTAKES[mistake]
    with (
        fastcache.open(experts.source, "all", engine="pread") as store,
        pytest.raises(error, match=re.escape(says)),
    ):
        call(store)


@pytest.mark.parametrize(("hot", "says"), [(5, "or None; got 5"), ([3], "or None; it has 3"), ("ab", "got 'ab'")])
def test_a_hot_list_that_is_none_is_called_so(experts, hot, says):
    with fastcache.open(experts.source, "all", engine="pread") as store:
        with pytest.raises(TypeError, match=f"hot_list is an iterable .*{says}"):
            store.hot_list = hot
        assert store.hot_list is None
