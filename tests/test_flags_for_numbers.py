"""True and False are no numbers: wherever one is given for a time, a size, a count, a share or a key, it is refused."""

import numpy as np
import pytest
from rig import Experts, layers_of
from routing import tokens

import fastcache
from fastcache.moe import Speculator
from fastcache.moe.cache import LayerCache
from fastcache.packing import pack
from fastcache.predictors import HotList, RouterLookahead
from fastcache.traces.capacity import of_budget, of_fraction, of_slots, with_sizes

FLAGS = [True, False, np.True_, np.False_]
TIME = r"timeout must be a number of seconds >= 0, or None; got "


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 4, 9_000), top_k=2)


@pytest.fixture(scope="module")
def store(experts):
    with fastcache.open(experts.source, "all", engine="pread") as store:
        yield store


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    "call",
    [
        lambda store, flag: store.acquire(0, 1, timeout=flag),
        lambda store, flag: store.acquire_many(0, [1], timeout=flag),
        lambda store, flag: store.as_ready(0, [1], timeout=flag),
        lambda store, flag: store.pin(0, [1], timeout=flag),
        lambda store, flag: store.prefetch(0, [1]).wait(flag),
        lambda store, flag: store.prefetch(0, [1]).result(flag),
        lambda store, flag: store.close(timeout=flag),
    ],
    ids=["acquire", "acquire_many", "as_ready", "pin", "wait", "result", "close"],
)
def test_a_flag_is_no_time(store, call, flag):
    with pytest.raises(ValueError, match=TIME):
        call(store, flag)
    assert store.is_resident(0, 1) in (True, False)  # and the store is still open


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_no_setting_that_is_a_number(experts, flag):
    for name in ("budget", "chunk", "overflow", "guess_bytes", "queue_depth", "io_threads"):
        with pytest.raises(TypeError, match=f"^{name} must be "):
            fastcache.open(experts.source, **{name: flag})
    with pytest.raises(ValueError, match="guess_share must be above 0"):
        fastcache.open(experts.source, guess_share=flag)
    with pytest.raises(ValueError, match=TIME):
        fastcache.open(experts.source, timeout=flag)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_no_key_and_a_list_of_them_no_mask(store, flag):
    before = store.stats().requests
    for call in (
        lambda: store[0, flag],
        lambda: store[flag, 0],
        lambda: store.acquire(0, flag),
        lambda: store.acquire_many(0, [flag, 1]),
        lambda: store.acquire_many(0, (2, flag)),
        lambda: store.acquire_many(0, flag),
        lambda: store.acquire_many([(0, flag)]),
        lambda: store.as_ready(0, [flag]),
        lambda: store.prefetch(0, [1, flag]),
        lambda: store.is_resident(flag, 0),
        lambda: store.warm([(0, flag)]),
    ):
        with pytest.raises(TypeError, match=r"must be an? ?integers?"):
            call()
    assert (0, flag) not in store and (0, 1) in store
    assert store.stats().requests == before


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_no_count_and_no_size(store, experts, disk, tmp_path, flag):
    trace = tokens(layers=2, experts=8, top_k=2, count=20)
    cache = LayerCache()
    cache.append(np.zeros((3, 1, 2), np.float32), np.zeros((3, 1, 2), np.float32))
    for call in (
        lambda: store.mark_token(flag),
        lambda: store.record(tmp_path / "a.trace", flag),
        lambda: RouterLookahead(flag),
        lambda: HotList("x", n=flag),
        lambda: Speculator(depth=flag),
        lambda: Speculator(most_tokens=flag),
        lambda: cache.truncate(flag),
        lambda: of_slots(trace, flag),
        lambda: of_budget(with_sizes(trace, 4096), flag),
        lambda: with_sizes(trace, flag),
        lambda: with_sizes(trace, top_k=flag),
        lambda: pack(disk, tmp_path / "out", align=flag),
        lambda: pack(disk, tmp_path / "out", shard_bytes=flag),
        lambda: fastcache.open(fastcache.MemorySource({(0, 0): b"abc"}, top_k=flag)),
        lambda: fastcache.FileRangeSource(experts.path, {(0, 0): (flag, 1)}),
        lambda: fastcache.FileRangeSource(experts.path, {(0, 0): (0, flag)}),
    ):
        with pytest.raises(TypeError, match=r"must be"):
            call()
    for call in (lambda: of_fraction(trace, flag), lambda: HotList("x", half_life=flag)):
        with pytest.raises(ValueError, match=r"give a number between 0 and 1|must be tokens > 0"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", FLAGS)
def test_a_source_whose_sizes_are_flags_is_refused(flag):
    class Source:
        def keys(self):
            return [(0, 0)]

        def expert_nbytes(self, key):
            return flag

        def read_expert(self, key):
            return b""

    with pytest.raises(TypeError, match=r"expert_nbytes\(\(0, 0\)\) must be an integer; got"):
        fastcache.open(Source(), "1MiB")
