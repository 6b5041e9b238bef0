"""formats.checkpoint: which files a path means, and whether an index and its shards agree."""

import builtins
import json
import logging
import os
import shutil

import pytest
from checkpoints import moe_dir, pattern, qwen, split_experts, st, tensor, write_index

from fastcache.errors import (
    CheckpointError,
    CheckpointIndexError,
    CheckpointNotFound,
    CheckpointTruncated,
    MissingShard,
    MissingTensor,
    UnsupportedCheckpoint,
    WrongShard,
)
from fastcache.formats.checkpoint import INDEX_NAME, open_checkpoint
from fastcache.layout.build import build_layout


def two_shards(path, **options):
    entries = split_experts([0, 1], 4)
    return moe_dir(path / "model", [entries[:12], entries[12:]], qwen(), **options)


def test_a_directory_with_an_index_a_file_and_a_directory_without_one_open(tmp_path):
    root = two_shards(tmp_path)
    indexed = open_checkpoint(root)
    assert [os.path.basename(file) for file in indexed.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert all(map(os.path.isabs, indexed.files))
    assert indexed.config["model_type"] == "qwen3_moe"
    assert open_checkpoint(root / INDEX_NAME).files == indexed.files
    (root / INDEX_NAME).unlink()
    assert open_checkpoint(root).files == indexed.files
    single = open_checkpoint(indexed.files[0])
    assert (single.files, single.config["num_experts"]) == (indexed.files[:1], 4)


def test_a_directory_in_the_place_of_a_json_file_is_named(tmp_path):
    root = two_shards(tmp_path)
    for name, error in ((INDEX_NAME, CheckpointIndexError), ("config.json", CheckpointError)):
        (root / name).rename(tmp_path / "kept")
        (root / name).mkdir()
        with pytest.raises(error, match=f"{name}: a directory, not a JSON file"):
            open_checkpoint(root)
        (root / name).rmdir()
        (tmp_path / "kept").rename(root / name)


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    two_shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("model").files[0] == str(tmp_path / "model" / "model-00001-of-00002.safetensors")


def test_a_missing_shard_a_wrong_shard_and_a_ghost_are_three_different_errors(tmp_path):
    root = two_shards(tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    (root / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(MissingShard, match=r"1 of 2 files are missing: model-00002-of-00002.safetensors"):
        open_checkpoint(root)
    (tmp_path / "away").rename(root / "model-00002-of-00002.safetensors")

    index = json.loads((root / INDEX_NAME).read_text())
    moved = dict(index["weight_map"], **{name: "model-00001-of-00002.safetensors"})
    write_index(root, moved)
    with pytest.raises(WrongShard, match=f"{name}' is in model-00001.*does not hold it; found in model-00002"):
        open_checkpoint(root)

    write_index(root, dict(index["weight_map"], ghost="model-00001-of-00002.safetensors"))
    with pytest.raises(MissingTensor, match="1 tensors.* in none of its 2 files: ghost; model-00001.* should hold"):
        open_checkpoint(root)


def test_a_shard_that_is_cut_is_refused_at_open(tmp_path):
    root = two_shards(tmp_path)
    last = root / "model-00002-of-00002.safetensors"
    size = last.stat().st_size
    os.truncate(last, size - 1)
    with pytest.raises(CheckpointTruncated, match=f"{last}.*{size} bytes needed, {size - 1} present"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    "file",
    ["../other/x.safetensors", "/abs/x.safetensors", "a/../../x", "..", "", "x\0y", "dir/", 3, None, ["x"], "\ud800"],
)
def test_an_index_that_leads_out_of_its_directory_is_refused_before_anything_is_opened(file, tmp_path, monkeypatch):
    root = two_shards(tmp_path)
    (tmp_path / "other").mkdir()
    st(tmp_path / "other" / "x.safetensors", [("a", "U8", [1], b"1")])
    write_index(root, {"a": "model-00001-of-00002.safetensors", "b": file})
    opened = []
    real_open = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *rest, **more: opened.append(path) or real_open(path, *rest, **more)
    )
    with pytest.raises(CheckpointIndexError, match="weight_map"):
        open_checkpoint(root)
    assert opened == [str(root / INDEX_NAME)]


def test_symbolic_links_out_of_the_directory_are_how_the_hub_cache_looks(tmp_path):
    root = two_shards(tmp_path)
    snapshot = tmp_path / "snapshots" / "0a1b"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in root.iterdir():
        shutil.move(file, blobs / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha-{file.name}")
    assert len(build_layout(snapshot).layers) == 2
    (blobs / "sha-model-00001-of-00002.safetensors").unlink()
    with pytest.raises(MissingShard, match="symbolic link to nothing"):
        open_checkpoint(snapshot)


def test_files_that_the_index_does_not_name_are_listed_and_open_by_their_path(tmp_path):
    root = two_shards(tmp_path)
    mtp = st(root / "model-mtp.safetensors", split_experts([0], 4, prefix="mtp"))
    stray = st(root / "model.safetensors", split_experts([0], 4, dtype="U8"))
    st(root / "._model.safetensors", [], raw_header=b"no header")
    layout = build_layout(root)
    assert layout.not_indexed == (str(mtp), str(stray))
    assert layout.layers[0].records[0].tensors[0].dtype == "F32"
    assert list(build_layout(mtp).layers) == [0]


def test_a_tensor_that_the_index_forgot_is_used_and_said(tmp_path, caplog):
    root = two_shards(tmp_path, weight_map={"model.layers.0.mlp.experts.0.up_proj.weight": None})
    with caplog.at_level(logging.WARNING, "fastcache"):
        layout = build_layout(root)
    assert len(layout.layers[0]) == 4
    assert "1 tensors in its files are not in the index" in caplog.text


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_files_is_refused_with_both_names(index, tmp_path):
    root = two_shards(tmp_path)
    entries = split_experts([1], 4)
    st(root / "model-00001-of-00002.safetensors", [*split_experts([0], 4), entries[5]])
    if not index:
        (root / INDEX_NAME).unlink()
    with pytest.raises(CheckpointIndexError, match=f"{entries[5][0]}' is in both model-00001.* and model-00002"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "\xff", "[" * 100_000, '{"weight_map": null}'],
)
def test_an_index_that_is_no_index_is_refused(text, tmp_path):
    root = two_shards(tmp_path)
    (root / INDEX_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointIndexError, match=INDEX_NAME):
        open_checkpoint(root)


def test_a_tensor_that_the_index_names_twice_is_refused(tmp_path):
    root = two_shards(tmp_path)
    file = "model-00001-of-00002.safetensors"
    (root / INDEX_NAME).write_text(f'{{"weight_map": {{"a": "{file}", "a": "{file}"}}}}')
    with pytest.raises(CheckpointIndexError, match="duplicate key: 'a'"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("version https://git-lfs.github.com/spec/v1", "Git-LFS pointer"),
    ],
)
def test_a_config_that_is_no_config_is_refused_by_name(text, error, tmp_path):
    root = two_shards(tmp_path)
    (root / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json: {error}|config.json: not JSON.*{error}"):
        open_checkpoint(root)


def test_what_is_not_there_is_not_found(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no such file or directory"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "none.safetensors")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointNotFound, match="symbolic link to nowhere"):
        open_checkpoint(tmp_path / "link")


def test_other_formats_are_called_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="no .safetensors or .gguf file in this directory"):
        open_checkpoint(tmp_path)
    for name, text in (("m.bin", "pickle"), ("m.pth", "pickle")):
        root = tmp_path / name[2:]
        root.mkdir()
        (root / name).write_bytes(b"GGUF" + b"\0" * 100)
        for path in (root, root / name):
            with pytest.raises(UnsupportedCheckpoint, match=text):
                open_checkpoint(path)


def test_an_expert_may_be_spread_over_shards(tmp_path):
    entries = split_experts([0], 8)
    late = next(entry for entry in entries if "experts.7.gate_proj" in entry[0])
    first = [entry for entry in entries if ".7." not in entry[0]] + [late]
    second = [entry for entry in entries if ".7." in entry[0] and entry is not late]
    root = moe_dir(tmp_path / "model", [first, [*second, tensor("lm_head.weight", "F32", [2, 2], 9)]], qwen(8, 1))
    layout = build_layout(root)
    assert sorted(set(layout.layers[0].file[7].tolist())) == [0, 1]
    assert list(layout.trunk) == ["lm_head.weight"]
    assert pattern(4, 1) != pattern(4, 2)
