"""Predictors: what they name, how they are scored; and a hot list that outlives its process, for one checkpoint."""

import json
import os

import numpy as np
import pytest
from rig import Experts, layers_of

import fastcache
from fastcache.errors import CheckpointMismatch, HotListError
from fastcache.predictors import HotList, NullPredictor, PreviousToken, RouterLookahead, Tally

H = np.zeros((1, 4), np.float32)


def routed(*rows):
    return np.array(rows, np.int64)


def test_the_null_predictor_says_nothing_and_has_no_tally():
    nothing = NullPredictor()
    nothing.observe(0, routed([1, 2]))
    assert not nothing.predict(1, H) and nothing.stats() == Tally()
    assert (nothing.stats().recall, nothing.stats().precision) == (0.0, 0.0)


def test_previous_token_repeats_the_last_token_of_the_layer():
    previous = PreviousToken()
    assert not previous.predict(3, None)
    previous.observe(3, routed([1, 2], [4, 7]))
    previous.observe(4, routed([5, 6]))
    assert list(previous.predict(3, None)) == [4, 7]
    previous.observe(3, routed([7, 1]))
    assert previous.stats() == Tally(layers=1, predicted=2, routed=2, right=1)


def test_a_tally_counts_what_was_said_last_and_only_layers_that_were_predicted():
    look = RouterLookahead(n=3)
    look.add_router(1, lambda hidden, n: [9, 8, 7][:n], 2)
    look.observe(1, routed([9, 8]))  # nobody had said anything
    assert look.stats().layers == 0
    look.predict(1, H)
    look.predict(1, H)
    look.observe(1, routed([7, 5]))
    look.observe(1, routed([7, 5]))
    assert look.stats() == Tally(1, 3, 2, 1)
    assert look.stats().recall == 0.5 and look.stats().precision == pytest.approx(1 / 3)


def test_a_router_is_asked_for_as_many_as_it_chooses_and_not_before_the_token_begins():
    look = RouterLookahead()
    look.add_router(1, lambda hidden, n: list(range(n)), 2)
    assert list(look.predict(1, H)) == [0, 1]
    assert not look.predict(1, None) and not look.predict(2, H)


# --- the hot list


def test_the_hottest_come_first_and_heat_fades_by_its_half_life():
    hot = HotList("f", half_life=2)
    hot.observe(0, routed([3, 5]))
    hot.observe(0, routed([5, 4]))
    hot.observe(1, routed([0, 0 + 1]))
    fade = 0.5**0.5
    assert hot.predict(0, None) == [5, 4, 3]
    np.testing.assert_allclose(hot._heat[0][[3, 4, 5]], [fade, 1, 1 + fade])
    assert list(hot) == [(0, 5), (0, 4), (1, 0), (1, 1), (0, 3)] and len(hot) == 5
    for _ in range(20):
        hot.observe(0, routed([9, 8]))
    assert hot.predict(0, None)[:2] == [8, 9]


def test_a_prompt_counts_like_its_tokens_one_by_one():
    at_once, one_by_one = HotList("f", half_life=3), HotList("f", half_life=3)
    rows = np.random.default_rng(2).integers(0, 20, (17, 4))
    at_once.observe(0, rows)
    for row in rows:
        one_by_one.observe(0, row[np.newaxis])
    np.testing.assert_allclose(at_once._heat[0], one_by_one._heat[0])


def test_it_is_saved_whole_and_loaded_the_same(tmp_path):
    hot = HotList("abc", half_life=5, n=3)
    hot.observe(2, routed([3, 5], [5, 1]))
    path = tmp_path / "hot.json"
    HotList("older").save(path)
    hot.save(path)
    assert os.listdir(tmp_path) == ["hot.json"]
    again = HotList.load(path, "abc")
    assert list(again) == list(hot) and again.predict(2, None) == hot.predict(2, None)
    assert (again.half_life, again.n, again.fingerprint) == (5.0, 3, "abc")


def test_another_checkpoints_list_is_refused(tmp_path):
    HotList("abc").save(tmp_path / "hot.json")
    with pytest.raises(CheckpointMismatch, match=r"hot\.json.*another checkpoint.*abc.*xyz"):
        HotList.load(tmp_path / "hot.json", "xyz")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "fastcache hot list 9"}', "null", '{"format": "fastcache hot list 1"}'],
)
def test_what_is_no_hot_list_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "hot.json"
    path.write_text(text)
    with pytest.raises(HotListError, match=r"hot\.json: no hot list"):
        HotList.load(path, "abc")


def test_a_list_with_heat_that_is_no_number_is_refused(tmp_path):
    HotList("abc").save(tmp_path / "hot.json")
    found = json.loads((tmp_path / "hot.json").read_text())
    for heat in ({"0": [float("nan")]}, {"0": [[1.0]]}, {"x": [1.0]}, {"0": ["hot"]}):
        (tmp_path / "hot.json").write_text(json.dumps(found | {"heat": heat}))
        with pytest.raises(HotListError, match="no hot list"):
            HotList.load(tmp_path / "hot.json", "abc")
    (tmp_path / "hot.json").write_text("[" * 100_000)
    with pytest.raises(HotListError, match="no hot list"):
        HotList.load(tmp_path / "hot.json", "abc")


def test_a_file_that_cannot_be_replaced_leaves_no_litter(tmp_path):
    (tmp_path / "hot.json").mkdir()
    with pytest.raises(OSError, match=r"hot\.json"):
        HotList("abc").save(tmp_path / "hot.json")
    assert os.listdir(tmp_path) == ["hot.json"]


def test_nothing_but_a_hot_list_is_replaced_by_one(tmp_path):
    model, pipe = tmp_path / "model.safetensors", tmp_path / "pipe"
    model.write_bytes(b"weights")
    os.mkfifo(pipe)
    for path, why in ((model, "no hot list"), (pipe, "no ordinary file"), ("/dev/full", "no ordinary file")):
        before = os.stat(path)
        with pytest.raises(FileExistsError, match=why):
            HotList("abc").save(path)
        assert (os.stat(path).st_mode, os.stat(path).st_ino) == (before.st_mode, before.st_ino)
    assert model.read_bytes() == b"weights" and sorted(os.listdir(tmp_path)) == ["model.safetensors", "pipe"]


def test_a_half_life_is_positive():
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="half_life"):
            HotList("abc", half_life=wrong)


def test_a_store_is_warmed_with_its_hot_list(disk):
    experts = Experts(disk, layers_of(2, 8, 9_000), gap=3_288)
    with fastcache.open(experts.source, budget=4 * 12_288) as store:
        hot = HotList(store.fingerprint)
        hot.observe(1, routed([7, 3]))
        store.hot_list = hot
        assert store.warm().loaded == 4
        assert [tuple(key) for key in store if store.is_resident(key)] == [(0, 0), (1, 0), (1, 3), (1, 7)]


@pytest.mark.parametrize("kind", [NullPredictor, PreviousToken, RouterLookahead, lambda: HotList("f")])
def test_experts_that_cannot_be_are_refused_where_they_are_observed(kind):
    predictor = kind()
    predictor.predict(0, None)
    before = predictor.stats()
    for layer, experts, says in ((0, [[1, -1]], "layer 0: no expert -1"), (-2, [[1]], "no layer -2")):
        with pytest.raises(fastcache.UnknownExpert, match=says):
            predictor.observe(layer, routed(*experts))
    for experts in ([[1.5, 2.0]], [[True, False]], [["1", "2"]], [[1, 2], [3]], [[[1]]], None, "ab", 1.5):
        with pytest.raises(TypeError, match="experts are integers"):
            predictor.observe(0, experts)
    with pytest.raises(TypeError, match="layer must be an integer"):
        predictor.observe("0", [[1]])
    assert predictor.stats() == before and not predictor.predict(0, None)


def test_lists_are_observed_like_arrays_and_one_row_is_one_token():
    lists, arrays = HotList("f", half_life=3), HotList("f", half_life=3)
    previous = PreviousToken()
    lists.observe(0, [[3, 5], [5, 4]])
    lists.observe(0, [7, 5])
    lists.observe(0, [])
    arrays.observe(0, routed([3, 5], [5, 4]))
    arrays.observe(0, np.array([[7, 5]], np.uint8))
    np.testing.assert_array_equal(lists._heat[0], arrays._heat[0])
    previous.observe(0, [7, 5])
    assert previous.predict(0, None) == [7, 5]


def test_a_hot_list_of_a_store_takes_no_experts_that_the_store_has_not(disk, tmp_path):
    with fastcache.open(Experts(disk, layers_of(2, 8, 9_000)).source, budget=0) as store:
        hot = HotList(store)
        assert hot.fingerprint == store.fingerprint
        with pytest.raises(fastcache.UnknownExpert, match="layer 0: no expert 99: it has 8"):
            hot.observe(0, [[1, 99]])
        with pytest.raises(fastcache.UnknownExpert, match="layer 7 has no experts; those that have: 0, 1"):
            hot.observe(7, [[1]])
        assert not len(hot)
        hot.observe(1, [[7, 3]])
        hot.save(tmp_path / "hot.json")
        again = HotList.load(tmp_path / "hot.json", store)
        assert list(again) == list(hot) == [(1, 3), (1, 7)]
        with pytest.raises(fastcache.UnknownExpert, match="no expert 8"):
            again.observe(1, [[8]])
        found = json.loads((tmp_path / "hot.json").read_text())
        for heat in ({"0": [1.0] * 9}, {"2": [1.0]}, {"-1": []}):
            (tmp_path / "hot.json").write_text(json.dumps(found | {"heat": heat}))
            with pytest.raises(HotListError, match="a damaged hot list: .*(no expert|has no experts|no layer)"):
                HotList.load(tmp_path / "hot.json", store)
    with pytest.raises(TypeError, match="a hot list is of a store"):
        HotList(5)


def test_a_store_takes_no_hot_list_of_another_checkpoint_and_no_keys_that_it_has_not(disk):
    with fastcache.open(Experts(disk, layers_of(2, 8, 9_000)).source, "all") as store:
        mine = [(1, 7)]
        store.hot_list = mine
        with pytest.raises(
            CheckpointMismatch, match=f"hot_list: made with another checkpoint .*xyz.*{store.fingerprint}"
        ):
            store.hot_list = HotList("xyz")
        stray = HotList(store.fingerprint)
        stray.observe(0, [[99]])
        for foreign in (stray, [(0, 8)], [(5, 0)], [(0, -1)]):
            with pytest.raises(fastcache.UnknownExpert):
                store.hot_list = foreign
        assert store.hot_list is mine
        store.hot_list = iter(mine)
        assert store.hot_list == mine  # to be read again
        store.hot_list = None
        assert store.hot_list is None


# --- fingerprints


def test_a_fingerprint_knows_files_and_places_but_no_directory(disk):
    (disk / "a").mkdir()
    (disk / "b").mkdir()
    sizes = layers_of(2, 4, 5_000)
    first = Experts(disk / "a", sizes)

    def mark(path, ranges):
        with fastcache.open(fastcache.FileRangeSource(path, ranges), budget=0) as store:
            assert store.describe()["fingerprint"] == store.fingerprint
            return store.fingerprint

    here = mark(first.path, first.ranges)
    assert len(here) == 32 and here == mark(first.path, first.ranges)
    moved = disk / "b" / first.path.name
    moved.write_bytes(first.path.read_bytes())
    assert mark(moved, first.ranges) == here
    renamed = disk / "b" / "renamed.bin"
    renamed.write_bytes(first.path.read_bytes())
    longer = disk / "a" / "longer" / first.path.name
    longer.parent.mkdir()
    longer.write_bytes(first.path.read_bytes() + b"x")
    swapped = dict(first.ranges) | {(0, 0): first.ranges[0, 1], (0, 1): first.ranges[0, 0]}
    fewer = {key: where for key, where in first.ranges.items() if key != (1, 3)}
    others = {
        mark(renamed, first.ranges),
        mark(longer, first.ranges),
        mark(first.path, swapped),
        mark(first.path, fewer),
    }
    assert len(others) == 4 and here not in others
