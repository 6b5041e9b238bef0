"""A budget between sizes of expert: all of it is used, nobody gets more than it can fill, slabs waste little."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcache.slabs import LEAST_SLABS, MAX_PER_SLAB, MAX_SLAB, plan_slabs

PAGE, MiB = 4096, 1 << 20
MIXES = {  # bytes of a slot, and experts, per class; larger first
    "Q4_K and Q6_K, 2 to 3": ([3 * MiB, 2 * MiB], [512, 512]),
    "Q4_K_M: down in Q6_K or Q4_K": ([498 * PAGE, 432 * PAGE], [1536, 1536]),
    "Q8 and Q4, 1 to 2": ([2 * MiB, 1 * MiB], [512, 512]),
    "three sizes": ([4 * MiB, 3 * MiB, 2 * MiB], [300, 300, 300]),
    "three sizes that share nothing": ([1021 * PAGE, 727 * PAGE, 499 * PAGE], [256, 512, 128]),
    "a rare tiny one": ([4 * MiB, 3 * MiB, 64 << 10], [512, 512, 16]),
    "one layer of another size": ([5 * MiB, 4 * MiB], [64, 2048]),
}


def totals(slot_bytes, experts):
    return sum(size * n for size, n in zip(slot_bytes, experts, strict=True))


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.25, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("mix", MIXES)
def test_slots_fill_a_budget_whoever_has_the_slabs(mix, share):
    slot_bytes, experts = MIXES[mix]
    budget = int(totals(slot_bytes, experts) * share)
    plan = plan_slabs(budget, slot_bytes, experts)
    assert plan.arena_bytes(slot_bytes) <= budget
    if budget < 64 * max(slot_bytes):
        return
    assert plan.count >= LEAST_SLABS
    at_start = totals(slot_bytes, plan.begins_with)
    assert at_start >= 0.96 * budget
    for c, (size, per) in enumerate(zip(slot_bytes, plan.per, strict=True)):
        if plan.most[c]:
            assert per * size >= 0.96 * plan.slab_bytes


@settings(max_examples=300, deadline=None)
@given(
    classes=st.lists(st.tuples(st.integers(1, 600), st.integers(0, 400)), min_size=0, max_size=16),
    budget=st.integers(0, 1 << 32),
)
def test_a_plan_is_one_that_an_arena_can_be_cut_by(classes, budget):
    slot_bytes = sorted({size * PAGE for size, _ in classes}, reverse=True)
    experts = [n for _, n in classes][: len(slot_bytes)]
    plan = plan_slabs(budget, slot_bytes, experts)
    assert plan.arena_bytes(slot_bytes) <= budget
    assert plan.slab_bytes % PAGE == 0 and plan.slab_bytes <= max([MAX_SLAB, *slot_bytes])
    for c, size in enumerate(slot_bytes):
        own, most, per = plan.own[c], plan.most[c], plan.per[c]
        assert 0 <= own <= most <= plan.count and per <= MAX_PER_SLAB and per * size <= max(plan.slab_bytes, 1)
        assert plan.slots[c] + most * per <= experts[c], "numbers for more slots than the class has experts"
    could_use = [size for c, size in enumerate(slot_bytes) if plan.begins_with[c] < experts[c]]
    if could_use and not plan.count:
        assert budget - plan.arena_bytes(slot_bytes) < min(could_use)


def test_experts_of_one_size_and_budgets_for_all_have_no_slabs():
    for budget in (0, 1, 10 * MiB, 1 << 40):
        assert not plan_slabs(budget, [3 * MiB], [512]).count
    for budget in (totals([3 * MiB, 2 * MiB], [64, 64]), 1 << 40):
        plan = plan_slabs(budget, [3 * MiB, 2 * MiB], [64, 64])
        assert not plan.count and plan.slots == [64, 64]
