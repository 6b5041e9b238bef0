"""What commands write: never over what they read or a file of another kind; a full disk leaves what was there."""

import errno
import json
import os
import resource
import subprocess
import sys

import pytest
from checkpoints import moe_dir, qwen, split_experts
from click.testing import CliRunner
from routing import tokens

from fastcache.cli import main
from fastcache.integrity import checksum, verify
from fastcache.traces import capacity as room
from fastcache.traces import write_trace


@pytest.fixture
def model(disk, tmp_path):
    """Two shards in a directory of its own."""
    entries = split_experts(range(2), 4, inter=48, hidden=64)
    path = disk / tmp_path.name / "model"
    path.parent.mkdir()
    moe_dir(path, [entries[:12], entries[12:]], qwen(4, 2))
    return path


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def test_only_a_sidecar_is_replaced_and_never_what_is_read(model):
    disk = model.parent
    shard, config = model / "model-00001-of-00002.safetensors", model / "config.json"
    other = disk / "other.json"
    other.write_text('{"format": "somebody else\'s"}')
    links = disk / "hard.checksums", disk / "soft.checksums"
    os.link(shard, links[0])
    links[1].symlink_to(model / "model-00002-of-00002.safetensors")
    for target in (shard, config, other, *links):
        before = target.read_bytes()
        with pytest.raises(FileExistsError, match="is read here|is no sidecar"):
            checksum(model, target, overwrite=True)
        result = run("checksum", model, "--overwrite", "-o", target)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1
        assert target.read_bytes() == before
    for link in links:
        link.unlink()
    other.write_bytes(b"")  # what a writer that died may leave, and a sidecar that is damaged
    sidecar = checksum(model, other, overwrite=True)
    os.truncate(sidecar, 100)
    assert checksum(model, other, overwrite=True) == sidecar and verify(model, other)
    link = disk / "link.checksums"
    link.symlink_to(other)
    checksum(model, link, overwrite=True)
    assert link.is_symlink() and not other.is_symlink() and verify(model, other)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "in.json"
    write_trace(room.with_sizes(tokens(count=40), "1MiB"), path)
    return path


def mrc(*arguments):
    return run("mrc", "--points", 2, "--policy", "lru", *arguments)


@pytest.mark.parametrize("suffix", ["json", "png", "svg", "pdf", "jpg"])
def test_a_curve_replaces_a_curve_and_no_file_of_another_kind_unless_told(trace, tmp_path, suffix):
    if suffix != "json":
        pytest.importorskip("matplotlib")
    out = tmp_path / f"out.{suffix}"
    out.write_bytes(b'{"architectures": ["Qwen3MoeForCausalLM"]}')
    refused = mrc(trace, "--out", out)
    assert refused.exit_code == 1 and "is not replaced" in refused.stderr and refused.stderr.count("\n") == 1
    assert out.read_bytes().startswith(b'{"architectures"')
    assert mrc(trace, "--out", out, "--overwrite").exit_code == 0
    first = out.read_bytes()
    assert mrc(trace, "--out", out).exit_code == 0  # a curve again
    assert not first.startswith(b'{"architectures"') and sorted(os.listdir(tmp_path)) == ["in.json", out.name]


def test_no_curve_is_written_over_the_trace_that_it_is_of(trace, tmp_path):
    before = trace.read_bytes()
    os.link(trace, tmp_path / "hard.json")
    (tmp_path / "soft.json").symlink_to(trace)
    for out in (trace, tmp_path / "hard.json", tmp_path / "soft.json"):
        for flag in ((), ("--overwrite",)):
            refused = mrc(trace, "--out", out, *flag)
            assert refused.exit_code == 1 and "is read here" in refused.stderr
    assert trace.read_bytes() == before


def test_a_curve_goes_into_devices_as_they_are(trace):
    full = mrc(trace, "--out", "/dev/full")  # has no suffix
    assert full.exit_code == 2
    script = f"import os; os.symlink('/dev/stdout', {str(trace.parent / 'l.json')!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    command = [sys.executable, "-m", "fastcache", "mrc", trace, "--policy", "lru", "--out", trace.parent / "l.json"]
    with open(trace.parent / "redirected", "wb") as file:
        subprocess.run(command, stdout=file, check=True)
    first, *rest = (trace.parent / "redirected").read_text().splitlines()
    assert json.loads(first)["trace"] == "in.json" and "compulsory floor" in rest[-1]


def limited(nbytes, *command, **environment):
    """Run a command in a process whose files end at so many bytes: what a full disk does, with EFBIG for ENOSPC."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))

    arguments = [sys.executable, "-m", "fastcache", *map(str, command)]
    return subprocess.run(
        arguments, preexec_fn=limit, capture_output=True, text=True, env=os.environ | environment, check=False
    )


@pytest.mark.parametrize("suffix", ["json", "png"])
def test_a_curve_that_does_not_fit_leaves_the_one_that_was_there_and_names_the_file(trace, tmp_path, suffix):
    if suffix == "png":
        pytest.importorskip("matplotlib")
    out = tmp_path / f"out.{suffix}"
    assert run("mrc", trace, "--out", out).exit_code == 0
    before = out.read_bytes()
    failed = limited(len(before) - 1, "mrc", trace, "--out", out)
    assert failed.returncode == 1 and f"{os.strerror(errno.EFBIG)}: '{out}'" in failed.stderr, failed.stderr
    assert out.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["in.json", out.name]


def test_a_temporary_file_that_does_not_fit_is_said_to_be_one_and_where(trace, tmp_path):
    for command in (("replay", trace), ("mrc", trace)):
        failed = limited(1000, *command, TMPDIR=str(tmp_path))
        assert failed.returncode == 1 and f"a temporary file in {tmp_path} (TMPDIR" in failed.stderr, failed.stderr


def test_other_writers_name_the_file_that_is_full_too(model, tmp_path):
    failed = limited(1000, "pack", model, tmp_path / "packed")
    assert failed.returncode == 1 and "-of-00001.safetensors.part'" in failed.stderr, failed.stderr
    failed = limited(1000, "fixture", "seed", tmp_path / "seed")
    assert failed.returncode == 1 and "model-00001-of-00001.safetensors'" in failed.stderr, failed.stderr
    assert not os.listdir(tmp_path / "seed")
    failed = limited(100, "checksum", model)
    assert failed.returncode == 1 and "safetensors.checksums'" in failed.stderr, failed.stderr
    assert not list(model.glob("*.checksums*")) and not list(model.glob(".*"))


def test_a_fixture_is_not_written_over_a_checkpoint(tmp_path):
    path = tmp_path / "model-00001-of-00001.safetensors"
    path.write_bytes(b"weights")
    refused = run("fixture", "seed", tmp_path)
    assert refused.exit_code == 1 and "is not replaced" in refused.stderr and path.read_bytes() == b"weights"
    path.unlink()
    assert run("fixture", "seed", tmp_path).exit_code == run("fixture", "seed", tmp_path).exit_code == 0
