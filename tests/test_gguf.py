"""formats.gguf: what the gguf package reads, read without holding it; what is broken, refused with what and where."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf as package
import pytest
from ggufs import ARRAY, I32, STRING, U8, U32, f32, gguf, i32, string, strings, text, u16, u32
from hypothesis import given
from hypothesis import strategies as st

from fastcache.errors import (
    CheckpointError,
    CheckpointHeaderError,
    CheckpointIndexError,
    CheckpointNotFound,
    CheckpointTruncated,
    MissingShard,
    MissingTensor,
    UnsupportedCheckpoint,
)
from fastcache.formats.checkpoint import open_checkpoint
from fastcache.formats.gguf import read_header

OURS = Path(__file__).parent / "data" / "gguf"
SHARED = Path(__file__).parents[2] / "shared" / "oracle" / "gguf"
ONE = [("a", (2, 4), "F32", bytes(range(32)))]


def same_as_the_package(path):
    ours, theirs = read_header(path), package.GGUFReader(path)
    assert list(ours) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        assert ours[tensor.name] == (tensor.tensor_type.name, shape, tensor.data_offset, tensor.n_bytes)
    for key, value in ours.metadata.items():
        field = theirs.fields[key].contents()
        assert value == field
    return ours


def test_every_recorded_file_reads_as_the_package_reads_it():
    files = sorted([*OURS.glob("*.gguf"), *SHARED.glob("*.gguf")])
    assert files
    for path in files:
        same_as_the_package(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("align", [8, 16, 32, 64, 4096])
def test_data_begins_at_the_alignment_that_the_file_says(tmp_path, align, version):
    for length in range(64):  # of the metadata before it
        tensors = [*ONE, ("b", (3,), "F32", b"b" * 12), ("c", (2, 32), "Q8_0", b"c" * 68)]
        path = gguf(tmp_path / "m.gguf", tensors, [string("k", "x" * length)], align=align, version=version)
        header = read_header(path)
        assert header.data_start % align == 0
        content = path.read_bytes()
        for name, _, _, wanted in tensors:
            found = header[name]
            assert content[found.offset : found.offset + found.nbytes] == wanted


def test_scalars_strings_and_lists_are_kept_and_vocabularies_are_not(tmp_path):
    pairs = [
        string("general.architecture", "qwen3moe"),
        f32("f", 0.5),
        i32("i", -3),
        ("b", 7, b"\1"),
        ("list", ARRAY, struct.pack("<IQ3i", I32, 3, 1, 2, 3)),
        ("big", ARRAY, struct.pack("<IQ", U8, 5000) + bytes(5000)),
        ("nested", ARRAY, struct.pack("<IQ", ARRAY, 2) + 2 * struct.pack("<IQ2I", U32, 2, 1, 2)),
        string("long", "x" * 10_000),
        strings("tokenizer.ggml.tokens", ["a", "", "é" * 300]),
        u32("last", 7),
    ]
    kept = read_header(gguf(tmp_path / "m.gguf", ONE, pairs)).metadata
    assert kept == {"general.architecture": "qwen3moe", "f": 0.5, "i": -3, "b": True, "list": [1, 2, 3], "last": 7}


def test_a_vocabulary_is_stepped_over_quickly_and_is_never_held(tmp_path):
    count = 150_000
    tokens = strings("tokenizer.ggml.tokens", [f"token {i}" for i in range(count)])
    merges = strings("tokenizer.ggml.merges", [f"one {i} two {i}" for i in range(count)])
    scores = ("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", 6, count) + bytes(4 * count))
    path = gguf(tmp_path / "m.gguf", ONE, [tokens, scores, merges, u32("last", 7)])
    assert read_header(path).metadata == {"last": 7}
    started = time.process_time()
    read_header(path)
    assert time.process_time() - started < 0.5
    tracemalloc.start()
    read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@given(lengths=st.lists(st.sampled_from([0, 1, 7, 8, 9, 65_536, 1 << 20, (1 << 20) - 8, (1 << 20) - 9]), max_size=6))
def test_strings_that_end_anywhere_in_a_window_are_stepped_over(tmp_path_factory, lengths):
    path = tmp_path_factory.mktemp("windows") / "m.gguf"
    gguf(path, ONE, [strings("s", ["x" * length for length in lengths]), u32("last", 7)])
    header = read_header(path)
    assert header.metadata == {"last": 7}
    assert path.read_bytes()[header["a"].offset :][:32] == ONE[0][3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"endian": ">"}, UnsupportedCheckpoint, "big-endian GGUF is not supported"),
        ({"version": 0}, UnsupportedCheckpoint, "GGUF version 0 is not supported"),
        ({"version": 1}, UnsupportedCheckpoint, "GGUF version 1 is not supported"),
        ({"version": 4}, UnsupportedCheckpoint, "GGUF version 4 is not supported"),
        ({"counts": (2**63, 0)}, CheckpointTruncated, "9223372036854775808 tensors"),
        ({"counts": (1, 2**64 - 1)}, CheckpointTruncated, "18446744073709551615 pairs"),
        ({"counts": (5, 0)}, CheckpointTruncated, "tensor"),
        ({"align": 3}, CheckpointHeaderError, "general.alignment is 3"),
        ({"pairs": [u32("general.alignment", 0)]}, CheckpointHeaderError, "general.alignment is 0"),
        ({"pairs": [u32("general.alignment", 2**31)]}, CheckpointTruncated, "'a'"),
        ({"pairs": [i32("general.alignment", 32)]}, CheckpointHeaderError, "alignment is 32 of type 5"),
        ({"pairs": [string("general.alignment", "32")]}, CheckpointHeaderError, "alignment is '32' of type 8"),
        ({"pairs": [("k", STRING, struct.pack("<Q", 2**63))]}, CheckpointTruncated, "the value of 'k'"),
        ({"pairs": [("k", ARRAY, struct.pack("<IQ", U8, 2**62))]}, CheckpointTruncated, "the value of 'k'"),
        ({"pairs": [("k", ARRAY, struct.pack("<IQ", STRING, 2**61))]}, CheckpointTruncated, "the value of 'k'"),
        ({"pairs": [("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**64 - 1))]}, CheckpointTruncated, "value of 'k'"),
        ({"pairs": [("k", ARRAY, struct.pack("<IQ", ARRAY, 2**60))]}, CheckpointTruncated, "the value of 'k'"),
        ({"pairs": [("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 20)]}, CheckpointHeaderError, "unknown type 9"),
        ({"pairs": [("k", 13, b"1234")]}, CheckpointHeaderError, "unknown type 13"),
        ({"pairs": [("k", ARRAY, struct.pack("<IQ", 99, 1))]}, CheckpointHeaderError, "unknown type 99"),
        ({"pairs": [u32("k", 1), u32("k", 1)]}, CheckpointHeaderError, "duplicate metadata key 'k'"),
        ({"pairs": [u32(b"\xff", 1)]}, CheckpointHeaderError, "not UTF-8"),
        ({"offsets": {"a": 32}}, CheckpointTruncated, "bytes needed.*32 missing.*'a'"),
        ({"offsets": {"a": 2**63}}, CheckpointTruncated, "'a'"),
        ({"offsets": {"a": 2**64 - 32}}, CheckpointTruncated, "'a'"),
        ({"offsets": {"a": 4}, "tail": bytes(64)}, CheckpointHeaderError, "'a' begins at 4.*alignment 32"),
        ({"tensors": [("a", (8,), 99, bytes(32))]}, UnsupportedCheckpoint, "'a' has ggml type 99"),
        ({"tensors": [("a", (8,), 31, bytes(32))]}, UnsupportedCheckpoint, "'a' has ggml type 31.*removed"),
        ({"tensors": [("a", (2, 33), "Q8_0", bytes(96))]}, CheckpointHeaderError, "'a': rows of 33 .*blocks of 32"),
        ({"tensors": [("a", (1, 1, 1, 1, 8), "F32", bytes(32))]}, CheckpointHeaderError, "'a' has 5 axes"),
        ({"tensors": [("a", (2**62, 4), "F32", bytes(32))]}, CheckpointTruncated, "'a'"),
        ({"tensors": [("a", (2**32, 2**32 - 1, 4), "F32", bytes(32))]}, CheckpointTruncated, "'a'"),
        ({"tensors": [*ONE, *ONE]}, CheckpointHeaderError, "'a' appears more than once"),
        ({"tensors": [*ONE, ("b", *ONE[0][1:])], "offsets": {"b": 0}}, CheckpointHeaderError, "overlap: 'a'.*'b'"),
        ({"tensors": [("x" * 70_000, *ONE[0][1:])]}, CheckpointHeaderError, "70000 bytes long"),
    ],
)
def test_a_broken_header_is_refused_and_nothing_large_is_allocated(tmp_path, options, error, message):
    path = gguf(tmp_path / "m.gguf", **{"tensors": ONE, **options})
    tracemalloc.start()
    with pytest.raises(error, match=message) as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert type(caught.value) is error and str(path) in str(caught.value)
    assert peak < 4 << 20


def test_a_header_that_no_memory_would_hold_is_refused_by_its_size(tmp_path):
    path = gguf(tmp_path / "m.gguf", [], [("k", ARRAY, struct.pack("<IQ", U8, 300 << 20))])
    with path.open("r+b") as file:
        file.truncate(400 << 20)
    with pytest.raises(CheckpointHeaderError, match="larger than 268435456 bytes"):
        read_header(path)


def test_a_file_cut_anywhere_is_refused_at_once(tmp_path):
    path = gguf(tmp_path / "m.gguf", [*ONE, ("b", (8,), "F32", bytes(32))], [strings("t", ["a", "bc"]), u32("k", 1)])
    whole = path.read_bytes()
    assert len(read_header(path)) == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            read_header(path)


def test_other_files_are_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 90)
    with pytest.raises(CheckpointHeaderError, match="Git-LFS pointer"):
        read_header(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"<html>" * 9)
    with pytest.raises(CheckpointHeaderError, match="not a GGUF file"):
        read_header(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path)
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(tmp_path / "none.gguf")


def test_tensors_may_be_empty_unordered_and_apart(tmp_path):
    tensors = [("z", (0, 4), "F32", b""), ("b", (8,), "F32", b"b" * 32), ("a", (8,), "F32", b"a" * 32)]
    path = gguf(tmp_path / "m.gguf", tensors, offsets={"b": 96, "a": 0, "z": 128}, tail=bytes(96))
    header = read_header(path)
    assert header["a"].offset < header["b"].offset and header["z"].nbytes == 0


def split(root, count=3, stem="m", total=None, **more):
    """Write a split model of one tensor a part."""
    paths = []
    for number in range(count):
        pairs = [u16("split.no", number), u16("split.count", count), i32("split.tensors.count", total or count)]
        first = [string("general.architecture", "qwen3moe")] if number == 0 else []
        tensors = [(f"t{number}", (8,), "F32", bytes([number]) * 32)]
        paths.append(gguf(root / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf", tensors, [*first, *pairs], **more))
    return paths


def test_any_part_opens_the_whole_split_in_order(tmp_path):
    paths = split(tmp_path)
    for path in [*paths, tmp_path]:
        found = open_checkpoint(path)
        assert found.files == tuple(map(str, paths)) and found.format == "gguf"
        assert [header.names for header in found.headers] == [["t0"], ["t1"], ["t2"]]
        assert found.config["general.architecture"] == "qwen3moe"


def test_parts_under_other_names_are_found_by_their_metadata(tmp_path):
    names = ["x.gguf", "c.gguf", "a.gguf"]
    for path, name in zip(split(tmp_path), names, strict=True):
        path.rename(tmp_path / name)
    for path in (tmp_path / "c.gguf", tmp_path):
        assert [Path(file).name for file in open_checkpoint(path).files] == names


def test_a_missing_part_is_named(tmp_path):
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(MissingShard, match="1 of its 3 parts are missing: m-00002-of-00003.gguf"):
        open_checkpoint(paths[0])
    with pytest.raises(MissingShard, match="part 2 of the 3 parts"):
        open_checkpoint(tmp_path)
    paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(MissingShard, match="part 2 of the 3 parts"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_parts_that_contradict_each_other_are_refused(tmp_path):
    one, two, three = split(tmp_path)
    content = two.read_bytes()
    two.write_bytes(three.read_bytes())
    with pytest.raises(CheckpointIndexError, match="says part 3 of 3, and it stands for part 2"):
        open_checkpoint(one)
    with pytest.raises(CheckpointIndexError, match="both say that they are part 3 of 3"):
        open_checkpoint(tmp_path)
    two.write_bytes(content.replace(b"t1", b"t0"))
    with pytest.raises(CheckpointIndexError, match="'t0' is in both"):
        open_checkpoint(one)
    root = tmp_path / "short"
    root.mkdir()
    with pytest.raises(MissingTensor, match="split.tensors.count is 4, and its 3 parts hold 3"):
        open_checkpoint(split(root, total=4)[0])


def test_a_directory_is_one_model_and_what_is_none_is_left_aside(tmp_path):
    model = gguf(tmp_path / "m-Q4_K_M.gguf", ONE, [string("general.architecture", "qwen3moe")])
    gguf(tmp_path / "mmproj-f16.gguf", ONE, [string("general.architecture", "clip")])
    gguf(tmp_path / "imatrix.gguf", ONE, [string("general.type", "imatrix")])
    (tmp_path / "._m.gguf").write_bytes(b"macOS")
    found = open_checkpoint(tmp_path)
    assert found.files == (str(model),)
    assert [Path(file).name for file in found.not_indexed] == ["imatrix.gguf", "mmproj-f16.gguf"]
    gguf(tmp_path / "m-Q8_0.gguf", ONE)
    with pytest.raises(CheckpointError, match="2 models in this directory.* by its path: m-Q4_K_M.gguf, m-Q8_0"):
        open_checkpoint(tmp_path)
    model.unlink()
    (tmp_path / "m-Q8_0.gguf").unlink()
    with pytest.raises(UnsupportedCheckpoint, match="no GGUF file in this directory is a model: imatrix.gguf, mmproj"):
        open_checkpoint(tmp_path)


def test_the_text_helper_writes_what_the_package_reads(tmp_path):
    path = gguf(tmp_path / "m.gguf", ONE, [string("general.architecture", "x"), ("k", STRING, text("y"))])
    same_as_the_package(path)
