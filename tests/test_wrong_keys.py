"""Keys that are none: the error says what was given and what is wanted, and nothing is counted."""

import re

import numpy as np
import pytest
from rig import Experts, layers_of

import fastcache


@pytest.fixture(scope="module")
def store(disk):
    with fastcache.open(Experts(disk, layers_of(2, 4, 100)).source, "all") as store:
        yield store


PAIR = "give layer and expert, two integers, or an ExpertKey; got "
WRONG = {
    "a string": (lambda s: s["a"], "store[layer, expert], or store[ExpertKey(layer, expert)]; got 'a' (str)"),
    "a layer": (lambda s: s[3], "store[layer, expert], or store[ExpertKey(layer, expert)]; got 3 (int)"),
    "a slice": (lambda s: s[:], "got slice(None, None, None) (slice)"),
    "three": (lambda s: s[1, 2, 3], "store[layer, expert] takes two integers; got 3: (1, 2, 3) (tuple)"),
    "a float": (lambda s: s[1.5, 2], "layer must be an integer; got 1.5 (float)"),
    "an expert that is a float": (
        lambda s: s[1, np.float32(2)],
        "expert must be an integer; got np.float32(2.0) (float32)",
    ),
    "None": (lambda s: s[None, 1], "layer must be an integer; got None (NoneType)"),
    "no expert": (lambda s: s[0, None], "expert must be an integer; got None (NoneType)"),
    "text": (lambda s: s["model.layers.0", 1], "layer must be an integer; got 'model.layers.0' (str)"),
    "several": (
        lambda s: s[0, [1, 2]],
        "expert must be an integer; got [1, 2] (list); acquire_many(layer, experts) takes several",
    ),
    "a part": (lambda s: s[0, 1:3], "(slice); acquire_many(layer, experts) takes several"),
    "an array": (lambda s: s[0, np.arange(3)], "(ndarray); acquire_many(layer, experts) takes several"),
    "much": (lambda s: s[0, "x" * 10_000], "expert must be an integer; got 'xxxxxxxxxxxx...xxxxxxxxxxxxx' (str)"),
    "acquire(None)": (lambda s: s.acquire(None), PAIR + "None (NoneType)"),
    "acquire(3)": (lambda s: s.acquire(3), PAIR + "3 (int)"),
    "acquire('ab')": (lambda s: s.acquire("ab"), PAIR + "'ab' (str)"),
    "acquire of three": (lambda s: s.acquire((1, 2, 3)), PAIR + "3 in (1, 2, 3) (tuple)"),
    "acquire of text": (lambda s: s.acquire("a", "b"), "layer must be an integer; got 'a' (str)"),
    "is_resident": (lambda s: s.is_resident(1), PAIR + "1 (int)"),
    "expert_nbytes": (lambda s: s.expert_nbytes(None), PAIR + "None (NoneType)"),
    "expert_nbytes of a float": (lambda s: s.expert_nbytes(0, 1.0), "expert must be an integer; got 1.0 (float)"),
    "acquire_many of a layer": (
        lambda s: s.acquire_many(1),
        "say which experts: (layer, experts), store.experts(layer) for all of them, or ExpertKeys; got 1 (int) alone",
    ),
    "acquire_many of nothing": (lambda s: s.acquire_many(None), "got None (NoneType) alone"),
    "acquire_many of integers": (lambda s: s.acquire_many([1, 2, 3]), PAIR + "1 (int)"),
    "acquire_many of text": (lambda s: s.acquire_many(0, "12"), "experts must be integers; got '12' (str)"),
    "acquire_many of an object": (
        lambda s: s.acquire_many(0, 1.0),
        "experts must be one integer or several; got 1.0 (float)",
    ),
    "acquire_many of a mask": (
        lambda s: s.acquire_many(0, np.ones(4, bool)),
        "(ndarray); np.flatnonzero(mask) for a mask",
    ),
    "as_ready": (lambda s: s.as_ready(0, [1, None]), "expert must be an integer; got None (NoneType)"),
    "prefetch": (lambda s: s.prefetch("a", [1]), "layer must be an integer; got 'a' (str)"),
    "pin": (lambda s: s.pin([(0, "1")]), "expert must be an integer; got '1' (str)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_key_that_is_none_is_shown_with_its_type_and_what_is_wanted(store, case):
    call, message = WRONG[case]
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        call(store)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    assert store.stats().requests == store.stats().prefetch_issued == 0


def test_an_error_of_a_keys_own_passes_through(store):
    class Broken:
        def __init__(self, error):
            self.error = error

        def __index__(self):
            raise self.error

    for error in (ValueError("mine"), KeyboardInterrupt(), RuntimeError("mine")):
        for call in (lambda key: store[key, 0], lambda key: store[0, key], lambda key: store.acquire_many(0, [key])):
            with pytest.raises(type(error)) as caught:
                call(Broken(error))
            assert caught.value is error


def test_minus_one_and_numbers_beyond_the_machine_are_unknown_experts(store):
    for key in ((-1, 0), (0, -1), (0, 10**30), (-(10**30), 0)):
        with pytest.raises(fastcache.UnknownExpert):
            store[key]
        assert key not in store
    assert ((0, 1), None) not in store and (0, 1) in store


class Pairs:
    """A sequence by __getitem__ alone."""

    def __getitem__(self, i):
        return [1, 2][i]


def test_old_style_sequences_still_are_experts(store):
    assert [lease.key for lease in store.acquire_many(0, Pairs())] == [(0, 1), (0, 2)]
    store.reset_stats()
