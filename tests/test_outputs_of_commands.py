"""What commands write: never over what they read or a file of another kind; a full disk leaves what was there."""

import os

import pytest
from checkpoints import moe_dir, qwen, split_experts
from click.testing import CliRunner

from fastcache.cli import main
from fastcache.integrity import checksum, verify


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
