"""The judge of predictors alone, told of guesses step by step: what it charges, and whom it stops or lets in again."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastcache_ext.scripted import Evidence

LAYERS, EXPERTS, SLOTS, NBYTES = 4, 64, 300, 1 << 20
MS = 1_000_000


class Traffic:
    """Layer after layer: a predictor guesses, then the layer is visited. Every guess finds a free slot."""

    def __init__(self, mode="auto"):
        self.judge = Evidence(LAYERS, LAYERS * EXPERTS, SLOTS, mode)
        self.judge.wait(0, MS, NBYTES)  # demands take 1 ms per MiB
        self.turn = self.slot = 0

    def visit(self, right, wrong=0, predictor=3, charge_ns=0):
        """One layer: the first `right` guesses are among the experts asked for, the next `wrong` are not."""
        layer, self.turn = self.turn % LAYERS, self.turn + 1
        first = layer * EXPERTS
        admitted = {}
        for n in range(right + wrong):
            key = first + n if n < right else first + 32 + n
            if self.judge.admit(predictor, n, right + wrong):
                self.slot = (self.slot + 1) % SLOTS
                admitted[key] = self.slot
                self.judge.issued(predictor, self.slot, layer, key, NBYTES)
                self.judge.landed(self.slot)
        if charge_ns and admitted:
            begun = self.judge.read_begins(0)
            self.judge.wait_begins(0)
            self.judge.read_ends(self.slot, False, begun, charge_ns, NBYTES)
            self.judge.wait_ends(charge_ns + MS, NBYTES)
        for n in range(8):
            self.judge.demand(first + n, layer)
            if first + n in admitted:
                self.judge.used(admitted[first + n])
        return len(admitted)


def test_nothing_is_decided_before_thirty_two_guesses_are_resolved_if_one_was_right():
    traffic = Traffic()
    for _ in range(4):  # the last visit is still open
        assert traffic.visit(1, 7) == 8
    assert traffic.judge.counts(3)["missed"] == 21 and traffic.judge.state(3) == "full"
    traffic.visit(1, 7)
    assert traffic.judge.counts(3)["missed"] == 28 and traffic.judge.state(3) == "stopped"


def test_eight_wrong_ones_and_none_right_are_enough():
    traffic = Traffic()
    for _ in range(2):
        assert traffic.visit(0, 4) == 4
    assert traffic.judge.counts(3)["missed"] == 4 and traffic.judge.state(3) == "full"
    traffic.visit(0, 4)
    assert traffic.judge.counts(3)["missed"] == 8 and traffic.judge.state(3) == "stopped"


def test_a_hostile_predictor_is_left_a_probe_now_and_then():
    traffic = Traffic()
    for _ in range(20):
        traffic.visit(0, 8)
    assert traffic.judge.counts(3)["issued"] <= 48
    before = traffic.judge.counts(3)
    for _ in range(4000):
        traffic.visit(0, 8)
    after = traffic.judge.counts(3)
    issued, declined = after["issued"] - before["issued"], after["declined"] - before["declined"]
    assert issued + declined == 32_000 and 8 <= issued <= 32_000 / 200
    assert traffic.judge.state(3) == "stopped"


@pytest.mark.parametrize("charge_ns", [0, 5 * MS])
def test_a_perfect_predictor_is_never_declined_whatever_waits_it_moves(charge_ns):
    traffic = Traffic()
    for _ in range(500):
        assert traffic.visit(8, charge_ns=charge_ns) == 8
    assert traffic.judge.counts(3)["charged_wait_ns"] == 500 * charge_ns
    assert traffic.judge.state(3) == "full" and traffic.judge.counts(3)["declined"] == 0


def test_a_predictor_right_half_of_the_time_pays_until_its_reads_delay_demands():
    cheap, dear = Traffic(), Traffic()
    for _ in range(100):
        cheap.visit(4, 4)
        dear.visit(4, 4, charge_ns=12 * MS)
    assert cheap.judge.state(3) == "full" and cheap.judge.counts(3)["declined"] == 0
    assert dear.judge.state(3) == "stopped"


def test_a_mediocre_predictor_is_narrowed_to_the_first_half_of_each_call():
    narrowed = Traffic()
    for _ in range(6):
        narrowed.visit(2, 6)  # saved 1 ms for each right one, cost 1/4 ms for each wrong one
    assert narrowed.judge.state(3) == "narrowed"
    assert narrowed.visit(2, 6) == 4 and narrowed.visit(1, 0) == 1


def test_moods_are_followed_both_ways():
    traffic, admitted = Traffic(), []
    for turn in range(1200):
        admitted.append(traffic.visit(*((8, 0) if turn // 200 % 2 == 0 else (0, 8))))
    for start in range(0, 1200, 400):
        assert sum(admitted[start + 150 : start + 200]) == 400  # right, and fully on again
        assert sum(admitted[start + 250 : start + 400]) <= 40  # wrong: probes alone


def test_a_miss_is_taken_back_when_the_guess_is_used_after_all():
    traffic = Traffic()
    for _ in range(2):
        traffic.visit(0, 7)
    judge = traffic.judge
    assert judge.counts(3)["missed"] == 7
    for slot in range(1, 15):
        judge.used(slot)
    for _ in range(40):
        assert traffic.visit(2, 1) == 3
    assert judge.state(3) == "full"


def test_a_predictor_that_was_stopped_for_guesses_that_are_used_after_all_is_let_in_again():
    traffic = Traffic()
    for _ in range(3):
        traffic.visit(0, 8)
    judge = traffic.judge
    assert judge.counts(3)["missed"] >= 8 and judge.state(3) == "stopped"
    for slot in range(1, judge.counts(3)["issued"] + 1):
        judge.used(slot)
    assert judge.state(3) == "narrowed"
    assert sum(traffic.visit(2, 1) for _ in range(40)) >= 100
    assert judge.state(3) == "full"


def test_a_guess_for_the_layer_that_is_being_visited_is_resolved_by_the_next_visit():
    judge = Evidence(LAYERS, LAYERS * EXPERTS, SLOTS)
    judge.demand(0, 0)
    judge.issued(0, 5, 0, 9, NBYTES)
    judge.landed(5)
    judge.demand(EXPERTS, 1)
    assert judge.counts(0)["missed"] == 0 and judge.watched == 1
    judge.demand(1, 0)
    judge.demand(EXPERTS, 1)
    assert judge.counts(0)["missed"] == 1 and judge.watched == 0


def test_an_expert_asked_for_again_ends_the_visit_of_a_single_layer():
    judge = Evidence(1, EXPERTS, SLOTS)
    judge.issued(0, 5, 0, 9, NBYTES)
    for key in (1, 2, 3):
        judge.demand(key, 0)
    assert judge.watched == 1
    judge.demand(2, 0)
    assert judge.counts(0)["missed"] == 1


def test_a_demand_is_charged_for_the_time_until_the_guess_reads_it_found_were_over():
    judge = Evidence(1, EXPERTS, SLOTS)
    judge.issued(4, 1, 0, 1, NBYTES)
    judge.issued(5, 2, 0, 2, NBYTES)
    judge.issued(5, 3, 0, 3, NBYTES)
    one, two = judge.read_begins(0), judge.read_begins(0)
    judge.wait_begins(10)
    judge.read_ends(1, False, one, 30, NBYTES)  # both kept the device busy: half of 20 each
    judge.read_ends(2, False, two, 45, NBYTES)  # and 15 alone
    three = judge.read_begins(50)
    judge.wait_ends(60, NBYTES)
    judge.read_ends(3, True, three, 70, NBYTES)  # a promoted one was waited for
    assert judge.counts(4)["charged_wait_ns"] == 10 and judge.counts(5)["charged_wait_ns"] == 25
    four = judge.read_begins(100)
    judge.read_ends(3, False, four, 200, NBYTES)  # nobody waited
    assert judge.counts(5)["charged_wait_ns"] == 25


def test_where_the_scheduler_holds_guesses_back_a_read_is_charged_its_own_time_at_most():
    judge = Evidence(1, EXPERTS, SLOTS)
    judge.wait(0, NBYTES, NBYTES)  # 1 ns per byte
    assert judge.ns_per_byte == 1.0
    judge.hold_back()
    judge.issued(4, 1, 0, 1, NBYTES)
    begun = judge.read_begins(2 * NBYTES)
    judge.wait_begins(2 * NBYTES)
    judge.read_ends(1, False, begun, 12 * NBYTES, NBYTES)
    assert judge.counts(4)["charged_wait_ns"] == NBYTES


def test_the_rate_of_demand_reads_leaves_out_the_time_shared_with_guesses():
    judge = Evidence(1, EXPERTS, SLOTS)
    judge.issued(4, 1, 0, 1, NBYTES)
    begun = judge.read_begins(0)
    judge.wait_begins(0)
    judge.read_ends(1, False, begun, 3 * NBYTES, NBYTES)
    judge.wait_ends(5 * NBYTES, NBYTES)
    assert judge.ns_per_byte == 2.0


def test_a_displaced_expert_costs_as_much_as_the_predictor_is_wrong():
    right, wrong = Traffic(), Traffic()
    for traffic, share in ((right, 8), (wrong, 5)):
        for turn in range(60):
            traffic.visit(share, 8 - share)
            for n in range(8):
                key = traffic.turn % LAYERS * EXPERTS + 50 + n % 8
                traffic.judge.issued(3, 299 - n, 0, turn % 30, NBYTES, evicted=key)
                traffic.judge.dropped(299 - n, True)
                traffic.judge.absent(key, 4 * NBYTES)
    assert right.judge.counts(3)["displaced"] == wrong.judge.counts(3)["displaced"] > 100
    assert right.judge.state(3) == "full" and wrong.judge.state(3) == "stopped"


@pytest.mark.parametrize("predictor", [1, 2])
def test_pins_and_warming_up_are_never_judged(predictor):
    for mode in ("auto", "off"):
        traffic = Traffic(mode)
        for _ in range(50):
            assert traffic.visit(0, 5, predictor=predictor) == 5
        assert traffic.judge.watched == 0 and traffic.judge.counts(predictor)["missed"] == 0


def test_always_and_off_are_what_they_say():
    for mode, admitted in (("always", 8), ("off", 0)):
        traffic = Traffic(mode)
        for _ in range(50):
            assert traffic.visit(0, 8) == admitted


class Life(RuleBasedStateMachine):
    """Guesses of several predictors in every order of events; each ends exactly once, and no list loses one."""

    @initialize(n_slots=st.integers(1, 6))
    def begin(self, n_slots):
        self.judge = Evidence(2, 8, n_slots)
        self.slots = dict.fromkeys(range(n_slots))  # (predictor, state)
        self.ends = {p: dict.fromkeys(("issued", "used", "late", "wasted", "cancelled", "failed"), 0) for p in range(6)}

    def having(self, *states):
        return [slot for slot, guess in self.slots.items() if (guess[1] if guess else None) in states]

    @precondition(lambda self: self.having(None))
    @rule(data=st.data(), predictor=st.integers(0, 5), key=st.integers(0, 7), evicted=st.integers(-1, 7))
    def issue(self, data, predictor, key, evicted):
        slot = data.draw(st.sampled_from(self.having(None)))
        self.judge.admit(predictor)
        self.judge.issued(predictor, slot, key // 4, key, 1000, evicted)
        self.slots[slot] = (predictor, "flying")
        self.ends[predictor]["issued"] += 1

    @rule(key=st.integers(0, 7))
    def demand(self, key):
        self.judge.demand(key, key // 4)
        self.judge.absent(key, 1000)

    @precondition(lambda self: self.having("flying", "asked"))
    @rule(data=st.data())
    def join(self, data):
        slot = data.draw(st.sampled_from(self.having("flying", "asked")))
        self.judge.joined(slot)
        self.slots[slot] = (self.slots[slot][0], "asked")

    @precondition(lambda self: self.having("flying", "asked"))
    @rule(data=st.data(), how=st.sampled_from(["land", "cancel", "fail"]))
    def end_of_flight(self, data, how):
        slot = data.draw(st.sampled_from(self.having("flying", "asked")))
        predictor, state = self.slots[slot]
        if how == "land":
            self.judge.landed(slot, state == "asked", 500, 7)
            self.slots[slot] = (predictor, "read") if state == "asked" else (predictor, "unread")
            self.ends[predictor]["late"] += state == "asked"
        else:
            self.judge.dropped(slot, how == "cancel")
            self.slots[slot] = None
            self.ends[predictor]["cancelled" if how == "cancel" else "failed"] += 1

    @precondition(lambda self: self.having("unread", "read"))
    @rule(data=st.data(), how=st.sampled_from(["use", "evict"]))
    def end(self, data, how):
        slot = data.draw(st.sampled_from(self.having("unread", "read")))
        predictor, state = self.slots[slot]
        if state == "unread" and how == "use":
            self.judge.used(slot)
            self.ends[predictor]["used"] += 1
            self.slots[slot] = (predictor, "read")
        elif how == "evict":
            if state == "unread":
                self.judge.wasted(slot)
                self.ends[predictor]["wasted"] += 1
            self.slots[slot] = None

    @invariant()
    def each_guess_ends_once(self):
        if not hasattr(self, "judge"):
            return
        for predictor, ends in self.ends.items():
            counts = self.judge.counts(predictor)
            assert {name: counts[name] for name in ends} == ends
            mine = [state for p, state in filter(None, self.slots.values()) if p == predictor]
            assert counts["unread"] == mine.count("unread")
            assert counts["in_flight"] == mine.count("flying") + mine.count("asked")
            assert 0 <= counts["missed"] <= counts["issued"]
        assert 0 <= self.judge.watched <= len(self.having("flying", "unread"))


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=60)
