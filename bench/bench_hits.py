"""The hit path under pytest-benchmark: `bash ci/bench.sh`. Receipts are made by hits.py, which interleaves the arms."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workloads import evictions, full_store, workloads

import fastcache

NAMES = (
    "empty_method", "dict_get", "lru_cache", "ordered_dict_lru", "cachetools_lru", "acquire_release",
    "subscript_release", "acquire_three_arrays_release", "acquire_many_8",
)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fastcache.ExpertStore]:
    path: Path = tmp_path_factory.mktemp("bench") / "hits.bin"
    with full_store(path) as opened:
        yield opened


@pytest.mark.benchmark(group="1000 hits")
@pytest.mark.parametrize("name", NAMES)
def test_a_hit(benchmark: Callable[..., Any], store: fastcache.ExpertStore, name: str) -> None:
    benchmark(workloads(store)[name], 1000)


@pytest.mark.benchmark(group="1000 evictions")
@pytest.mark.parametrize("leased", [0.0, 0.5])
@pytest.mark.parametrize("slots", [1024, 16384])
@pytest.mark.parametrize("policy", ["lru", "next_use"])
def test_an_eviction(benchmark: Callable[..., Any], policy: str, slots: int, leased: float) -> None:
    benchmark(evictions(policy, slots, leased), 1000)
