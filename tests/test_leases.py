"""What a lease promises: what release() ends, what is refused, and that every hold ends, wherever it does."""

import copy
import ctypes
import gc
import itertools
import pickle
import random
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import moe_dir, qwen, split_experts, st, tensor
from rig import Experts, assert_identities, expert_bytes, held, layers_of

import fastcache


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 8, 9_000), top_k=2)


@pytest.fixture(scope="module")
def slot_bytes(experts):
    with fastcache.open(experts.source, "all", engine="pread") as store:
        return store.describe()["slot_bytes"]


@pytest.fixture
def store(experts, slot_bytes, engine):
    """Three slots over sixteen experts; at the end nothing may be held."""
    with fastcache.open(experts.source, 3 * slot_bytes, engine=engine) as opened:
        yield opened
        gc.collect()
        told = opened.describe()
        assert held(opened) == told["leased_slots"] == 0 and told["overflow_bytes"] == 0
        assert opened._check() == 0
    assert_identities(opened)


def evict_all(store):
    for layer, expert in itertools.product(range(2), range(8)):
        store.acquire(layer, expert).release()


# ---- release


def test_arrays_outlive_release_and_new_ones_are_refused(store, experts):
    with store[0, 3] as lease:
        array = lease["data"]
    evict_all(store)
    assert array.tobytes() == expert_bytes(0, 3, 9_000)
    for use in (
        lambda: lease["data"],
        lambda: lease.get("data"),
        lease.values,
        lease.items,
        lease.copy,
        lease.__enter__,
        lambda: memoryview(lease),
    ):
        with pytest.raises(fastcache.LeaseReleased, match="layer 0 expert 3 was released; acquire"):
            use()
    assert issubclass(fastcache.LeaseReleased, RuntimeError)
    assert list(lease) == ["data"] and lease.key == (0, 3) and "released" in repr(lease) and lease.nbytes == 9_000
    del array
    assert held(store) == 0
    lease.release()


def test_release_ends_the_hold_at_once_when_nothing_was_exported(store):
    lease = store[0, 3]
    assert held(store) == 1
    lease["data"].sum()
    lease.release()
    assert held(store) == 0


def test_a_lease_that_exported_itself_holds_until_it_goes(store):
    lease = store[0, 3]
    array = np.ndarray((9_000,), np.uint8, buffer=lease)  # gives the export back at once, and keeps the object
    lease.release()
    assert held(store) == 1
    evict_all(store)
    assert array.tobytes() == expert_bytes(0, 3, 9_000)
    del array
    assert held(store) == 1
    del lease
    assert held(store) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_of_several_holds_counts(store, order):
    leases = [store[0, 3], *store.acquire_many(0, [3, 3])]
    for n in order:
        assert held(store) == 1
        leases[n].release()
    assert held(store) == 0


def test_leases_of_a_batch_are_released_together(store):
    with store.acquire_many(0, [1, 2, 1]) as leases:
        assert isinstance(leases, list) and [lease.key.expert for lease in leases] == [1, 2, 1]
        array = leases[0]["data"]
        assert held(store) == 2
    assert held(store) == 1
    del array
    assert held(store) == 0


# ---- what a lease shows


def test_nothing_can_be_written(store, experts):
    lease = store[0, 3]
    array = lease["data"]
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    with pytest.raises((BufferError, TypeError)):
        (ctypes.c_char * 9_000).from_buffer(lease)
    with pytest.raises((BufferError, TypeError)), open("/dev/zero", "rb", buffering=0) as zero:
        zero.readinto(lease)
    assert memoryview(lease).readonly
    assert experts.right((0, 3), lease)


def test_a_refused_export_leaves_no_hold(store):
    lease = store[0, 3]
    for _ in range(3):
        with pytest.raises((BufferError, TypeError)), open("/dev/zero", "rb", buffering=0) as zero:
            zero.readinto(lease)
    lease.release()
    assert held(store) == 0
    lease = store[0, 3]
    with pytest.raises((BufferError, TypeError)):
        (ctypes.c_char * 9_000).from_buffer(lease)  # takes a read-only export first
    lease.release()
    assert held(store) == 1
    del lease
    assert held(store) == 0


def test_copies_are_owned_writable_and_hold_nothing(store):
    lease = store[0, 3]
    copies = lease.copy()
    lease.release()
    assert held(store) == 0
    evict_all(store)
    assert list(copies) == ["data"] and copies["data"].tobytes() == expert_bytes(0, 3, 9_000)
    copies["data"][0] ^= 1


def test_a_lease_is_a_mapping(store):
    lease = store[1, 2]
    assert list(lease) == list(lease.keys()) == ["data"] and len(lease) == 1
    assert "data" in lease and "gate" not in lease and lease.get("gate") is None and lease.get("gate", 7) == 7
    [(label, array)] = lease.items()
    assert label == "data" and np.array_equal(array, lease.values()[0])
    assert dict(lease)["data"].tobytes() == expert_bytes(1, 2, 9_000)
    assert lease.nbytes == 9_000 and lease.key == fastcache.ExpertKey(1, 2) and lease.contiguous
    with pytest.raises(KeyError, match="'gate' is no tensor of layer 1 expert 2; there are data"):
        lease["gate"]
    for odd in (0, None, ("gate",), []):
        with pytest.raises((KeyError, TypeError)):
            lease[odd]


def test_leases_are_equal_only_to_themselves(store):
    one, other = store[0, 1], store[0, 1]
    assert one == one and one != other and len({one, other}) == 2
    assert one["data"] is not one["data"]


def test_pickling_and_copying_say_what_to_do_instead(store, experts):
    lease = store[0, 3]
    for attempt in (lambda: pickle.dumps(lease), lambda: copy.copy(lease), lambda: copy.deepcopy(lease)):
        with pytest.raises(TypeError, match="ExpertLease cannot be pickled.*reopen"):
            attempt()
    with pytest.raises(TypeError, match="ExpertStore cannot be pickled.*reopen"):
        pickle.dumps(store)
    again = pickle.loads(pickle.dumps(lease["data"]))
    lease.release()
    assert held(store) == 0 and again.tobytes() == expert_bytes(0, 3, 9_000)


def test_an_expert_in_several_places_has_a_buffer_all_the_same(disk, engine):
    experts = Experts(disk, layers_of(1, 3, 5_000), parts=4)
    with fastcache.open(experts.source, "all", engine=engine) as store:
        lease = store[0, 1]
        assert not lease.contiguous and lease.nbytes == 5_000
        first, second = np.frombuffer(lease, np.uint8), np.frombuffer(lease, np.uint8)
        assert first.ctypes.data == second.ctypes.data  # one copy, counted once
        assert first.tobytes() == expert_bytes(0, 1, 5_000) and not first.flags.writeable
        assert b"".join(lease[f"data.{n}"].tobytes() for n in range(4)) == expert_bytes(0, 1, 5_000)


def test_encoded_and_fused_tensors_are_refused_by_their_plain_name_with_a_hint(disk, engine):
    packed = [
        tensor(f"model.layers.0.mlp.experts.{e}.{m}_proj.weight_{part}", "U8", shape, e, m, part)
        for e in range(2)
        for m in ("gate", "up", "down")
        for part, shape in (("packed", (32, 16)), ("scale", (32, 1)))
    ]
    path = moe_dir(disk / "encoded", [packed], qwen(2, 1))
    with fastcache.open(path, "all", engine=engine) as store:
        lease = store[0, 1]
        assert "gate.weight_packed" in lease and "gate" not in lease
        with pytest.raises(KeyError, match="fastcache.linear"):
            lease["gate"]


def test_every_tensor_is_aligned_for_its_dtype_wherever_the_file_has_it(disk, engine):
    entries = split_experts([0], 4, "F32", 9, 5)
    for pad in range(4):
        path = st(disk / f"odd-{pad}.safetensors", [("pad", "U8", (pad + 1,), b"x" * (pad + 1)), *entries])
        with fastcache.open(path, "all", engine=engine) as store:
            for expert in range(4):
                lease = store[0, expert]
                for number, label in enumerate(("gate", "up", "down")):
                    array = lease[label]
                    assert (
                        array.ctypes.data % array.itemsize == 0 and array.tobytes() == entries[3 * expert + number][3]
                    )


# ---- generations


def test_no_generation_is_ever_used_twice(store):
    seen = {}
    for turn in range(3):
        for layer, expert in itertools.product(range(2), range(8)):
            lease = store[layer, expert]
            known = seen.setdefault(lease.generation, (layer, expert, turn))
            assert known[:2] == (layer, expert)
    generations = sorted(seen)
    assert len(generations) == store.stats().misses
    held_open = [store[0, e] for e in range(8)]  # pass-through has generations of its own
    assert len({lease.generation for lease in held_open}) == 8 and min(lease.generation for lease in held_open) > 0


def work(array):
    return int(array.astype(np.int64) @ np.arange(array.size))


@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_data_derived_by_key_and_generation_is_never_another_experts(disk, engine, slots):
    """A consumer that caches what it made of a residency. By address it would be wrong within a few turns."""
    experts = Experts(disk, layers_of(2, 8, 8_192), gap=0)  # all at the same place in a slot
    rng, derived, by_address, mistakes = random.Random(0), {}, {}, 0
    with fastcache.open(experts.source, slots * 8_192, engine=engine) as store:
        for _ in range(600):
            key = rng.randrange(2), rng.randrange(8)
            lease = store[key]
            array = lease["data"]
            name = (lease.key, lease.generation)
            if name not in derived:
                derived[name] = work(array)
            right = work(np.frombuffer(expert_bytes(*key, 8_192), np.uint8))
            assert derived[name] == right
            mistakes += by_address.setdefault(array.ctypes.data, right) != right
        assert mistakes > 0  # the consumer that this is about


# ---- the end of a hold


def test_leases_outlive_the_store_and_their_memory_goes_with_the_last(experts, slot_bytes, engine):
    store = fastcache.open(experts.source, 2 * slot_bytes, engine=engine)
    leases = store.acquire_many(0, [0, 1, 2, 3])  # two in slots, two passed through
    address = leases[0]["data"].ctypes.data
    store.close()
    del store
    gc.collect()
    assert all(experts.right(lease.key, lease) for lease in leases)
    assert leases[1]["data"].tobytes() == expert_bytes(0, 1, 9_000)
    assert mapped(address)
    del leases
    assert not mapped(address)


def mapped(address):
    with open("/proc/self/maps") as maps:
        spans = (line.split()[0].split("-") for line in maps)
        return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_a_hold_ends_in_a_garbage_cycle(store):
    class Node:
        pass

    for make in (lambda lease: lease, lambda lease: lease["data"], memoryview):
        node = Node()
        node.itself, node.view = node, make(store[0, 3])
        del node
        assert held(store) <= 1
        gc.collect()
        assert held(store) == 0


def test_a_hold_ends_in_another_thread(store):
    views = [store[0, e]["data"] for e in range(3)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(views.clear).result()
    assert held(store) == 0


def test_a_hold_ends_in_a_signal_handler_while_this_thread_asks_for_more(store):
    kept, ended = [], 0

    def let_go(*_):
        nonlocal ended
        ended += len(kept)
        kept.clear()

    was = signal.signal(signal.SIGALRM, let_go)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for n in range(3_000):
            kept.append(store[n % 2, n % 3])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
    assert ended > 0
    kept.clear()


def test_a_hold_ends_in_a_destructor_and_in_a_weakref_callback(store):
    class Owner:
        def __init__(self, view):
            self.view = view

        def __del__(self):
            self.view = None
            store.acquire(1, 1).release()  # and asks the store, from there

    owner = Owner(store[0, 3]["data"])
    bag = [store[0, 4]]
    watch = weakref.ref(owner, lambda _: bag.clear())
    del owner
    assert watch() is None and held(store) == 0


def test_threads_that_share_and_drop_views_leave_no_hold(store):
    def work(seed):
        rng, kept = random.Random(seed), []
        for _ in range(400):
            lease = store[0, rng.randrange(4)]
            kept.append(rng.choice([lease, lease["data"], lease["data"][5:], memoryview(lease)]))
            if len(kept) > 3:
                del kept[rng.randrange(len(kept))]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held(store) == 0
