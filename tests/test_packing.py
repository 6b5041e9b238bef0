"""Packing: every tensor as it was, each expert one aligned piece; as the reference reads it; killed, and begun anew."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import moe_dir, name_of, qwen, split_experts, st, tensor
from click.testing import CliRunner
from ggufs import experts as gguf_experts
from ggufs import gguf, moe_pairs
from safetensors import safe_open

import fastcache
from fastcache.cli import main
from fastcache.errors import CheckpointError, UnsupportedCheckpoint
from fastcache.inspection import inspect_checkpoint
from fastcache.integrity import checksum
from fastcache.packing import pack

ORACLE = Path(__file__).parents[2] / "shared" / "oracle" / "cases"
CASES = sorted({file.parent for file in ORACLE.glob("**/*.safetensors")}) or [
    pytest.param(ORACLE, marks=pytest.mark.skip(f"no recorded families at {ORACLE}"))
]
SCALED = [("gate_proj", (48, 60)), ("up_proj", (48, 60)), ("down_proj", (60, 48))]


def fp8(layer, expert):
    """An expert whose bytes and float32 scales alternate, of odd sizes: misaligned as stored."""
    for module, shape in SCALED:
        yield tensor(name_of(layer, expert, module), "F8_E4M3", shape, layer, expert, module)
        yield tensor(name_of(layer, expert, module, "weight_scale_inv"), "F32", (1, 1), layer, expert, module, "s")


@pytest.fixture
def model(disk, tmp_path):
    """Two shards with the tensors of an expert spread over both, and a trunk between them."""
    path = disk / tmp_path.name
    entries = [entry for layer in range(2) for expert in range(5) for entry in fp8(layer, expert)]
    trunk = [tensor("model.norm.weight", "BF16", (33,), "norm"), tensor("lm_head.weight", "F32", (7, 3), "head")]
    odd = tensor("model.odd", "U8", (3,), "odd")
    config = qwen(5, 2, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    moe_dir(path, [[odd, *entries[::2], trunk[0]], [*entries[1::2], trunk[1]]], config)
    (path / "tokenizer.json").write_text("{}")
    (path / ".hidden").write_text("no")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def out(disk, tmp_path):
    path = disk / (tmp_path.name + "-out")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tensors(path):
    """Return {name: (dtype, shape, bytes)} as the reference implementation reads them; padding left out."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with open(file, "rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
            with safe_open(file, "numpy") as reference:  # refuses holes, overlaps and wrong sizes
                names = set(reference.keys())
            assert names == header.keys() - {"__metadata__"}
            for name in names:
                entry = header[name]
                begin, end = entry["data_offsets"]
                raw.seek(8 + length + begin)
                found[name] = (entry["dtype"], entry["shape"], raw.read(end - begin))
    return {name: value for name, value in found.items() if not name.startswith("fastcache.pad.")}


@pytest.mark.parametrize("align", [512, 4096, 65536])
def test_every_tensor_is_as_it_was_and_every_expert_one_aligned_piece(model, out, align):
    made = pack(model, out, align=align)
    assert tensors(out) == tensors(model)
    figures = inspect_checkpoint(out)
    assert figures["extents_per_expert"] == {"min": 1, "mean": 1.0, "max": 1} and figures["misaligned_fraction"] == 0
    assert inspect_checkpoint(model)["extents_per_expert"]["min"] > 1
    before = inspect_checkpoint(model)
    assert all(figures[name] == before[name] for name in ("family", "trunk_bytes", "trunk_dtypes", "expert_bytes"))
    for name in made.files:
        for tensor_name, value in headers(name).items():
            if tensor_name.endswith("gate_proj.weight"):
                expert = tensor_name.removesuffix("gate_proj.weight")
                begin = min(at for other, at in headers(name).items() if other.startswith(expert))
                assert begin % align == 0, (tensor_name, value)
    assert (out / "tokenizer.json").exists() and (out / "config.json").exists() and not (out / ".hidden").exists()
    assert sorted(map(os.path.basename, made.copied)) == ["config.json", "tokenizer.json"]
    assert not [name for name in os.listdir(out) if name.startswith(".") or name.endswith(".part")]


def headers(path):
    """Return {name: offset in the file}."""
    with open(path, "rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(length))
    return {name: 8 + length + e["data_offsets"][0] for name, e in header.items() if name != "__metadata__"}


def test_a_store_serves_the_same_experts_from_it_and_their_checksums_are_the_same(model, out):
    pack(model, out)
    with fastcache.open(model, budget="all") as a, fastcache.open(out, budget="all") as b:
        for key in a:
            assert bytes(a.acquire(*key)) == bytes(b.acquire(*key))
    first, second = (json.loads(open_text(checksum(path))) for path in (model, out))
    assert first["layers"] == second["layers"]


def open_text(path):
    with open(path) as file:
        return file.read()


def test_the_index_names_every_tensor_and_opening_logs_nothing(model, out, caplog):
    pack(model, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    held = {name: file.name for file in out.glob("*.safetensors") for name in headers(file)}
    assert index == held
    with caplog.at_level("WARNING", "fastcache"):
        inspect_checkpoint(out)
    assert not caplog.records


def test_files_end_before_the_expert_that_would_pass_their_size_and_need_no_padding_at_their_end(model, out):
    made = pack(model, out, shard_bytes=20_000)
    assert len(made.files) > 5 and tensors(out) == tensors(model)
    assert inspect_checkpoint(out)["extents_per_expert"]["max"] == 1
    assert all(not list(headers(file))[-1].startswith("fastcache.pad.") for file in made.files)


def test_experts_of_whole_blocks_take_no_padding(disk, out):
    source = moe_dir(disk / "whole", [split_experts(range(1), 3, "BF16", inter=64, hidden=64)], qwen(3, 1))
    assert pack(source, out).padding == 0
    assert pack(out, disk / "whole-again").padding == 0  # what is packed can be packed
    assert tensors(out) == tensors(source) == tensors(disk / "whole-again")
    shutil.rmtree(source)
    shutil.rmtree(disk / "whole-again")


def test_the_command_counts_the_spaces_of_headers_as_padding(model, out):
    shown = CliRunner().invoke(main, ["pack", str(model), str(out), "--align", "1MiB", "--shard-bytes", "1"])
    made = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    payload = sum(len(data) for _, _, data in tensors(model).values())
    files = len(list(out.glob("*.safetensors")))
    headers = sum(int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in out.glob("*.safetensors"))
    assert headers == files << 20 and made - payload == headers  # no tensor of padding
    padding = float(shown.stdout.split("of it padding ")[1].split(" MiB")[0])
    assert padding == pytest.approx(headers / (1 << 20), rel=0.01)


def test_padding_is_not_packed_again(model, out, disk):
    first = pack(model, out)
    second = pack(out, disk / "twice", align=512)
    assert 0 < second.padding < first.padding and tensors(disk / "twice") == tensors(model)
    shutil.rmtree(disk / "twice")


KILLED = """
import os, signal, sys
from fastcache.packing import pack
def progress(done, total):
    if done > total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
pack(sys.argv[1], sys.argv[2], shard_bytes=20_000, progress=progress)
"""


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_killed_run_is_taken_up_and_finished_files_are_kept(model, out, share):
    run = subprocess.run([sys.executable, "-c", KILLED, model, out, str(share)], check=False)
    assert run.returncode == -signal.SIGKILL
    kept = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in out.glob("*.safetensors")}
    with pytest.raises((FileExistsError, CheckpointError)):
        pack(model, out)  # other arguments: another run
    made = pack(model, out, shard_bytes=20_000)
    assert made.resumed == len(kept) and (share < 0.2 or kept)
    assert tensors(out) == tensors(model)
    for name, identity in kept.items():
        assert ((out / name).stat().st_ino, (out / name).stat().st_mtime_ns) == identity
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        pack(model, out, shard_bytes=20_000)


def test_a_source_that_changed_meanwhile_is_another_run(model, out):
    run = subprocess.run([sys.executable, "-c", KILLED, model, out, "0.5"], check=False)
    assert run.returncode == -signal.SIGKILL
    file = sorted(model.glob("*.safetensors"))[0]
    with open(file, "r+b") as raw:
        raw.seek(-1, os.SEEK_END)
        last = raw.read(1)
        raw.seek(-1, os.SEEK_END)
        raw.write(bytes([last[0] ^ 1]))
    with pytest.raises(FileExistsError, match="another run"):
        pack(model, out, shard_bytes=20_000)


def test_nothing_is_overwritten(model, out):
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"not empty \(mine\.txt\)"):
        pack(model, out)
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        pack(model, model)
    with pytest.raises(FileExistsError, match="not a directory"):
        pack(model, out / "mine.txt")
    assert os.listdir(out) == ["mine.txt"]


def test_a_full_disk_is_found_before_anything_large_is_written(model, out, monkeypatch):
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(OSError, match="10000 are free"):
        pack(model, out)
    assert not list(out.glob("*.safetensors"))


def test_what_is_read_again_is_compared(model, out):
    seen = []

    def meddle(done, total):
        for part in out.glob("*.safetensors.part"):
            if part.stat().st_size > 30_000 and not seen:
                seen.append(part)
                with open(part, "r+b") as file:
                    file.seek(20_000)
                    byte = file.read(1)
                    file.seek(20_000)
                    file.write(bytes([byte[0] ^ 1]))

    with pytest.raises(CheckpointError, match="read again is not what was written"):
        pack(model, out, progress=meddle)
    assert seen and not (out / seen[0].name.removesuffix(".part")).exists()
    pack(model, out)
    assert tensors(out) == tensors(model)


def test_fused_experts_and_gguf_are_refused_plainly(disk, out):
    fused = [
        tensor("model.layers.0.mlp.experts.gate_up_proj", "BF16", (4, 128, 64), 1),
        tensor("model.layers.0.mlp.experts.down_proj", "BF16", (4, 64, 64), 2),
    ]
    source = moe_dir(disk / "fused", [fused], {**qwen(4, 1), "hidden_size": 64, "moe_intermediate_size": 64})
    with pytest.raises(UnsupportedCheckpoint, match="slices of tensors that hold several"):
        pack(source, out)
    path = gguf(disk / "refused.gguf", gguf_experts(0), moe_pairs())
    with pytest.raises(UnsupportedCheckpoint, match="only safetensors can be packed"):
        pack(path, out)
    assert not out.exists()
    shutil.rmtree(source)
    os.unlink(path)


def test_the_command_packs_and_says_what_it_made(model, out):
    result = CliRunner().invoke(main, ["pack", str(model), str(out), "--align", "8KiB", "--json"])
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert figures["experts"] == 10 and figures["nbytes"] == sum(os.path.getsize(file) for file in figures["files"])
    assert all(np.fromfile(file, "<u8", 1)[0] % 8192 == 8184 for file in figures["files"])
    wrong = CliRunner().invoke(main, ["pack", str(model), str(out) + "2", "--align", "5000"])
    assert wrong.exit_code == 2 and "align must be a power of two" in wrong.stderr
    again = CliRunner().invoke(main, ["pack", str(model), str(out)])
    assert again.exit_code == 1 and "nothing is overwritten" in again.stderr


def test_a_single_file_can_be_packed(disk, out):
    entries = split_experts(range(1), 3, inter=10, hidden=6)
    path = st(disk / "single.safetensors", entries, meta={"format": "pt"})
    pack(path, out)
    found = tensors(out)
    assert found == {name: (dtype, list(shape), data) for name, dtype, shape, data in entries}
    with safe_open(out / "model-00001-of-00001.safetensors", "numpy") as reference:
        assert reference.metadata() == {"format": "pt", "fastcache.align": "4096"}
    os.unlink(path)


@pytest.mark.parametrize("case", CASES, ids=lambda path: "-".join(path.parts[-2:]))
def test_every_recorded_family_is_packed_as_it_was_or_refused_as_fused(case, out):
    try:
        inspect_checkpoint(case)
    except UnsupportedCheckpoint as error:
        pytest.skip(str(error))
    if fused(case):
        with pytest.raises(UnsupportedCheckpoint, match="slices of tensors"):
            pack(case, out)
        return
    pack(case, out)
    assert tensors(out) == tensors(case)
    assert inspect_checkpoint(out)["extents_per_expert"]["max"] == 1


def fused(case):
    """Whether no tensor is an expert's alone: the number of an expert follows `experts.` in its name if it is."""
    return not any(re.search(r"experts?\.\d+\.|experts\.\w+\.\d+", name) for name in tensors(case))
