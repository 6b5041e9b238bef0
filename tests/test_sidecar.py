"""Sidecars of checksums: made once, held to the files at open, on arrival and by a scan. Damage is in real files."""

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import moe_dir, pattern, qwen, split_experts, st, tensor
from click.testing import CliRunner
from ggufs import experts as gguf_experts
from ggufs import gguf, moe_pairs
from rig import Experts, assert_identities, layers_of, settings

import fastcache
from fastcache import BatchFailed, ChecksumMismatch, ExpertKey, MemorySource
from fastcache.cli import main
from fastcache.errors import CheckpointMismatch, SidecarError, SidecarNotFound
from fastcache.integrity import checksum, verify
from fastcache.inventory import inventory_of
from fastcache_ext.crc import crc32c

LAYERS, EXPERTS = 2, 6


@pytest.fixture
def model(disk, tmp_path):
    """Two shards whose experts are misaligned for their dtype: the header of the first has an odd length."""
    path = disk / tmp_path.name
    config = qwen(EXPERTS, LAYERS)
    entries = split_experts(range(LAYERS), EXPERTS, inter=48, hidden=64)
    trunk = tensor("model.norm.weight", "U8", (4099,), "norm")
    half = len(entries) // 2
    moe_dir(path, [[trunk, *entries[:half]], entries[half:]], config)
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def damaged(path, offset):
    """Flip a bit in a file, and give it back its time of modification: what a disk does, and no program that writes."""

    def flip():
        status = os.stat(path)
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 16]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    flip()
    try:
        yield
    finally:
        flip()


def place_of(model, layer, expert, tensor=1, byte=11):
    inventory = inventory_of(model)
    k = layer * EXPERTS + expert
    return inventory.paths[inventory.file[k, tensor]], int(inventory.offset[k, tensor]) + byte


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def test_a_checksum_is_of_an_experts_own_buffer(model, engine):
    written = json.loads(Path(checksum(model, engine=engine)).read_text())
    with fastcache.open(model, budget="all") as store:
        for layer in store.layers:
            own = "".join(f"{crc32c(store.acquire(layer, e)):08x}" for e in store.experts(layer))
            assert written["layers"][str(layer)] == own


def test_the_sidecar_is_the_same_from_either_engine_and_at_any_number_of_windows(model, monkeypatch):
    from fastcache import integrity

    first = Path(checksum(model, engine="pread")).read_text()
    monkeypatch.setattr(integrity, "ARENA_BYTES", 100_000)  # a few experts, read in windows of one
    seen = []
    second = Path(checksum(model, model / "again", progress=lambda done, total: seen.append((done, total)))).read_text()
    assert first == second
    assert seen[-1] == (LAYERS * EXPERTS * 3 * 48 * 64 * 4,) * 2
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(seen))


def test_a_store_that_checks_serves_the_same_bytes(model, engine):
    checksum(model)
    with fastcache.open(model, budget="all", engine=engine) as plain:
        right = {key: bytes(plain.acquire(*key)) for key in plain}
    for budget in ("all", 60_000, 0):
        with fastcache.open(model, budget=budget, verify="sidecar", engine=engine) as store:
            assert {key: bytes(store.acquire(*key)) for key in store} == right
            assert store.stats().errors["checksum"] == 0
            assert store.describe()["verify"] == {
                "requested": "sidecar",
                "used": "sidecar",
                "reason": "",
                "sidecar": str(model / "model-00001-of-00002.safetensors.checksums"),
            }
            assert_identities(store)


def test_damage_is_found_before_anyone_sees_it_and_the_rest_of_a_batch_is_kept(model, engine):
    checksum(model)
    file, offset = place_of(model, 1, 3)
    with damaged(file, offset), fastcache.open(model, budget="all", verify="sidecar", engine=engine) as store:
        with pytest.raises(BatchFailed) as caught:
            store.acquire_many(1, [2, 3, 4])
        error = caught.value.failed[ExpertKey(1, 3)]
        assert list(caught.value.failed) == [ExpertKey(1, 3)]
        assert isinstance(error, ChecksumMismatch) and isinstance(error, (fastcache.CheckpointError, OSError))
        assert error.key == (1, 3) and error.filename == file and error.wanted != error.got
        assert error.offset <= offset and f"{error.wanted:08x}" in str(error) and f"{error.got:08x}" in str(error)
        assert store.is_resident(1, 2) and store.is_resident(1, 4) and not store.is_resident(1, 3)
        with pytest.raises(ChecksumMismatch):  # nothing of it was kept
            store.acquire(1, 3)
        s = store.stats()
        assert s.errors["checksum"] == s.demand_failures == 2 and s.demand_loads == 2
        assert store._check() == 0
        assert_identities(store)


def test_an_expert_that_failed_is_read_anew_when_it_is_wanted_again(model, engine):
    checksum(model)
    file, offset = place_of(model, 0, 1)
    with fastcache.open(model, budget="all", verify="sidecar", engine=engine) as store:
        with damaged(file, offset), pytest.raises(ChecksumMismatch):
            store.acquire(0, 1)
        assert crc32c(store.acquire(0, 1)) == pytest.approx(json_sum(model, 0, 1))
        assert_identities(store)


def json_sum(model, layer, expert):
    text = (model / "model-00001-of-00002.safetensors.checksums").read_text()
    return int(json.loads(text)["layers"][str(layer)][8 * expert : 8 * expert + 8], 16)


def test_a_guess_and_a_pass_through_are_checked_too(model, engine):
    checksum(model)
    file, offset = place_of(model, 0, 2)
    with damaged(file, offset):
        with fastcache.open(model, budget="all", verify="sidecar", engine=engine) as store:
            assert store.prefetch(0, [1, 2]).result(20) == {ExpertKey(0, 1): "loaded", ExpertKey(0, 2): "failed"}
            assert store.stats().prefetch_failures == store.stats().errors["checksum"] == 1
            assert_identities(store)
        with fastcache.open(model, budget=0, verify="sidecar", engine=engine) as store:
            with pytest.raises(ChecksumMismatch):
                store.acquire(0, 2)
            store.acquire(0, 1)
            assert store.stats().pass_through_failures == store.stats().errors["checksum"] == 1
            assert_identities(store)


def test_without_verify_the_damage_is_served_and_the_counter_says_nothing(model):
    checksum(model)
    with damaged(*place_of(model, 0, 2)), fastcache.open(model, budget="all") as store:
        assert crc32c(store.acquire(0, 2)) != json_sum(model, 0, 2)
        assert store.describe()["verify"]["used"] == "none"


def test_a_scan_names_every_expert_that_differs(model, engine):
    checksum(model)
    assert verify(model, engine=engine).ok
    with damaged(*place_of(model, 0, 0)), damaged(*place_of(model, 1, 5, tensor=2)):
        found = verify(model, engine=engine)
    assert list(found.bad) == [(0, 0), (1, 5)] and not found and found.experts == 12
    for key, error in found.bad.items():
        assert isinstance(error, ChecksumMismatch) and error.key == key and error.wanted == json_sum(model, *key)


def test_no_sidecar_is_made_of_files_that_change_meanwhile(model):
    last = sorted(model.glob("*.safetensors"))[1]

    def meddle(done, total):
        last.write_bytes(last.read_bytes()[:-1] + bytes([last.read_bytes()[-1] ^ 1]))

    with pytest.raises((CheckpointMismatch, BatchFailed), match="no sidecar was written"):
        checksum(model, progress=meddle)
    assert not list(model.glob("*.checksums*"))


def test_a_sidecar_goes_along_with_a_copy(model, disk):
    checksum(model)
    there = shutil.copytree(model, disk / "copied", copy_function=shutil.copyfile)  # other times, other inodes
    try:
        assert verify(there).ok
        with fastcache.open(there, budget="all", verify="sidecar") as store:
            store.acquire(0, 0)
    finally:
        shutil.rmtree(there)


def test_a_missing_sidecar_is_an_error_at_open(model):
    with pytest.raises(SidecarNotFound, match=r"model-00001-of-00002\.safetensors\.checksums.*fastcache checksum"):
        fastcache.open(model, budget=0, verify="sidecar")
    with pytest.raises(SidecarNotFound):
        fastcache.open(model, budget=0, verify=model / "elsewhere")


def test_a_directory_in_a_sidecars_place_is_named(model):
    beside = model / "model-00001-of-00002.safetensors.checksums"
    beside.mkdir()
    for verification in ("sidecar", model):
        with pytest.raises(SidecarError, match="a directory, not a sidecar"):
            fastcache.open(model, budget=0, verify=verification)
    with pytest.raises(SidecarError, match="a directory, not a sidecar"):
        verify(model)
    with pytest.raises(SidecarError, match="a directory, which no sidecar replaces"):
        checksum(model, overwrite=True)
    assert os.listdir(beside) == [] and not list(model.glob("*.tmp"))


def test_another_checkpoint_saved_alike_is_refused_at_open(model, disk):
    checksum(model)
    other = disk / "tuned"
    entries = [
        (name, dtype, shape, pattern(len(data), "tuned", name))
        for name, dtype, shape, data in split_experts(range(LAYERS), EXPERTS, inter=48, hidden=64)
    ]
    trunk = tensor("model.norm.weight", "U8", (4099,), "norm")
    moe_dir(other, [[trunk, *entries[:18]], entries[18:]], qwen(EXPERTS, LAYERS))
    sidecar = "model-00001-of-00002.safetensors.checksums"
    shutil.copy(model / sidecar, other / sidecar)
    try:
        with pytest.raises(CheckpointMismatch, match="other contents than were checksummed"):
            fastcache.open(other, budget=0, verify="sidecar")
        assert len(verify(other).bad) == 12 and len(verify(other).changed) == 2
    finally:
        shutil.rmtree(other)


@pytest.mark.parametrize("change", ["size", "places", "names"])
def test_files_that_changed_since_are_refused_at_open(model, change):
    sidecar = checksum(model)
    names = sorted(model.glob("*.safetensors"))
    entries = split_experts(range(LAYERS), EXPERTS, inter=48, hidden=64)
    if change == "size":
        st(names[1], entries[18:], pad=8)
    elif change == "places":
        st(names[1], [*entries[19:], entries[18]])
    else:
        (model / "model.safetensors.index.json").unlink()
        names[1].rename(model / "z.safetensors")
    for refused in (lambda: fastcache.open(model, budget=0, verify="sidecar"), lambda: verify(model)):
        with pytest.raises(CheckpointMismatch, match="not of this checkpoint, or older"):
            refused()
    assert sidecar == str(names[0]) + ".checksums"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"version": 1', '"version": 2', "version 2"),
        ('"crc32c"', '"crc64"', "'crc64'"),
        ('"fastcache.checksums"', '"other"', "not a sidecar"),
        ('"bytes": ', '"bytes": 1', "its own checksum"),
        ("{", "", "not JSON"),
    ],
)
def test_a_damaged_sidecar_is_told_from_a_damaged_checkpoint(model, old, new, what):
    path = checksum(model)
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new, 1))
    with pytest.raises(SidecarError, match=what):
        fastcache.open(model, budget=0, verify="sidecar")


@pytest.mark.parametrize("files", [[1, 2], {"a": 1}, None, [{"name": "a", "bytes": 3}], [{"bytes": 3, "sample": ""}]])
def test_a_sidecar_whose_own_checksum_fits_may_still_say_nothing_of_files(model, files):
    path = Path(checksum(model))
    body = json.loads(path.read_text())
    body = {name: value for name, value in body.items() if name != "check"} | {"files": files}
    body["check"] = f"{crc32c(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"
    path.write_text(json.dumps(body))
    for use in (lambda: fastcache.open(model, verify="sidecar"), lambda: verify(model)):
        with pytest.raises(SidecarError, match="damaged"):
            use()


def test_no_path_asks_for_what_a_scan_does(model):
    with pytest.raises(TypeError, match="verify must be"):
        fastcache.open(model, verify="\0scan")


def test_a_sidecar_is_not_replaced_unasked_and_may_lie_elsewhere(model, disk):
    path = checksum(model)
    with damaged(*place_of(model, 0, 0)):
        with pytest.raises(FileExistsError, match="verify against it, or replace it"):
            checksum(model)
        other = checksum(model, disk / "elsewhere.checksums")
        assert Path(other).read_text() != Path(path).read_text()
        with fastcache.open(model, budget="all", verify=other) as store:
            store.acquire(0, 0)
        assert not verify(model) and verify(model, other)
        checksum(model, overwrite=True)
        assert Path(other).read_text() == Path(path).read_text()


def test_a_failed_writer_leaves_nothing_behind(model):
    before = sorted(os.listdir(model))
    read = []
    for place, error, says in (
        ("none/x", FileNotFoundError, "none: there is no such directory to write x in"),
        ("config.json/x", NotADirectoryError, "nothing can be written there"),
        (".", SidecarError, "a directory, which no sidecar replaces"),
        ("/dev/null", FileExistsError, "no ordinary file"),
        ("/dev/full", FileExistsError, "no ordinary file"),
        ("/proc/x", OSError, "/proc: nothing can be written there"),
    ):
        with pytest.raises(error, match=says):
            checksum(model, model / place, overwrite=True, progress=lambda *done: read.append(done))
        result = run("checksum", model, "--overwrite", "-o", model / place)
        assert result.exit_code == 1 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert "no ordinary file" in run("checksum", model, "-o", "/dev/full").stderr
    assert sorted(os.listdir(model)) == before and not read


def test_sources_in_files_are_served_and_others_refused(disk):
    experts = Experts(disk, layers_of(2, 3, 9_001), parts=3)
    sidecar = checksum(experts.source)
    with fastcache.open(experts.source, budget="all", verify="sidecar") as store:
        assert all(experts.right(key, store.acquire(*key)) for key in store)
    os.unlink(sidecar)
    for source in (MemorySource({(0, 0): b"abc"}), ByHand()):
        with pytest.raises(SidecarError, match="in none"):
            fastcache.open(source, budget=0, verify="sidecar")
        with pytest.raises(SidecarError, match="in none"):
            checksum(source)


class ByHand:
    def keys(self):
        return [(0, 0)]

    def expert_nbytes(self, key):
        return 3

    def read_expert(self, key):
        return b"abc"


def test_the_environment_can_ask_for_it_and_an_argument_take_it_back(model, monkeypatch):
    monkeypatch.setenv("FASTCACHE_VERIFY", "sidecar")
    with pytest.raises(SidecarNotFound):
        fastcache.open(model, budget=0)
    fastcache.open(model, budget=0, verify="off").close()
    for wrong in (True, 3, ""):
        with pytest.raises(TypeError, match="verify must be 'sidecar', 'off', or the path"):
            settings(verify=wrong)


def test_the_commands_write_check_and_name_what_differs(model):
    made = run("checksum", model, "--json")
    sidecar = str(model / "model-00001-of-00002.safetensors.checksums")
    assert made.exit_code == 0 and json.loads(made.stdout) == {"sidecar": sidecar}
    assert run("checksum", model).exit_code == 1
    good = run("verify", model)
    assert good.exit_code == 0 and "12 of 12 experts" in good.stdout
    file, offset = place_of(model, 1, 1)
    with damaged(file, offset):
        bad = run("verify", model)
        assert bad.exit_code == 1 and "layer 1 expert 1" in bad.stdout and "11 of 12 experts" in bad.stdout
        figures = json.loads(run("verify", model, "--json").stdout)
    assert not figures["ok"] and [(each["layer"], each["expert"]) for each in figures["bad"]] == [(1, 1)]
    assert figures["bad"][0]["error"] == "ChecksumMismatch" and figures["bad"][0]["filename"] == file
    assert run("verify", model, "--sidecar", model / "none").exit_code == 1


def test_an_expert_of_gguf_has_its_checksum(disk):
    path = gguf(disk / "checked.gguf", gguf_experts(0), moe_pairs())
    sidecar = checksum(path)
    try:
        assert sidecar == f"{path}.checksums" and verify(path).ok
        with fastcache.open(path, budget="all", verify="sidecar") as store:
            key = next(iter(store))
            assert np.frombuffer(store.acquire(*key), np.uint8).size == store.expert_nbytes(*key)
    finally:
        os.unlink(path)
        os.unlink(sidecar)
