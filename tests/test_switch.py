"""Policies changed under way: the table's machine with switches at any moment, and stores switched while they serve."""

import os
import random
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from models import REFERENCES, History
from rig import Experts, assert_identities, layers_of, run_dry, scripted
from test_table import DEMAND, PREFETCH, Machine

import fastcache
from fastcache_ext.driven import Table
from fastcache_ext.policy import NAMES
from fastcache_ext.watch import check, switch


class Switching(Machine):
    """After a switch the new policy knows the residents by their last requests, and is held to its own rule."""

    @rule(policy=st.sampled_from(sorted(NAMES)))
    def switch(self, policy):
        order = sorted(self.slots.values(), key=lambda slot: slot.stamp)
        self.table.switch(policy, [slot.number for slot in order])
        self.policy, self.history = policy, History(self.history.sizes)
        self.reference = REFERENCES[policy](self.cls, self.size) if policy in REFERENCES else None
        for slot in order:
            slot.stamp = self.tick()
            if slot.origin == DEMAND or not slot.unread:
                self.history.request(self.layer[slot.key], slot.key)
                if self.reference:
                    self.reference.request(slot.key)
            if self.reference:
                self.reference.admit(slot.key)


TestSwitching = Switching.TestCase
TestSwitching.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("after", sorted(NAMES))
@pytest.mark.parametrize("before", sorted(NAMES))
def test_a_slot_parked_by_the_old_policy_is_offered_by_the_new_one_after_its_release(before, after):
    table = Table([8], [0] * 8, [3], before)
    for key in range(3):
        table.request(key)
        slot, _ = table.reserve(key, DEMAND, DEMAND)
        table.publish(slot)
        table.read(slot)
        table.lease(slot)
    assert table.victim(0, DEMAND) == -1  # all met, all parked
    table.drop(table.slot_of(1))  # told, and not yet drained
    table.switch(after, [table.slot_of(key) for key in range(3)])
    assert table.key_of(table.victim(0, DEMAND)) == 1
    table.drop(table.slot_of(0))
    table.lease(table.slot_of(1))
    assert table.key_of(table.victim(0, DEMAND)) == 0
    assert table.check() == 0


@pytest.mark.parametrize("after", sorted(NAMES))
def test_an_unread_guess_is_still_one_after_a_switch(after):
    table = Table([8], [0] * 8, [2], "lru")
    for key in range(2):
        table.publish(table.reserve(key, PREFETCH, PREFETCH)[0])
    table.switch(after, [table.slot_of(0), table.slot_of(1)])
    assert table.victim(0, PREFETCH) == -1
    assert table.key_of(table.victim(0, DEMAND)) == 0


@pytest.mark.parametrize("after", sorted(NAMES))
def test_a_switch_while_a_batch_is_read_gives_up_none_of_its_members(after, disk):
    experts = Experts(disk, layers_of(2, 8, 4096))
    with scripted(experts, slots=4, policy="lru") as (store, engine):
        first = store.prefetch(0, [0, 1])
        run_dry(engine)
        assert first.done()
        ready = store.as_ready(0, [0, 1, 2, 3])  # two hits leased, two reads begun
        engine.take()
        switch(store, after)
        with pytest.raises(fastcache.ReadTimeout):
            store.acquire(1, 5, timeout=0.0)
        run_dry(engine)
        held = dict(ready)
        assert sorted(held) == [0, 1, 2, 3]
        assert all(experts.right((0, expert), lease) for expert, lease in held.items())
        assert store.stats().evictions == 0


@pytest.mark.stress
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_no_wrong_bytes_under_switches_with_one_slot_more_than_a_batch(policy, disk, engine, stress_seconds):
    """Threads ask for batches of four in five slots and check every byte; another changes the policy all along."""
    experts = Experts(disk, layers_of(3, 12, 6000), parts=3)
    seconds = min(stress_seconds, 5.0)
    over, wrong = threading.Event(), []
    with fastcache.open(experts.source, budget=5 * 8192, policy=policy, engine=engine, mlock="off") as store:
        assert store.describe()["slots"] <= 5

        def ask(seed):
            rng = random.Random(seed)
            while not over.is_set():
                layer = rng.randrange(3)
                keys = rng.sample(range(12), 4)
                if rng.random() < 0.3:
                    store.prefetch(layer, rng.sample(range(12), 2))
                leases = store.acquire_many(layer, keys)
                wrong.extend(
                    key for key, lease in zip(keys, leases, strict=True) if not experts.right((layer, key), lease)
                )
                del leases

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        rng, names, switches = random.Random(9), sorted(NAMES), 0
        timer = threading.Timer(seconds, over.set)
        timer.start()
        while not over.is_set():
            switch(store, rng.choice(names))
            switches += 1
            assert store._check() == 0 and check(store) == 0
        for thread in threads:
            thread.join()
        assert not wrong and switches > 50
        store.prefetch(0, []).wait()
        assert_identities(store, quiet=False)


def test_a_switch_after_close_or_in_a_forked_child_is_refused(disk):
    experts = Experts(disk, layers_of(1, 4, 4096))
    store = fastcache.open(experts.source, budget="all", policy="auto")
    pid = os.fork()
    if pid == 0:
        try:
            switch(store, "lru")
        except fastcache.ForkedStore:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    store.close()
    with pytest.raises(fastcache.StoreClosed):
        switch(store, "lru")
