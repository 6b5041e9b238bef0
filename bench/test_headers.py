"""What a change must not lose: opening takes about as long as Python's json takes to read the same headers."""

import gc
import json
import statistics
import time
import tracemalloc

import headers
import pytest
from shards import INDEX

import fastcache

LAYERS, EXPERTS, TENSORS = 13, 256, 20_000
ENOUGH, BYTES_PER_TENSOR = 4, 1_500  # measured: 1 and 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("headers")
    assert headers.make(directory, layers=LAYERS, experts=EXPERTS, tensors=TENSORS)["tensors"] == TENSORS
    return directory


def seconds(work, rounds=5):
    def once():
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    once()
    return statistics.median(once() for _ in range(rounds))


def open_it(directory):
    fastcache.open(directory, budget="2 cycles").close()


def parse_it(directory):
    json.loads((directory / INDEX).read_bytes())
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_opening_takes_no_longer_than_parsing_the_headers_a_few_times(checkpoint):
    for _ in range(3):  # a busy neighbour is no regression
        ratio = seconds(lambda: open_it(checkpoint)) / seconds(lambda: parse_it(checkpoint))
        if ratio <= ENOUGH:
            return
    pytest.fail(f"opening took {ratio:.1f} times as long as json.loads")


def test_opening_takes_little_memory_per_tensor(checkpoint):
    open_it(checkpoint)
    gc.collect()
    tracemalloc.start()
    try:
        open_it(checkpoint)
        assert tracemalloc.get_traced_memory()[1] <= BYTES_PER_TENSOR * TENSORS
    finally:
        tracemalloc.stop()
