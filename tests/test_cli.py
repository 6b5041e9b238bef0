"""The command line: what it prints, what it leaves behind, and how it exits."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fastcache import fixture
from fastcache.cli import main
from fastcache.seed_replay import run as replay

DEMO_KEYS = set(
    "bit_identical engine direct hugepages_fraction budget_bytes arena_bytes requests hits first_consumptions reuses "
    "misses bytes_read read_gb_per_s ceiling_gb_per_s tokens_per_s".split()
)


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_help_names_every_command_and_version_is_the_distributions():
    text = call("--help").stdout
    for command in main.commands:
        assert command in text
        assert call(command, "--help").exit_code == 0
    assert call("--version").stdout.startswith("fastcache, version 0.")


def test_a_demo_with_a_wrong_budget_writes_nothing(tmp_path):
    result = call("demo", "--dir", tmp_path, "--budget", "10 bananas")
    assert result.exit_code == 1 and "bananas" in result.stderr
    assert "writing" not in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "value"), [("FASTCACHE_POLICY", "best"), ("FASTCACHE_CHUNK", "1"), ("FASTCACHE_ENGINE", "fast")]
)
def test_a_demo_with_a_wrong_setting_says_so_first_and_writes_nothing(tmp_path, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    result = call("demo", "--dir", tmp_path, "--size", "80MiB")
    assert result.exit_code == 1 and result.stderr.startswith(f"Error: {variable}") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_must_count_as_it_does_counts_so_whatever_the_environment_says(disk, monkeypatch):
    for variable, value in (("VERIFY", "sidecar"), ("SPECULATION", "off"), ("EXPERT_CACHE_BYTES", "0")):
        monkeypatch.setenv(f"FASTCACHE_{variable}", value)
    assert call("replay-seed", "--dir", disk).exit_code == 0
    assert call("demo", "--dir", disk / "set", "--size", "80MiB", "--tokens", 1).exit_code == 0


def test_no_help_is_cut_off():
    for name, command in main.commands.items():
        assert not command.get_short_help_str(60).endswith("..."), name


def test_fixture_seed_writes_the_shard_and_prints_its_path(tmp_path):
    result = call("fixture", "seed", tmp_path / "a")
    assert result.exit_code == 0
    with open(result.stdout.strip(), "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest().startswith("5f2a99cabe69e534")


@pytest.mark.parametrize("chunk", [4096, None])
def test_every_scenario_of_the_seed_gives_the_seeds_figures(disk, engine, chunk):
    rows = replay(disk / f"replay-{engine}-{chunk}", engine=engine, chunk=chunk)
    assert len(rows) == 10
    assert [row.to_dict() for row in rows if not row.ok] == []


def test_replay_seed_prints_both_figures_and_exits_by_them(disk, monkeypatch):
    result = call("replay-seed", "--dir", disk, "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed["ok"]
    assert {"check", "seed", "beyond", "got", "ok"} == printed["rows"][0].keys()
    assert "prefetch four cold" in call("replay-seed", "--dir", disk).stdout
    monkeypatch.setattr(fixture, "SEED_EXPERT_NBYTES", 1)
    result = call("replay-seed", "--dir", disk, "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["ok"]


def test_the_demo_is_bit_identical_and_leaves_nothing(disk, engine):
    home = disk / f"demo-{engine}"
    result = call("demo", "--size", "290MiB", "--tokens", 3, "--dir", home, "--engine", engine, "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed.keys() >= DEMO_KEYS
    assert printed["bit_identical"] is True
    assert printed["engine"] == engine
    assert printed["arena_bytes"] <= printed["budget_bytes"] < printed["checkpoint_bytes"]
    assert printed["requests"] == printed["hits"] + printed["joins"] + printed["misses"]
    assert printed["reuses"] == printed["hits"] - printed["first_consumptions"]
    assert printed["read_gb_per_s"] > 0
    assert not home.exists()  # it was not there before


def test_the_demo_reads_ahead_or_not_as_it_is_told(disk):
    told = {
        name: json.loads(
            call("demo", "--size", "80MiB", "--tokens", 2, "--dir", disk / name, "--predictor", name, "--json").stdout
        )
        for name in ("lookahead", "none")
    }
    assert all(result["bit_identical"] for result in told.values())
    assert told["none"]["predictor"] == "none" and told["none"]["prefetch_loads"] == told["none"]["recall"] == 0
    assert told["lookahead"]["predictor"] == "router-lookahead"


def test_the_demo_shows_what_people_want_to_know_and_can_keep_the_checkpoint(disk):
    result = call("demo", "--size", "80MiB", "--tokens", 1, "--dir", disk / "kept", "--budget", "30MiB", "--keep")
    assert result.exit_code == 0
    for word in ("bit-identical", "tokens/s", "first consumptions", "reuses", "raw ceiling", "engine", "hugepages"):
        assert word in result.stdout
    assert len([*(disk / "kept").glob("*/model.safetensors.index.json")]) == 1


def test_a_demo_that_differs_says_so_and_fails(disk, monkeypatch):
    import fastcache.demo as demo

    honest = demo._compare
    monkeypatch.setattr(demo, "_compare", lambda *args: (1, honest(*args)[1]))
    result = call("demo", "--size", "80MiB", "--tokens", 1, "--dir", disk / "differs")
    assert result.exit_code == 1
    assert "NO: 1 of" in result.stdout


def test_mistakes_are_one_line_and_not_a_traceback(disk):
    for arguments in (["--size", "1MiB"], ["--size", "lots"], ["--size", "80MiB", "--budget", "25%"]):
        result = call("demo", "--dir", disk / "mistakes", *arguments)
        assert result.exit_code in (1, 2)
        assert "Error: " in result.stderr
    assert not (disk / "mistakes").exists() or not [*(disk / "mistakes").iterdir()]


def test_a_terminated_demo_removes_its_checkpoint(disk):
    home = disk / "terminated"
    command = [sys.executable, "-m", "fastcache.cli", "demo", "--size", "1GiB", "--dir", str(home)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        while not (home.exists() and any(home.glob("*/*.safetensors"))):
            assert process.poll() is None, process.stderr.read()
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not home.exists()


def test_a_demo_that_fails_leaves_no_directory_that_it_made_and_every_other(disk):
    theirs = disk / "theirs"
    theirs.mkdir()
    for keep in ((), ("--keep",)):
        for home in (disk / "new" / "newer", theirs):
            result = call("demo", "--dir", home, "--size", "80MiB", "--budget", "nonsense", *keep)
            assert result.exit_code == 1 and "nonsense" in result.stderr
    assert not (disk / "new").exists() and theirs.exists() and not os.listdir(theirs)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["mrc", "--help"], ["replay-seed", "--json"]])
def test_a_full_output_is_one_line_and_an_exit_code(arguments):
    command = [sys.executable, "-m", "fastcache.cli", *arguments]
    with open("/dev/full", "w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr == f"Error: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: standard output\n"
