"""What a store keeps per expert outside its budget is what describe() says."""

import ctypes
import gc
import json

import pytest

import fastcache

COUNT, TENSORS = 20_000, 3


class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c hblkhd d e uordblks f g".split()]


def heap():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library has no mallinfo2")
    libc.mallinfo2.restype = Heap
    now = libc.mallinfo2()
    return now.uordblks + now.hblkhd


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """20,000 experts of three tensors, all of them holes."""
    path = tmp_path_factory.mktemp("metadata") / "model.safetensors"
    entries = {}
    for expert in range(COUNT):
        for name in ("down", "gate", "up"):
            at = 512 * len(entries)
            entries[f"layers.0.mlp.experts.{expert}.{name}_proj.weight"] = {
                "dtype": "F32",
                "shape": [8, 16] if name != "down" else [16, 8],
                "data_offsets": [at, at + 512],
            }
    raw = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 512 * len(entries))
    return path


@pytest.mark.parametrize("policy", ["next_use", "lfu", "lru", "s3fifo", "sieve"])
def test_the_heap_grows_by_what_describe_says(path, policy):
    fastcache.open(path, budget=0, policy=policy).close()  # whatever is made once
    gc.collect()
    before = heap()
    with fastcache.open(path, budget=0, policy=policy) as store:
        gc.collect()
        kept = heap() - before
        said = store.describe()
        assert said["metadata_bytes_per_expert"] == -(-said["metadata_bytes"] // COUNT)
        assert said["metadata_bytes"] == pytest.approx(kept, rel=0.1)
