"""Counters add up, by layer and by phase, while threads ask, guess, cancel, give up, reset and change the phase."""

import contextlib
import random
import threading
import time

import pytest
from rig import Experts, assert_flows, assert_identities, layers_of, until

import fastcache

NBYTES = 10_000


class Storm:
    """Threads that ask, guess, cancel, give up and change the phase, with a small limit on pass-through."""

    def __init__(self, store, seed):
        self.store, self.seed, self.failures = store, seed, []

    def run(self, rounds):
        threads = [threading.Thread(target=self.work, args=(number, rounds)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            s = self.store.stats(layers=True, phases=True)
            for part in (s, *s.phases.values()):
                assert_flows(part)
        for thread in threads:
            thread.join()
        assert not self.failures, self.failures

    def work(self, number, rounds):
        rng = random.Random(self.seed * 10 + number)
        try:
            for _ in range(rounds):
                with (
                    self.store.phase(rng.choice(["prefill", "decode", None])),
                    contextlib.suppress(
                        fastcache.ReadTimeout, fastcache.BatchFailed, fastcache.ReadFailed, fastcache.OverflowLimit
                    ),
                ):
                    self.step(rng)
        except BaseException as error:
            self.failures.append(error)

    def step(self, rng):
        store, layer, some = self.store, rng.randrange(2), rng.sample(range(12), rng.randrange(1, 5))
        action = rng.randrange(7)
        if action < 2:
            store.acquire(layer, some[0], timeout=rng.choice([None, 0]))
        elif action == 2:
            store.acquire_many(layer, some, timeout=rng.choice([None, None, 1e-4]))
        elif action == 3:
            for _ in store.as_ready(layer, some):
                if rng.random() < 0.2:
                    break
        elif action == 4:
            handle = store.prefetch(layer, some)
            if rng.random() < 0.5:
                handle.cancel()
        elif action == 5 and rng.random() < 0.1:
            store.reset_stats()
        else:
            store.stats()


def storm(disk, engine, slots, rounds):
    mine = Experts(disk, layers_of(2, 12, NBYTES))
    with fastcache.open(mine.source, "all", engine=engine) as probe:
        slot_bytes = probe.describe()["slot_bytes"]
    with fastcache.open(mine.source, slots * slot_bytes, engine=engine, overflow=3 * slot_bytes, chunk=4096) as store:
        Storm(store, slots).run(rounds)
        until(lambda: not any(getattr(store.stats(), name) for name in ("misses_in_flight", "prefetch_in_flight")))
        until(lambda: not store.stats().reads_in_flight)
        assert_identities(store)
        assert store._check() == 0
        lifetime = store._counters(False, True)[2]
        assert all(values["requests"] > 0 for values, _ in lifetime.values())


@pytest.mark.parametrize("slots", [0, 3, 8])
def test_everything_adds_up_by_layer_and_phase_while_everything_happens(disk, engine, slots):
    storm(disk, engine, slots, rounds=150)


@pytest.mark.stress
@pytest.mark.parametrize("slots", [0, 3, 8])
def test_everything_adds_up_for_long(disk, engine, slots, stress_seconds):
    end = time.monotonic() + stress_seconds / 6
    while time.monotonic() < end:
        storm(disk, engine, slots, rounds=150)
