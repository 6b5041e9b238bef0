"""The cache of a layer: rows of any number of arrays, one per token."""

import numpy as np
import pytest

from fastcache.errors import CheckpointMismatch
from fastcache.moe.cache import KVCache, LayerCache


def rows(n, at=0, width=3):
    return np.arange(at * width, (at + n) * width, dtype=np.float32).reshape(n, width)


@pytest.mark.parametrize("pieces", [(1,) * 200, (64, 1, 63, 72), (200,), (0, 7, 193)])
def test_what_was_appended_is_what_comes_back_at_any_cut(pieces):
    cache, at = LayerCache(), 0
    for n in pieces:
        keys, values = cache.append(rows(n, at), rows(n, at, 5).reshape(n, 5, 1))
        at += n
        np.testing.assert_array_equal(keys, rows(at))
        np.testing.assert_array_equal(values, rows(at, 0, 5).reshape(at, 5, 1))
        assert keys.flags.c_contiguous and not keys.flags.writeable and keys.ctypes.data % 64 == 0
    assert cache.length == 200


def test_growth_is_amortised():
    cache, grown, last = LayerCache(), 0, 0
    for at in range(4096):
        cache.append(rows(1, at))
        grown, last = grown + (cache.nbytes != last), cache.nbytes
    assert grown <= 12  # 64 * 1.5 ** 11 > 4096
    assert cache.nbytes <= 1.5 * 4096 * 12


def test_rows_of_another_shape_are_refused_and_change_nothing():
    cache = LayerCache()
    cache.append(rows(2), rows(2))
    for wrong in ((rows(1),), (rows(1), rows(1, width=4)), (rows(1), rows(2))):
        with pytest.raises(ValueError, match="this cache keeps"):
            cache.append(*wrong)
    assert cache.length == 2


def test_a_cut_cache_goes_on_from_the_cut():
    cache = KVCache(2)
    for layer in cache:
        layer.append(rows(5))
    assert (cache.length, len(cache)) == (5, 2)
    cache[0].append(rows(1, 5))
    assert cache.length == 5
    cache.truncate(3)
    (seen,) = cache[1].append(rows(1, 100))
    np.testing.assert_array_equal(seen, np.concatenate([rows(3), rows(1, 100)]))
    with pytest.raises(ValueError, match="cannot be cut"):
        cache.truncate(5)


def test_a_cache_belongs_to_the_model_whose_tokens_it_has_until_it_is_empty():
    cache, shapes = KVCache(2), [((3,),)] * 2
    cache.claim(shapes, "a", "model a")
    for layer in cache:
        layer.append(rows(5))
    cache.claim(shapes, "a", "model a")
    with pytest.raises(CheckpointMismatch, match="5 tokens of model a, and was given to model b"):
        cache.claim(shapes, "b", "model b")
    with pytest.raises(CheckpointMismatch, match="cache of 2 layers was given to model c, which has 3"):
        cache.claim([*shapes, ((3,),)], "c", "model c")
    with pytest.raises(CheckpointMismatch, match=r"layer 1 .* rows of \(\(3,\),\) .* model d are \(\(2, 4\),\)"):
        cache.claim([((3,),), ((2, 4),)], "d", "model d")
    cache.truncate(0)
    cache.claim([((2, 4),)] * 2, "d", "model d")
    for layer in cache:
        layer.append(np.zeros((1, 2, 4), np.float32))
    assert cache[0].shapes == ((2, 4),)


def test_a_cache_with_layers_of_several_lengths_is_refused_until_it_is_cut():
    cache = KVCache(2)
    cache[0].append(rows(2))
    with pytest.raises(CheckpointMismatch, match=r"have \[0, 2\] tokens: truncate it to 0"):
        cache.claim([((3,),)] * 2, "a", "model a")
