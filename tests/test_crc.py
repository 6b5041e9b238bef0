"""CRC-32C: the standard's own values, both ways of computing it, and pieces in any order of sizes."""

import random
import threading

import pytest

from fastcache_ext.crc import HOW, crc32c, crc32c_by_table

# RFC 3720, B.4, and the value that every implementation lists for "123456789".
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
}


def bit_by_bit(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("of", [crc32c, crc32c_by_table], ids=[HOW, "by_table"])
def test_it_is_the_checksum_of_the_standard(of):
    assert {data: of(data) for data in KNOWN} == KNOWN


@pytest.mark.parametrize("of", [crc32c, crc32c_by_table], ids=[HOW, "by_table"])
def test_every_length_and_every_start_agree_with_the_definition(of):
    data = random.Random(1).randbytes(900)
    for begin in range(9):
        for end in [*range(begin, begin + 40), 767, 768, 769, 776, 777, 900]:
            assert of(memoryview(data)[begin:end]) == bit_by_bit(data[begin:end]), (begin, end)


def test_three_streams_agree_with_the_table_at_the_edges_of_their_blocks():
    data = random.Random(2).randbytes(3 * 8192 * 2 + 800)
    for size in (24575, 24576, 24577, 24576 + 767, 24576 + 768, 2 * 24576 - 1, 2 * 24576, len(data)):
        for begin in (0, 1, 7):
            piece = memoryview(data)[begin:size]
            assert crc32c(piece) == crc32c_by_table(piece), (begin, size)


def test_a_checksum_goes_on_from_that_of_the_bytes_before():
    data = random.Random(3).randbytes(70_000)
    for cut in (0, 1, 100, 24_576, 69_999, 70_000):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_every_flipped_bit_shows():
    data = bytearray(random.Random(4).randbytes(300))
    right = crc32c(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != right
        data[bit // 8] ^= 1 << bit % 8


def test_a_buffer_with_gaps_is_refused_and_threads_may_share_one():
    data = random.Random(5).randbytes(1 << 20)
    with pytest.raises(BufferError):
        crc32c(memoryview(data)[::2])
    found = []
    threads = [threading.Thread(target=lambda: found.append(crc32c(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [crc32c_by_table(data)] * 4
