"""next_use on kinds of traffic, made: not behind another policy by more than noise where one of them is at home."""

import numpy as np
import pytest
from routing import trace_of

from fastcache.traces import capacity as room
from fastcache.traces.replay import policies, replay

NOISE = 0.004  # of the requests


def tastes(rng, layers, experts, skew):
    """Return log odds [layers, experts]: Zipf's, in an order of each layer's own."""
    return -skew * np.log(np.argsort(rng.random((layers, experts)), axis=1) + 1)


def picks(rng, odds, top_k):
    return np.argpartition(-(odds + rng.gumbel(size=odds.shape)), top_k - 1, axis=1)[:, :top_k]


def steady(rng, layers, experts, top_k, tokens, skew):
    odds = tastes(rng, layers, experts, skew)
    return [row for _ in range(tokens) for row in enumerate(picks(rng, odds, top_k))]


def topics(rng, layers, experts, top_k, tokens, skew, stay):
    out = []
    while len(out) < tokens * layers:
        out += steady(rng, layers, experts, top_k, 1 + int(rng.exponential(stay)), skew)
    return out


def parts(rng, layers, experts, top_k, tokens, skew, stay):
    """Half of the layers, another half after each `stay` tokens."""
    odds, out, on = tastes(rng, layers, experts, skew), [], []
    for token in range(tokens):
        if token % stay == 0:
            on = sorted(rng.permutation(layers)[: layers // 2].tolist())
        chosen = picks(rng, odds, top_k)
        out += [(layer, chosen[layer]) for layer in on]
    return out


def rates(visits, layers, experts, fraction):
    trace = trace_of([layer * experts + chosen for layer, chosen in visits], [experts] * layers)
    return {row.policy: row.hit_rate for row in replay(trace, policies(), [room.of_fraction(trace, fraction)])}


@pytest.mark.parametrize("fraction", ["0.05", "0.1", "0.2", "0.4"])
@pytest.mark.parametrize(
    ("make", "layers", "experts", "more"),
    [
        pytest.param(steady, 1, 1024, (4, 20_000, 0.9), id="many experts and few picks"),
        pytest.param(steady, 24, 128, (1, 2_000, 0.9), id="one pick of 128"),
        pytest.param(topics, 16, 64, (4, 1_000, 1.2, 60), id="topics that change often"),
        pytest.param(topics, 8, 256, (8, 1_000, 1.0, 150), id="topics that change"),
        pytest.param(parts, 24, 64, (4, 1_200, 1.0, 50), id="layers left for a while"),
        pytest.param(parts, 24, 64, (4, 1_200, 1.2, 600), id="layers left for good"),
        pytest.param(parts, 24, 64, (4, 1_200, 1.0, 1), id="layers skipped at random"),
    ],
)
def test_next_use_is_not_behind_where_another_policy_is_at_home(make, layers, experts, more, fraction):
    found = rates(make(np.random.default_rng(11), layers, experts, *more), layers, experts, fraction)
    assert found["next_use"] >= max(found.values()) - NOISE, found


def test_it_follows_traffic_that_changes_its_kind_after_a_long_time():
    """Weights that went to one average for 1,500 tokens come back when what is picked is what was picked before."""
    rng = np.random.default_rng(12)
    calm = steady(rng, 8, 64, 4, 1_500, 1.0)
    now, sticky = picks(rng, np.zeros((8, 64)), 4), []
    for _ in range(600):
        stays = rng.random(now.shape) < 0.8
        other = picks(rng, np.zeros((8, 64)) - 1e9 * (np.arange(64) == now[:, :, None]).any(1), 4)
        now = np.where(stays, now, other)
        sticky += list(enumerate(now))
    alone, after = rates(sticky, 8, 64, "0.1"), rates(calm + sticky, 8, 64, "0.1")
    before = rates(calm, 8, 64, "0.1")
    share = len(calm) / (len(calm) + len(sticky))
    late = (after["next_use"] - share * before["next_use"]) / (1 - share)
    assert late > 0.95 * alone["next_use"] and alone["next_use"] > 0.7, (alone, late)
