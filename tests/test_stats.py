"""Stats as an object: frozen, subtractable, explained, and shown to people and to machines."""

import copy
import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Experts, layers_of

import fastcache
from fastcache import Stats
from fastcache.stats import DERIVED, ERRORS, GAUGES, NUMBERS, WAIT_EDGES_US, Counts

small = st.integers(0, 1000)
snapshots = st.builds(
    lambda numbers, buckets, errors: Stats(
        **dict(zip(NUMBERS, numbers, strict=True)),
        demand_wait_buckets=buckets,
        errors=dict(zip(ERRORS, errors, strict=True)),
        layers={3: {"hits": numbers[0]}},
    ),
    st.lists(small, min_size=len(NUMBERS), max_size=len(NUMBERS)),
    st.lists(small, min_size=len(WAIT_EDGES_US) + 1, max_size=len(WAIT_EDGES_US) + 1),
    st.lists(small, min_size=len(ERRORS), max_size=len(ERRORS)),
)


@pytest.fixture(scope="module")
def seen(disk):
    """Counters of a store that did some of everything."""
    experts = Experts(disk, layers_of(2, 12, 10_000))
    with fastcache.open(experts.source, "all", name="<seen>") as store:
        with store.phase("decode"):
            lease = store[0, 1]
            assert store[0, 1].key == lease.key
            store.prefetch(1, [2, 3]).wait()
            store.acquire(1, 2)
        return store.stats(layers=True, phases=True)


def later(a, more):
    """Return what a store that said `a` may say after `more` has happened: its counters are no less."""
    return Stats(
        **{name: getattr(more, name) + getattr(a, name) * (name not in GAUGES) for name in NUMBERS},
        demand_wait_buckets=[i + j for i, j in zip(a.demand_wait_buckets, more.demand_wait_buckets, strict=True)],
        errors={name: a.errors[name] + n for name, n in more.errors.items()},
        layers={3: {"hits": a.layers[3]["hits"] + more.layers[3]["hits"]}},
    )


@given(snapshots, snapshots, snapshots)
def test_differences_chain_and_keep_both_ends_of_every_gauge(a, b, c):
    b = later(a, b)
    c = later(b, c)
    whole, first, second = c - a, b - a, c - b
    for name in NUMBERS:
        n = getattr(whole, name)
        if name in GAUGES:
            assert n == getattr(c, name) == getattr(second, name) and whole.at_start[name] == getattr(a, name)
            assert second.at_start[name] == getattr(first, name) == getattr(b, name)
        else:
            assert n == getattr(first, name) + getattr(second, name) == getattr(c, name) - getattr(a, name)
    assert whole.demand_waits == first.demand_waits + second.demand_waits
    for error in ERRORS:
        assert whole.errors[error] == first.errors[error] + second.errors[error]
    assert whole.layers[3]["hits"] == c.layers[3]["hits"] - a.layers[3]["hits"]


def test_nothing_of_a_snapshot_can_be_changed(seen):
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen.hits = 0
    for part in (seen.errors, seen.layers, seen.layers[0], seen.phases, seen.at_start, seen.read_errnos):
        with pytest.raises(TypeError):
            part["hits"] = 0
    with pytest.raises(TypeError):
        seen.demand_wait_buckets[0] = 1
    given_away = {"hits": 1}
    kept = Stats(layers={0: given_away})
    given_away["hits"] = 2
    assert kept.layers == {0: {"hits": 1}}


def test_a_snapshot_is_a_value(seen):
    twins = copy.deepcopy(seen), pickle.loads(pickle.dumps(seen)), dataclasses.replace(seen)
    assert all(twin == seen and hash(twin) == hash(seen) for twin in twins)
    assert len({seen, *twins, Stats()}) == 2 and seen - seen != seen
    assert hash(Counts({1: 2, 3: 4})) == hash(Counts({3: 4, 1: 2})) and Counts({1: 2}) == {1: 2} != Counts({1: 3})


def test_every_figure_is_explained_in_words_of_its_own(seen):
    lines = dict(line.split(": ", 1) for line in seen.explain().splitlines())
    names = {*(f.name for f in dataclasses.fields(Stats)), *DERIVED, *(f"  errors[{name!r}]" for name in ERRORS)}
    assert lines.keys() == names and all(len(text) > 10 for text in lines.values())
    assert len(set(lines.values())) == len(lines)
    assert all(lines[name].startswith("gauge: ") == (name in GAUGES) for name in NUMBERS)
    public = {name for name, member in vars(Stats).items() if isinstance(member, property)}
    assert public == set(DERIVED)


def test_json_has_everything_and_nothing_but_plain_values(seen):
    plain = json.loads(seen.to_json(indent=2))
    assert plain["phases"]["decode"]["layers"]["0"]["hits"] == 1 and plain["layers"]["1"]["prefetch_loads"] == 2
    assert {name: plain[name] for name in (*NUMBERS, *DERIVED)} == {
        name: getattr(seen, name) for name in (*NUMBERS, *DERIVED)
    }
    assert plain["errors"] == dict.fromkeys(ERRORS, 0) and sum(plain["demand_wait_buckets"]) == 1
    assert plain.keys() == {*(f.name for f in dataclasses.fields(Stats)), *DERIVED} - {"window"}
    assert Stats().to_dict().keys() == plain.keys() - {"layers", "phases"}


def test_people_read_a_short_table(seen):
    rows = dict(line.split(maxsplit=1) if line[12] == " " else (line, "") for line in str(seen).splitlines()[:1])
    assert rows["requests"] == "3: 2 hits, 0 joins, 1 misses"
    text = str(seen)
    for part in (
        "66.7%; 33.3% of the requests were reuses; 1 hits on what was held already",
        "29.3 KiB in 3 loads; ",
        "2 issued: 1 used, 0 late, 0 wasted, 1 unread",
        "1: mean ",
        "in decode    3 requests, 66.7% hits, 29.3 KiB read",
    ):
        assert part in text
    assert "in prefill" not in text and "errors" not in text and len(text.splitlines()) <= 9
    assert "3 short_read, 1 timeout" in str(Stats(errors={"timeout": 1, "short_read": 3}))
    assert str(Stats()).splitlines()[0].endswith("0: 0 hits, 0 joins, 0 misses")


def test_a_notebook_shows_the_same_table(seen):
    html = seen._repr_html_()
    assert html.startswith("<table><tr><th>requests</th><td>3: 2 hits") and html.count("<tr>") == len(
        str(seen).splitlines()
    )


def mismatch(later, earlier, says):
    with pytest.raises(fastcache.StatsMismatch, match=says) as caught:
        later - earlier
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, fastcache.FastcacheError)


@pytest.fixture
def store(disk):
    with fastcache.open(Experts(disk, layers_of(2, 12, 10_000)).source, "all", name="<two>") as store:
        yield store


def test_a_difference_across_a_reset_is_refused_and_one_after_it_counts(store):
    store.acquire_many(0, [1, 2])
    before = store.stats(phases=True)
    store.reset_stats()
    fresh = store.stats()
    store.acquire(1, 1)
    mismatch(store.stats(phases=True), before, r"reset_stats\(\) came between")
    mismatch(before, store.stats(), r"reset_stats\(\) came between")
    assert (store.stats() - fresh).requests == 1
    store.reset_stats()  # nothing has happened since: still another moment
    mismatch(store.stats(), fresh, "different moments")


def test_a_difference_is_of_one_store(store):
    store.acquire(0, 1)
    other = store.reopen()
    with other:
        before = other.stats()
        mismatch(store.stats(), before, "two stores")
        other.acquire_many(0, [1, 2])
        mismatch(other.stats(), store.stats(), "two stores")
        assert (other.stats() - pickle.loads(pickle.dumps(before))).requests == 2  # a copy is the same store's


def test_a_difference_the_wrong_way_round_is_refused_even_when_nothing_happened(store):
    first, second = store.stats(), store.stats()
    assert (second - first).requests == (first - first).requests == 0
    mismatch(first, second, "wrong way round")
    mismatch(Stats(requests=1), Stats(requests=3), "requests would be -2: 3 before, 1 after")  # made by hand


def test_a_difference_is_of_one_phase(store):
    before = store.stats(phases=True)
    with store.phase("decode"):
        store.acquire(0, 1)
    phases = store.stats(phases=True).phases
    mismatch(phases["decode"], phases["prefill"], "two phases")
    assert (phases["decode"] - before.phases["decode"]).requests == 1


def test_differences_of_one_beginning_are_subtracted_and_others_refused(store):
    start = store.stats()
    store.acquire(0, 1)
    middle = store.stats()
    store.acquire_many(0, [2, 3])
    end = store.stats()
    assert ((end - start) - (middle - start)).requests == (end - middle).requests == 2
    mismatch(end, middle - start, "different moments")
    mismatch(end - start, end - middle, "different moments")
