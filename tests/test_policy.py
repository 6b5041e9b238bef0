"""The policies on long runs of what experts do: lru against an ordered dict, next_use its rule, others textbooks."""

import random
from collections import OrderedDict

import pytest
from models import REFERENCES, History

from fastcache_ext.driven import Table
from fastcache_ext.policy import NAMES

DEMAND, GUESS = 0, 1


class Cache:
    """A table whose loads land at once and whose leases end at once."""

    def __init__(self, policy, layers, experts, slots):
        self.experts, self.hits, self.evicted = experts, 0, []
        self.table = Table([experts] * layers, [0] * (layers * experts), [slots], policy)

    def ask(self, key):
        """Return whether `key` hit; what it evicted is the last of `evicted`."""
        table = self.table
        table.request(key)
        if table.slot_of(key) >= 0:
            self.hits += 1
            return True
        slot, evicted = table.reserve(key, DEMAND, DEMAND)
        table.publish(slot)
        table.read(slot)
        self.evicted.append(evicted.key if evicted else None)
        return False


def tokens(layers, experts, top_k, count, seed):
    """Yield keys as a decoder asks for them: layer after layer, some experts far more popular than others."""
    rng = random.Random(seed)
    favourites = [rng.sample(range(experts), experts) for _ in range(layers)]
    weights = [1 / (rank + 1) ** 1.2 for rank in range(experts)]
    for _ in range(count):
        for layer in range(layers):
            picked = set()
            while len(picked) < top_k:
                picked.update(rng.choices(favourites[layer], weights, k=1))
            for expert in sorted(picked):
                yield layer * experts + expert


def test_lru_is_an_ordered_dict():
    cache, model, rng = Cache("lru", 3, 40, 25), OrderedDict(), random.Random(4)
    for _ in range(20_000):
        key = min(int(rng.expovariate(0.05)), 119)
        assert cache.ask(key) == (key in model)
        if key in model:
            model.move_to_end(key)
            continue
        gone = model.popitem(last=False)[0] if len(model) == 25 else None
        assert cache.evicted[-1] == gone
        model[key] = True
    assert cache.table.check() == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 11, 37, 60])
@pytest.mark.parametrize("policy", REFERENCES)
def test_victims_are_those_of_the_textbook(policy, slots):
    layers, experts = 6, 16
    cache, model = Cache(policy, layers, experts, slots), REFERENCES[policy]([0] * (layers * experts), [slots])
    resident = set()
    for key in tokens(layers, experts, 3, 150, slots):
        hit = key in resident
        model.request(key)
        gone = model.victim(0, set(), set()) if not hit and len(resident) == slots else None
        assert cache.ask(key) == hit
        if hit:
            continue
        assert cache.evicted[-1] == gone
        if gone is not None:
            model.forget(gone, True)
            resident.remove(gone)
        model.admit(key)
        resident.add(key)
    assert len(resident) == slots and cache.table.check() == 0


@pytest.mark.parametrize("policy", REFERENCES)
def test_a_guess_that_is_then_asked_for_is_what_a_miss_would_have_been(policy):
    """Prefetching changes what is resident when, not what a policy thinks of an expert that was asked for once."""
    victims = []
    for guessed in (False, True):
        table = Table([40], [0] * 40, [20], policy)
        for key in range(20):
            if not guessed:
                table.request(key)
            slot, _ = table.reserve(key, int(guessed), int(guessed))
            table.publish(slot)
            if guessed:
                table.request(key)
            table.read(slot)
            for _ in range(key % 3):
                table.request(key)
        victims.append([])
        for key in range(20, 35):
            table.request(key)
            slot, evicted = table.reserve(key, DEMAND, DEMAND)
            table.publish(slot)
            table.read(slot)
            victims[-1].append(evicted.key)
    assert victims[0] == victims[1]


def test_lfu_forgets_what_was_popular_long_ago():
    cache = Cache("lfu", 1, 8, 4)
    for _ in range(500):
        cache.ask(0)
    for _ in range(20):
        for key in range(1, 6):
            cache.ask(key)
    assert cache.table.slot_of(0) < 0


def test_sieve_gives_up_a_search_among_unread_guesses_and_goes_on_from_there():
    table = Table([200], [0] * 200, [150], "sieve")
    for key in range(150):
        slot, _ = table.reserve(key, GUESS, GUESS)
        table.publish(slot)
    table.read(table.slot_of(100))
    assert table.victim(0, GUESS) == -1
    assert table.key_of(table.victim(0, GUESS)) == 100


def apart(layers, experts, top_k, count, seed):
    """The same, but half of the layers is left at half time, and now and then one is visited twice in a row."""
    rng, keys = random.Random(seed), list(tokens(layers, experts, top_k, count, seed))
    for at in range(0, len(keys), top_k):
        layer = keys[at] // experts
        if at > len(keys) // 2 and layer > layers // 2:
            continue
        for _ in range(1 + (rng.random() < 0.3)):
            yield from keys[at : at + top_k]


@pytest.mark.parametrize("traffic", [tokens, apart])
@pytest.mark.parametrize("seed", range(3))
def test_next_use_evicts_whose_next_use_is_expected_latest(seed, traffic):
    layers, experts, slots = 5, 12, 23
    cache, history, resident = Cache("next_use", layers, experts, slots), History([experts] * layers), set()
    for key in traffic(layers, experts, 3, 120, seed):
        history.request(key // experts, key)
        if cache.ask(key):
            continue
        gone = cache.evicted[-1]
        if gone is not None:
            far = {each: history.distance(each // experts, each) for each in resident}
            assert far[gone] >= max(far.values()) * (1 - 1e-5), (gone, far)
            resident.remove(gone)
            history.forget(gone // experts, gone)
        resident.add(key)
    assert len(resident) == slots and cache.table.check() == 0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_next_use_beats_lru_below_one_tokens_working_set(share):
    layers, experts, top_k = 12, 32, 4
    slots, hits = int(layers * top_k * share), {}
    for policy in ("lru", "next_use"):
        cache = Cache(policy, layers, experts, slots)
        for key in tokens(layers, experts, top_k, 200, 7):
            cache.ask(key)
        hits[policy] = cache.hits
    assert hits["lru"] < 0.02 * 200 * layers * top_k  # a cycle larger than the cache: lru throws out what comes next
    assert hits["next_use"] > 0.1 * 200 * layers * top_k


def test_a_run_longer_than_any_memory_of_the_averages_still_ranks():
    """Decay is looked up in tables that end; beyond their end a pick counts as nothing."""
    cache = Cache("next_use", 2, 4, 5)
    for key in (0, 4, 5):  # then expert 0 of layer 0, and 0 and 1 of layer 1, are never asked for again
        cache.ask(key)
    for _ in range(3_000):
        for key in (1, 2, 6):
            cache.ask(key)
    assert {cache.table.slot_of(key) >= 0 for key in (1, 2, 6)} == {True}
    cache.ask(3)
    assert cache.evicted[-1] in (0, 4, 5)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("read", [0, 1, 150, 299])
def test_a_guess_never_takes_an_unread_load_however_many_there_are(policy, read):
    """One slot of 300 has been read, somewhere in the order: a guess takes that one or none, a demand the oldest."""
    table = Table([400], [0] * 400, [300], policy)
    for key in range(300):
        slot, _ = table.reserve(key, GUESS, GUESS)
        table.publish(slot)
    assert table.victim(0, GUESS) == -1
    table.read(table.slot_of(read))
    table.request(390)  # another request: searches start afresh
    assert table.victim(0, GUESS) in (-1, table.slot_of(read))
    assert policy == "sieve" or table.key_of(table.victim(0, DEMAND)) == 0  # a hand does not go back
    assert table.check() == 0


@pytest.mark.parametrize("policy", NAMES)
def test_a_search_finds_the_one_free_slot_among_thousands_of_leased_ones(policy):
    n = 4_000
    table = Table([n + 1], [0] * (n + 1), [n], policy)
    for key in range(n):
        table.request(key)
        slot, _ = table.reserve(key, DEMAND, DEMAND)
        table.lease(slot)
        table.publish(slot)
        table.read(slot)
    assert table.victim(0, DEMAND) == -1
    for key in (2_500, 17, 3_999):
        table.drop(table.slot_of(key))
        assert table.key_of(table.victim(0, DEMAND)) == key
        table.lease(table.slot_of(key))
        assert table.victim(0, DEMAND) == -1
    assert table.check() == 0
