"""sources: the protocol, and what each source takes and refuses."""

import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import moe_dir, pattern, qwen, split_experts, tensor

import fastcache
from fastcache.errors import CheckpointError, CheckpointNotFound, CheckpointTruncated, InvalidRange, InvalidSource
from fastcache.keys import ExpertKey
from fastcache.layout.build import build_layout
from fastcache.sources import ExpertSource, Extent, ExtentSource, FileRangeSource, MemorySource, ReadSource
from fastcache.sources.checkpoint import CheckpointSource


@pytest.fixture
def files(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.bin").write_bytes(pattern(1000, number))
    return [tmp_path / "0.bin", tmp_path / "1.bin"]


def test_ranges_of_one_file(files):
    source = FileRangeSource(
        files[0], {(0, 0): (0, 100), ExpertKey(2, 1): (50, 950), (0, np.int64(1)): [999, 1]}, top_k=2
    )
    assert list(source.keys()) == [(0, 0), (2, 1), (0, 1)]
    assert all(type(key) is ExpertKey for key in source.keys())  # noqa: SIM118
    assert source.extents(ExpertKey(2, 1)) == (Extent(str(files[0]), 50, 950),)
    assert source.expert_nbytes(ExpertKey(0, 0)) == 100
    assert source.top_k == 2
    with pytest.raises(KeyError):
        source.extents(ExpertKey(5, 5))


def test_ranges_of_several_files_and_experts_in_pieces(files):
    ranges = {
        (0, 0): (files[1], 10, 20),
        (0, 1): [(files[0], 0, 5), (str(files[1]), 7, 3)],
    }
    source = FileRangeSource(files, ranges)
    assert source.extents(ExpertKey(0, 0)) == (Extent(str(files[1]), 10, 20),)
    assert source.extents(ExpertKey(0, 1)) == (Extent(str(files[0]), 0, 5), Extent(str(files[1]), 7, 3))
    assert source.expert_nbytes(ExpertKey(0, 1)) == 8
    assert FileRangeSource(files[0], {(0, 0): [(0, 5), (9, 3)]}).expert_nbytes(ExpertKey(0, 0)) == 8


def test_a_range_past_the_end_is_refused_when_the_source_is_made(files):
    with pytest.raises(CheckpointTruncated, match=r"expert \(3, 4\): .*0.bin.*1001 bytes needed, 1000 present"):
        FileRangeSource(files[0], {(3, 4): (1, 1000)})
    with pytest.raises(CheckpointTruncated):
        FileRangeSource(files[0], {(3, 4): (2**63, 2**63)})


@pytest.mark.parametrize("range_", [(-1, 10), (0, -10), (0, 0), ("/nowhere/else", 0, 1)])
def test_a_range_that_cannot_be_one_is_refused(range_, files):
    with pytest.raises(InvalidRange, match=r"expert \(0, 0\)"):
        FileRangeSource(files[0], {(0, 0): range_})
    with pytest.raises(ValueError):
        FileRangeSource(files[0], {(0, 0): range_})


@pytest.mark.parametrize("range_", [(1,), (1, 2, 3, 4), (0.0, 1), (), ("a", "b"), 5, None, [(0,)], (3, 0, 1)])
def test_a_range_of_another_form_is_a_type_error(range_, files):
    with pytest.raises(TypeError, match="a range must be"):
        FileRangeSource(files[0], {(0, 0): range_})


def test_with_several_files_a_range_must_name_its_own(files):
    with pytest.raises(TypeError, match="a range must be"):
        FileRangeSource(files, {(0, 0): (0, 1)})


@pytest.mark.parametrize("key", [0, (0,), (0, 0, 0), ("a", 0), (True, 0), (0.0, 0), "ab"])
def test_a_key_of_another_form_is_a_type_error(key, files):
    with pytest.raises(TypeError, match="a key must be"):
        FileRangeSource(files[0], {key: (0, 1)})
    with pytest.raises(TypeError, match="a key must be"):
        MemorySource({key: b"1"})


@pytest.mark.parametrize("key", [(-1, 0), (0, -1), (0, 2**20), (2**20, 0), (0, 10**9), (10**30, 0)])
def test_a_key_out_of_range_is_a_value_error_that_names_it(key, files):
    class Hand:
        def keys(self):
            return [(0, 0), key]

        def expert_nbytes(self, key):
            return 1

        read_expert = expert_nbytes

    makers = (
        lambda: FileRangeSource(files[0], {key: (0, 1)}),
        lambda: MemorySource({key: b"1"}),
        lambda: fastcache.open(Hand()),
    )
    for make in makers:
        with pytest.raises(ValueError, match=re.escape(f"from 0 to 1,048,575; got {key}")) as caught:
            make()
        assert isinstance(caught.value, InvalidSource)


def test_numbers_with_too_many_gaps_are_refused_before_a_table_is_made():
    source = MemorySource({(layer, 2**20 - 1 - layer): b"1" for layer in range(17)})
    with pytest.raises(InvalidSource, match=r"17,825,656: the highest is \(0, 1048575\)"):
        fastcache.open(source)
    with fastcache.open(MemorySource({(0, 0): b"a", (5, 1000): b"b"}), "all") as store:
        assert len(store) == 2 and bytes(store.acquire(5, 1000)) == b"b"


@pytest.mark.parametrize(
    ("top_k", "error"),
    [(0, InvalidSource), (-1, InvalidSource), (10**30, InvalidSource), ("8", TypeError), (1.5, TypeError)],
)
def test_a_top_k_that_is_none_is_refused_by_name(top_k, error):
    with pytest.raises(error, match=r"MemorySource\.top_k must be"):
        fastcache.open(MemorySource({(0, 0): b"a"}, top_k=top_k))


def test_a_file_that_is_not_there_or_is_none(tmp_path):
    with pytest.raises(CheckpointNotFound):
        FileRangeSource(tmp_path / "none", {})
    with pytest.raises(FileNotFoundError):
        FileRangeSource([tmp_path / "none"], {})
    with pytest.raises(CheckpointError, match="not a regular file"):
        FileRangeSource(tmp_path, {})


def test_memory_is_served_without_a_copy_and_read_only():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = MemorySource({(0, 0): array, (0, 1): b"abc", (1, 0): bytearray(b"")}, top_k=1)
    view = source.read_expert(ExpertKey(0, 0))
    assert (view.readonly, view.nbytes, view.format) == (True, 24, "B")
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)
    assert [source.expert_nbytes(key) for key in source.keys()] == [24, 3, 0]  # noqa: SIM118
    assert source.top_k == 1
    with pytest.raises(TypeError, match="not C-contiguous"):
        MemorySource({(0, 0): array.T})
    with pytest.raises(KeyError):
        source.read_expert(ExpertKey(9, 9))


def test_sources_are_told_apart_by_the_protocols(files, tmp_path):
    memory, ranges = MemorySource({}), FileRangeSource(files[0], {})
    checkpoint = CheckpointSource(build_layout(moe_dir(tmp_path / "m", [split_experts([0], 2)], qwen(2, 1))))
    for source in (memory, ranges, checkpoint):
        assert isinstance(source, ExpertSource)
        assert repr(source).startswith(f"<{type(source).__name__}: ")
    assert isinstance(memory, ReadSource) and not isinstance(memory, ExtentSource)
    assert isinstance(ranges, ExtentSource) and not isinstance(ranges, ReadSource)
    assert isinstance(checkpoint, ExtentSource)
    assert not isinstance({}, ExpertSource)


def test_a_checkpoint_as_a_source_merges_neighbours_and_skips_empty_tensors(tmp_path):
    entries = split_experts([0], 3)
    marker = tensor("model.layers.0.mlp.experts.0.gate_proj.marker", "U8", [0], 1)
    apart = [entry for entry in entries if "experts.2.up" in entry[0]]
    together = [entry for entry in entries if entry not in apart]
    markers = [(marker[0].replace("experts.0", f"experts.{e}"), *marker[1:]) for e in range(3)]
    root = moe_dir(tmp_path / "m", [together + markers, apart], qwen(3, 1))
    layout = build_layout(root)
    source = CheckpointSource(layout)
    assert source.keys() == [(0, 0), (0, 1), (0, 2)]
    assert source.top_k == 2
    contents = {}
    for key in source.keys():  # noqa: SIM118
        extents = source.extents(key)
        assert all(extent.nbytes > 0 for extent in extents)
        assert sum(extent.nbytes for extent in extents) == source.expert_nbytes(key) == 3 * 96
        contents[key] = b"".join(Path(path).read_bytes()[offset:][:nbytes] for path, offset, nbytes in extents)
    assert len(source.extents(ExpertKey(0, 0))) == 1
    assert len(source.extents(ExpertKey(0, 2))) == 3  # gate | up, in the other shard | down
    for expert in range(3):
        assert contents[0, expert] == b"".join(entry[3] for entry in entries if f"experts.{expert}." in entry[0])
    for key in (ExpertKey(0, 3), ExpertKey(0, -1), ExpertKey(1, 0)):
        with pytest.raises(KeyError):
            source.extents(key)
