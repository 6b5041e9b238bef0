"""Recording, switching, warming, waves, cancelled guesses, reports and closing at once: bytes and counters hold."""

import contextlib
import random
import threading
import time

import pytest
from rig import PATIENCE, Experts, assert_flows, assert_identities, layers_of, until

import fastcache
from fastcache.traces import read_trace, replay_exact
from fastcache_ext.policy import NAMES
from fastcache_ext.watch import switch

LAYERS, EXPERTS, NBYTES = 3, 16, 30_000
SHUT = (fastcache.StoreClosed, fastcache.BudgetTooSmall, fastcache.errors.RecordingError)


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(LAYERS, EXPERTS, NBYTES), parts=3, top_k=4)


class Everything:
    """Four threads that call everything, on a store that is closed and opened again under them."""

    def __init__(self, experts, directory, engine, seconds, seed):
        self.experts, self.directory, self.engine, self.seed = experts, directory, engine, seed
        self.end = time.monotonic() + seconds
        self.failures, self.served, self.replayed, self.stores = [], 0, 0, 0
        self.store = self.open()

    def open(self):
        """Open a store that is recorded from its first request on, until something stops that."""
        self.stores += 1
        store = fastcache.open(
            self.experts.source,
            6 * 32768,
            policy="auto",
            engine=self.engine,
            chunk=4096,
            guess_bytes=8 * 4096,
            speculation="always",
            mlock="off",
            overflow=4 * 32768,
            timeout=PATIENCE,
        )
        self.path = self.directory / f"trace-{self.seed}-{self.stores}"
        self.recording = store.record(self.path)
        return store

    def run(self):
        threads = [threading.Thread(target=self.work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        rng = random.Random(self.seed)
        while time.monotonic() < self.end and not self.failures:
            time.sleep(0.05)  # lets the others work: nothing waits for it
            switch(self.store, rng.choice(sorted(NAMES)))
            assert self.store._check() == 0
            for part in self.store.stats(layers=True, phases=True).phases.values():
                assert_flows(part)
            if rng.random() < 0.3:
                self.change(self.open)
        for thread in threads:
            thread.join(PATIENCE + 10)
            assert not thread.is_alive(), "deadlock"
        if self.failures:
            raise self.failures[0]
        self.change(lambda: None)
        assert self.served > 20 and self.replayed > 0

    def change(self, make):
        """Close the store, and hold what it counted and recorded to each other."""
        old, path, recording = self.store, self.path, self.recording
        new = make()
        if new is not None:
            self.store = new
        old.close()
        until(lambda: old.stats().reads_in_flight == 0)
        assert_identities(old)
        read_trace(path)
        if recording.exact:
            again = replay_exact(path)
            assert again.same, again
            self.replayed += 1

    def work(self, n):
        rng = random.Random(f"{self.seed} {n}")
        try:
            while time.monotonic() < self.end and not self.failures:
                with contextlib.suppress(fastcache.ReadTimeout, fastcache.OverflowLimit, *SHUT):
                    try:
                        self.step(self.store, rng)
                    except fastcache.BatchFailed as error:
                        _, others = error.split((fastcache.OverflowLimit, *SHUT))
                        if others is not None:
                            raise others from None
        except BaseException as error:
            self.failures.append(error)

    def look(self, layer, expert, lease):
        assert self.experts.right((layer, expert), lease), (layer, expert)
        self.served += 1

    def step(self, store, rng):
        layer, some = rng.randrange(LAYERS), rng.sample(range(EXPERTS), rng.randrange(1, 5))
        action = rng.randrange(12)
        if action < 2:
            for expert, lease in zip(some, store.acquire_many(layer, some), strict=True):
                self.look(layer, expert, lease)
        elif action == 2:
            for wave in store.waves(layer, range(EXPERTS)):
                for expert, lease in store.as_ready(layer, wave):
                    self.look(layer, expert, lease)
        elif action < 7:  # a storm
            guesses = range(rng.randrange(1, 4))
            handles = [store.prefetch(rng.randrange(LAYERS), some, predictor=f"p{i}") for i in guesses]
            for handle in handles[rng.randrange(2) :]:
                handle.cancel()
            if rng.random() < 0.5:
                self.look(layer, some[0], store.acquire(layer, some[0]))
        elif action == 7:
            store.warm([(layer, expert) for expert in some] if rng.random() < 0.5 else None)
        elif action == 8:
            store.acquire_many(layer, some, timeout=rng.choice([0, 1e-4]))
        elif action == 9:
            with store.phase(rng.choice(["prefill", "decode"])):
                store.mark_token()
                self.look(layer, some[0], store[layer, some[0]])
        elif action == 10:
            store.describe()
            store.mrc()
        elif rng.random() < 0.2:
            store.reset_stats()
        else:
            assert self.recording.records >= 0


def test_everything_holds_at_once(experts, tmp_path, engine):
    Everything(experts, tmp_path, engine, 1.5, 1).run()


@pytest.mark.stress
def test_everything_holds_at_once_for_long(experts, tmp_path, engine, stress_seconds):
    Everything(experts, tmp_path, engine, stress_seconds / 2, time.time_ns()).run()


def test_a_store_may_be_asked_for_reports_while_it_is_closed(experts, engine):
    """What a report looks at may be freed meanwhile: AddressSanitizer sees it."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        store, over = fastcache.open(experts.source, "all", engine=engine, mlock="off"), threading.Event()

        def look(store=store, over=over):
            while not over.is_set():
                assert store._speculation()["io"]["stops_asked"] >= 0

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        store.close()
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
