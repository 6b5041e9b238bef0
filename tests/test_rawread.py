"""rawread: the ceiling reads what it says, and falls back where direct reads are refused."""

import pytest

from fastcache import rawread


def test_every_whole_block_is_read_once_up_to_the_limit(disk):
    path = disk / "raw"
    path.write_bytes(bytes(10 * 4096 + 100))
    result = rawread.measure([path, path], block=4096, threads=3)
    assert result.nbytes == 20 * 4096
    assert result.seconds > 0
    assert result.gb_per_s > 0
    assert rawread.measure([path], block=4096, limit=3 * 4096).nbytes == 3 * 4096


def test_a_file_without_a_whole_block_is_refused(tmp_path):
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(ValueError, match="no file holds"):
        rawread.measure([tmp_path / "small"])


def test_memory_starts_on_a_huge_page_and_is_private():
    memory = rawread._huge(3 << 20)
    assert memory.ctypes.data % rawread.HUGE == 0
    assert memory.nbytes == 3 << 20
    assert not memory.any()
