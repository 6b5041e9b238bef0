"""The table and its policies against a short Python model, step by step, with `check()` after every one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import LEAST, REFERENCES, History

from fastcache_ext.driven import Table
from fastcache_ext.policy import NAMES

DEMAND, PREFETCH = 0, 1  # origins; and as modes: for a demand, for a guess
picks = st.integers(0, 10_000)  # an index into whatever there is, modulo its length


class Slot:
    def __init__(self, key, number, origin, stamp):
        self.key, self.number, self.origin, self.stamp = key, number, origin, stamp
        self.inflight, self.unread, self.leases = True, True, 1  # the read's own lease


class Machine(RuleBasedStateMachine):
    policy = "lru"

    @initialize(
        layers=st.lists(st.integers(1, 6), min_size=1, max_size=4),
        slots=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        traded=st.booleans(),
        data=st.data(),
    )
    def build(self, layers, slots, traded, data):
        count, slabs = sum(layers), None
        if traded:
            slots = [n // 2 for n in slots]
            own = data.draw(st.lists(st.integers(0, 2), min_size=len(slots), max_size=len(slots)))
            most = [min(n + data.draw(st.integers(0, 4)), sum(own)) for n in own]
            per = [data.draw(st.integers(1, 3)) for _ in own]
            least = [data.draw(st.integers(0, 2)) for _ in own]
            slabs = (4096 * max((c + 1) * n for c, n in enumerate(per)), own, most, per, least)
        classes = [*range(len(slots)), 255]
        self.cls = data.draw(st.lists(st.sampled_from(classes), min_size=count, max_size=count))
        self.layer = [layer for layer, size in enumerate(layers) for _ in range(size)]
        self.table = Table(layers, self.cls, slots, self.policy, slabs)
        self.size = self.table.slots_of()
        self.total = sum(slots[c] * 4096 * (c + 1) for c in range(len(slots))) + (sum(own) * slabs[0] if traded else 0)
        self.slots, self.clock, self.held = {}, 0, []  # by key; held: slots of live leases
        self.history = History(layers)
        self.reference = REFERENCES[self.policy](self.cls, self.size) if self.policy in REFERENCES else None

    # ---- the model

    def tick(self):
        self.clock += 1
        return self.clock

    def used(self, cls):
        return [slot for slot in self.slots.values() if self.cls[slot.key] == cls]

    def candidates(self, cls, mode):
        return [s for s in self.used(cls) if s.leases == 0 and not (mode == PREFETCH and s.unread)]

    def judge(self, key, cls, mode):
        """Hold `key`, the policy's victim (None: nobody), to what the model would give up."""
        candidates = self.candidates(cls, mode)
        if self.reference and cls < len(self.size):
            used = self.used(cls)
            leased, unread = {s.key for s in used if s.leases}, {s.key for s in used if s.unread}
            assert key == self.reference.victim(cls, leased, unread if mode == PREFETCH else set())
        if key is None:
            assert not candidates
            return
        chosen = self.slots[key]
        assert chosen in candidates, "leased, unread or in flight"
        if self.reference:
            return
        if self.policy == "lru":
            assert chosen.stamp == min(slot.stamp for slot in candidates)
            return
        far = {s.key: self.history.distance(self.layer[s.key], s.key) for s in candidates}
        most = max(far.values())
        rounding = 0 if far[key] > min(self.history.rounds.gap) / LEAST / 2 else 1e-5 * most
        assert far[key] >= most - rounding, "another one's next use is expected later"
        for other in candidates:  # a tie goes to the one that was asked for longest ago
            if far[other.key] == far[key]:
                assert chosen.stamp <= other.stamp
            mine, its = self.layer[key], self.layer[other.key]
            if mine == its and self.history.picked(mine, key) == self.history.picked(its, other.key):
                assert chosen.stamp <= other.stamp

    def trade(self, key):
        """What a demand may do before it reserves: nothing in use goes, and the policy has heard of all that does."""
        cls = self.cls[key]
        gone, searched = self.table.trade(key)
        if searched and self.reference:  # the search moves hands and marks, whoever gives way in the end
            self.reference.victim(cls, {s.key for s in self.used(cls) if s.leases}, set())
        if gone is None:
            assert self.table.slots_of() == self.size
            return
        assert len(self.used(cls)) == self.size[cls], "a class with free slots took another one's"
        for each in gone:
            slot = self.slots.pop(each.key)
            assert not slot.inflight and not slot.leases and self.cls[each.key] != cls
            assert (each.unread, each.from_prefetch) == (slot.unread, slot.origin == PREFETCH)
            self.forget(each.key, False)
        self.size[:] = self.table.slots_of()
        assert len(self.used(cls)) < self.size[cls] and min(self.size) >= 0

    def reserve(self, key, mode):
        cls = self.cls[key]
        if mode == DEMAND:
            self.trade(key)
        full = cls >= len(self.size) or len(self.used(cls)) == self.size[cls]
        number, evicted = self.table.reserve(key, mode, mode)
        if evicted is not None:
            assert full
            self.judge(evicted.key, cls, mode)
            gone = self.slots.pop(evicted.key)
            assert (evicted.unread, evicted.from_prefetch) == (gone.unread, gone.origin == PREFETCH)
            assert number == gone.number
            self.forget(evicted.key, True)
        elif number < 0:
            assert full
            self.judge(None, cls, mode)
            if mode == DEMAND:
                self.table.refused(key)
        else:
            assert not full
        if number >= 0:
            self.slots[key] = Slot(key, number, mode, self.tick())
            if self.reference:
                self.reference.admit(key)
        return number >= 0

    def forget(self, key, evicted):
        self.history.forget(self.layer[key], key)
        if self.reference:
            self.reference.forget(key, evicted)

    def lease(self, slot):
        self.table.lease(slot.number)
        slot.leases += 1
        self.held.append(slot)

    # ---- the steps

    @rule(pick=picks)
    def demand(self, pick):
        key = pick % len(self.cls)
        slot = self.slots.get(key)
        self.table.request(key)
        self.history.request(self.layer[key], key)
        if self.reference:
            self.reference.request(key)
        now = self.tick()
        if slot is not None:
            slot.stamp = now
        elif self.reserve(key, DEMAND):
            slot = self.slots[key]
        if slot is not None:
            self.lease(slot)
            if not slot.inflight:
                self.table.read(slot.number)
                slot.unread = False

    @rule(pick=picks)
    def guess(self, pick):
        key = pick % len(self.cls)
        if key not in self.slots:
            self.reserve(key, PREFETCH)

    def inflight(self):
        return [slot for slot in self.slots.values() if slot.inflight]

    @precondition(lambda self: self.inflight())
    @rule(pick=picks)
    def land(self, pick):
        slot = self.inflight()[pick % len(self.inflight())]
        if slot in self.held:
            self.table.read(slot.number)
            slot.unread = False
        self.table.publish(slot.number)
        slot.inflight = False
        slot.leases -= 1

    @precondition(lambda self: self.inflight())
    @rule(pick=picks)
    def fail(self, pick):
        slot = self.inflight()[pick % len(self.inflight())]
        self.table.abort(slot.number)
        del self.slots[slot.key]
        self.forget(slot.key, False)
        self.held = [other for other in self.held if other is not slot]

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def drop(self, pick):
        slot = self.held.pop(pick % len(self.held))
        slot.leases -= 1
        self.table.drop(slot.number)

    @precondition(lambda self: self.slots)
    @rule(pick=picks)
    def hold_without_asking(self, pick):
        """A pin: a lease that is no request."""
        self.lease([*self.slots.values()][pick % len(self.slots)])

    @rule()
    def drain(self):
        self.table.drain()

    @rule(pick=picks, mode=st.sampled_from([DEMAND, PREFETCH]))
    def look_for_a_victim(self, pick, mode):
        cls = pick % len(self.size)
        number = self.table.victim(cls, mode)
        self.judge(None if number < 0 else self.table.key_of(number), cls, mode)

    @invariant()
    def holds(self):
        if not hasattr(self, "table"):
            return
        assert self.table.check() == 0
        for key in range(len(self.cls)):
            slot = self.slots.get(key)
            number = self.table.slot_of(key)
            assert number == (-1 if slot is None else slot.number)
            if slot is not None:
                assert self.table.leases(number) == slot.leases
                assert self.table.resident(number) != slot.inflight
        places = sorted(self.table.place(slot.number) for slot in self.slots.values())
        edges = [edge for at, nbytes in places for edge in (at, at + nbytes)]
        assert edges == sorted(edges) and (not edges or edges[-1] <= self.total), "slots that overlap hold experts"


def machine(policy):
    case = type(policy, (Machine,), {"policy": policy, "__module__": __name__}).TestCase
    case.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
    return case


globals().update({f"Test_{policy}": machine(policy) for policy in NAMES})


@pytest.fixture(params=NAMES)
def full(request):
    """A table of one layer, eight experts and four slots, of which 0..3 are resident, requested in that order."""
    table = Table([8], [0] * 8, [4], request.param)
    for key in range(4):
        table.request(key)
        table.publish(table.reserve(key, DEMAND, DEMAND)[0])
        table.read(table.slot_of(key))
    return table


def test_a_slot_in_flight_is_no_victim_and_no_hit(full):
    for key in range(4):
        full.lease(full.slot_of(key))
    full.drop(full.slot_of(2))
    slot, evicted = full.reserve(5, DEMAND, DEMAND)
    assert evicted.key == 2 and not full.resident(slot)
    assert full.reserve(6, DEMAND, DEMAND) == (-1, None)
    full.publish(slot)
    assert full.resident(slot)


def test_a_slot_is_offered_again_after_its_last_lease_only(full):
    slot = full.slot_of(0)
    others = [full.slot_of(key) for key in (1, 2, 3)]
    for other in others:
        full.lease(other)
    full.lease(slot)
    full.lease(slot)
    assert full.victim(0, DEMAND) == -1 and full.parked(slot)
    full.drop(slot)
    assert full.victim(0, DEMAND) == -1
    full.drop(slot)
    assert full.victim(0, DEMAND) == slot


def test_releasing_in_another_order_changes_no_recency(full):
    slots = [full.slot_of(key) for key in range(4)]
    for slot in slots:
        full.lease(slot)
    assert full.victim(0, DEMAND) == -1
    for slot in reversed(slots):
        full.drop(slot)
    assert full.victim(0, DEMAND) == slots[0]


def test_an_expert_larger_than_any_slot_gets_none():
    table = Table([2], [0, 255], [3], "lru")
    assert table.reserve(1, DEMAND, DEMAND) == (-1, None)
    assert table.check() == 0


def test_classes_do_not_take_slots_of_one_another():
    table = Table([4], [0, 0, 1, 1], [1, 1], "next_use")
    for key in (0, 2):
        table.publish(table.reserve(key, DEMAND, DEMAND)[0])
    assert table.reserve(3, DEMAND, DEMAND)[1].key == 2
    assert table.reserve(1, DEMAND, DEMAND)[1].key == 0
    assert table.check() == 0
