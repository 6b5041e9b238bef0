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


@given(snapshots, snapshots, snapshots)
def test_differences_chain_and_keep_both_ends_of_every_gauge(a, b, c):
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
    assert plain.keys() == {*(f.name for f in dataclasses.fields(Stats)), *DERIVED}
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
