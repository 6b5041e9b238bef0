"""Counters as a Prometheus server scrapes them: names, units, labels; stores that end; windows that do not matter."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition, parser
from rig import Experts, layers_of, run_dry, scripted, settings

import fastcache
from fastcache.metrics import LAYER_COUNTERS, Collector, metric_name
from fastcache.stats import ERRORS, GAUGES, NUMBERS, PHASES

NBYTES = 10_000


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 12, NBYTES))


@pytest.fixture
def store(experts):
    with fastcache.open(experts.source, "all", name="one", engine="pread") as store:
        yield store


def registered(*stores, **split):
    registry, collector = CollectorRegistry(), Collector(*stores, **split)
    registry.register(collector)
    return registry, collector


def samples(registry):
    """Return {(name, labels): value} of a scrape, by the strict parser of OpenMetrics."""
    text = exposition.generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(registry, name, **labels):
    return samples(registry)[(name, *sorted(labels.items()))]


def test_a_scrape_has_every_counter_and_gauge_once_with_the_name_of_the_store(store):
    registry, _ = registered(store)
    store.acquire_many(0, [1, 2, 3])
    store[0, 1]
    s, found = store.stats(), samples(registry)
    of_one = {name: n for (name, *labels), n in found.items() if labels == [("store", "one")]}
    for name in {*NUMBERS, "reuses"} - {"demand_wait_ns"}:
        n = getattr(s, name)
        total = "" if name in GAUGES else "_total"
        assert of_one.pop(f"fastcache_{metric_name(name)}{total}") == (n / 1e9 if name.endswith("_ns") else n), name
    assert of_one.pop("fastcache_demand_wait_seconds_count") == 3
    assert of_one.pop("fastcache_demand_wait_seconds_sum") == pytest.approx(s.demand_wait_ns / 1e9)
    described = store.describe()
    for name in ("budget_bytes", "arena_bytes", "slots"):
        assert of_one.pop(f"fastcache_{name}") == described[name]
    assert not of_one
    assert all(("store", "one") in labels for _, *labels in found)


def test_the_text_says_type_unit_and_meaning(store):
    store[0, 1]
    text = generate_latest(registered(store)[0]).decode()
    for line in (
        "# HELP fastcache_hits_total requests for a resident expert",
        "# TYPE fastcache_hits_total counter",
        'fastcache_hits_total{store="one"} 0.0',
        'fastcache_read_bytes_total{store="one"} 10000.0',
        "# TYPE fastcache_resident_experts gauge",
        'fastcache_resident_experts{store="one"} 1.0',
        "# TYPE fastcache_demand_wait_seconds histogram",
        'fastcache_demand_wait_seconds_bucket{le="+Inf",store="one"} 1.0',
        'fastcache_errors_total{error="short_read",store="one"} 0.0',
    ):
        assert line in text.splitlines(), line
    assert "nanosecond" not in text and "gauge:" not in text and "of those" not in text


def test_the_histogram_is_cumulative_and_its_edges_are_seconds(store):
    store.acquire_many(0, range(12))
    found = samples(registered(store)[0])
    buckets = {
        float(dict(labels)["le"]): n
        for (name, *labels), n in found.items()
        if name == "fastcache_demand_wait_seconds_bucket"
    }
    assert list(buckets) == [2**i / 1e6 for i in range(25)] + [float("inf")]
    counts = list(buckets.values())
    assert counts == sorted(counts) and counts[-1] == 12
    share = store.stats().wait_at_most(0.5)
    assert buckets[share] >= 6 > buckets.get(share / 2, 0)


def test_the_info_says_what_is_really_used_and_no_path(store):
    [info] = [dict(labels) for name, *labels in samples(registered(store)[0]) if name == "fastcache_store_info"]
    described = store.describe()
    assert info["engine"] == "pread" and info["policy"] == "next_use" and info["liburing"] == ""
    for feature in ("direct", "hugepages", "mlock", "registered"):
        assert info[feature] == str(described[feature]["used"]).lower()
    assert info["family"] == store.family and info["version"] == fastcache.__version__
    assert not any(os.sep in text for text in info.values())


def test_the_library_behind_io_uring_is_named_without_its_directory(experts, engine):
    with fastcache.open(experts.source, "all", engine=engine) as store:
        [info] = [dict(labels) for name, *labels in samples(registered(store)[0]) if name == "fastcache_store_info"]
        assert info["engine"] == engine and info["liburing"].startswith("liburing") == (engine == "uring")
        assert os.sep not in info["liburing"]


def test_a_settled_store_is_described_once_a_minute_and_not_at_every_scrape(experts):
    class Watched(fastcache.ExpertStore):
        asked = 0

        def describe(self):
            self.asked += 1
            return super().describe()

    with Watched(experts.source, settings(budget="all"), "watched", lambda *_: None) as store:
        assert store._progress()[1]  # a progress callback waits for that
        registry, collector = registered(store)
        for hits in range(4):
            assert value(registry, "fastcache_hits_total", store="watched") == max(hits - 1, 0)
            store[0, 1]
        assert store.asked == 1
    del store
    gc.collect()
    assert not collector._described


def test_errors_have_their_class_and_errno_as_labels(experts):
    with scripted(experts, slots=4) as (store, engine):
        registry, _ = registered(store)
        store.prefetch(0, [1, 2])
        for res in (-5, 0):
            [op] = engine.take(1)
            engine.settle(op.id, res)
        run_dry(engine)
        name = store.name
        assert value(registry, "fastcache_errors_total", store=name, error="read_failed") == 1
        assert value(registry, "fastcache_errors_total", store=name, error="short_read") == 1
        assert value(registry, "fastcache_read_errors_total", store=name, errno="EIO") == 1
        labels = {
            dict(labels).get("error") for metric, *labels in samples(registry) if metric == "fastcache_errors_total"
        }
        assert labels == set(ERRORS)


def test_nothing_goes_back_when_the_stats_are_reset(store):
    registry, _ = registered(store, layers=True, phases=True)
    store.prefetch(0, [5]).wait()
    store.acquire_many(0, [1, 2])
    before = samples(registry)
    store.reset_stats()
    assert store.stats().requests == 0 and samples(registry) == before | {
        key: n for key, n in samples(registry).items() if key[0] == "fastcache_store_info"
    }
    store[0, 1]
    after = samples(registry)
    counters = [key for key in before if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert len(counters) > 100 and all(after[key] >= before[key] for key in counters)
    assert (
        after["fastcache_hits_total", ("store", "one")] == 1 and after["fastcache_misses_total", ("store", "one")] == 2
    )


def test_layers_and_phases_are_published_on_request_and_sum_to_the_total(store):
    assert not any(
        name.startswith(("fastcache_layer", "fastcache_phase")) for name, *_ in samples(registered(store)[0])
    )
    registry, _ = registered(store, layers=True, phases=True)
    with store.phase("decode"):
        store.acquire_many(0, [1, 2])
        store[1, 1], store[0, 1]
    assert value(registry, "fastcache_layer_hits_total", store="one", layer="0") == 1
    assert value(registry, "fastcache_phase_misses_total", store="one", phase="decode") == 3
    assert value(registry, "fastcache_phase_demand_wait_seconds_count", store="one", phase="decode") == 3
    found = samples(registry)
    assert store.stats(layers=True).layers[0].keys() == set(LAYER_COUNTERS)
    for scope, parts in (("layer", map(str, store.layers)), ("phase", PHASES)):
        total = sum(found[f"fastcache_{scope}_read_bytes_total", (scope, part), ("store", "one")] for part in parts)
        assert total == found["fastcache_read_bytes_total", ("store", "one")] == 3 * NBYTES
    seconds = sum(n for (name, *_), n in found.items() if name == "fastcache_layer_demand_wait_seconds_total")
    assert seconds == pytest.approx(found["fastcache_demand_wait_seconds_sum", ("store", "one")])


def test_a_store_is_held_weakly_and_a_collected_or_closed_one_is_silent(experts):
    store, other = (fastcache.open(experts.source, "all", name=name) for name in ("gone", "closed"))
    registry, _ = registered(store, other)
    assert {dict(labels)["store"] for _, *labels in samples(registry)} == {"gone", "closed"}
    other.close()
    assert {dict(labels)["store"] for _, *labels in samples(registry)} == {"gone"}
    there = weakref.ref(store)
    del store
    gc.collect()
    assert there() is None and not samples(registry) and not generate_latest(registry)


def test_one_collector_takes_several_stores_and_tells_them_apart_by_name(experts, store):
    registry, collector = registered(store)
    collector.add(store)  # again: nothing changes
    with (
        fastcache.open(experts.source, "all", name="two") as two,
        fastcache.open(experts.source, "all", name="one") as same,
    ):
        two[0, 1]
        collector.add(two)
        with pytest.raises(ValueError, match="'one' is published already.*name="):
            collector.add(same)
        assert value(registry, "fastcache_misses_total", store="two") == 1
        assert value(registry, "fastcache_misses_total", store="one") == 0
        same[0, 1], same[0, 2]
        store.close()
        collector.add(same)  # the name is free again
        assert value(registry, "fastcache_misses_total", store="one") == 2
    with pytest.raises(TypeError, match="got str"):
        collector.add("one")


def test_a_registry_refuses_a_second_collector(experts, store):
    registry, _ = registered()  # none of any store yet
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Collector(store))
    registry, collector = registered(store)
    registry.unregister(collector)
    assert not generate_latest(registry)


def test_a_forked_child_publishes_nothing(store):
    registry, _ = registered(store)
    pid = os.fork()
    if pid == 0:
        os._exit(len(generate_latest(registry)) > 0)
    assert os.waitpid(pid, 0)[1] == 0 and generate_latest(registry)


def test_without_prometheus_client_the_module_imports_and_the_collector_says_what_to_install(tmp_path):
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here', name='prometheus_client')")
    code = "import fastcache.metrics\ntry: fastcache.metrics.Collector()\nexcept ImportError as error: print(error)\n"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True
    )
    assert "pip install 'fastcache-moe[metrics]'" in out.stdout


def test_metrics_is_imported_when_it_is_first_named():
    code = (
        "import fastcache, sys; assert 'fastcache.metrics' not in sys.modules\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "fastcache.metrics.Collector; assert 'prometheus_client' not in sys.modules"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)
