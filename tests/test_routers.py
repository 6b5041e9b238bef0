"""Routing rules, each against a slow statement of it, one token at a time in float64."""

import numpy as np
import pytest

from fastcache.moe.routers import (
    deepseek_v2,
    deepseek_v3,
    ernie,
    sigmoid,
    softmax,
    softmax_norm,
    softmax_topk,
    sparsemixer,
    top_k_stable,
    topk_sigmoid,
    topk_softmax,
)

T, E = 40, 12


def logits(seed=0, spread=2.0):
    return (np.random.default_rng(seed).standard_normal((T, E)) * spread).astype(np.float32)


def soft(row):
    e = np.exp(np.float64(row) - max(np.float64(row)))
    return e / e.sum()


def best(scores, k, among=None):
    return sorted(range(len(scores)) if among is None else among, key=lambda e: (-scores[e], e))[:k]


def check(routing, expected):
    """`expected` is, per token, a list of (expert, weight)."""
    experts, weights = routing
    assert experts.dtype == np.int64 and weights.dtype == np.float32 and experts.shape == weights.shape
    assert experts.tolist() == [[e for e, _ in row] for row in expected]
    np.testing.assert_allclose(weights, [[w for _, w in row] for row in expected], rtol=2e-6)


@pytest.mark.parametrize("k", [1, 3, E])
@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_topk(k, renormalise):
    wanted = []
    for row in logits():
        p = soft(row)
        chosen = best(p, k)
        wanted.append([(e, p[e] / (p[chosen].sum() if renormalise else 1)) for e in chosen])
    check(softmax_topk(logits(), k, renormalise=renormalise), wanted)


@pytest.mark.parametrize("k", [1, 3, E])
def test_topk_softmax(k):
    wanted = []
    for row in logits():
        chosen = best(row, k)
        wanted.append(list(zip(chosen, soft(row[chosen]), strict=True)))
    check(topk_softmax(logits(), k), wanted)


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (3, 1), (6, 6)])
def test_deepseek_v2(n_group, topk_group):
    size, wanted = E // n_group, []
    for row in logits():
        p = soft(row)
        groups = best([max(p[g * size : (g + 1) * size]) for g in range(n_group)], topk_group)
        chosen = best(p, 3, [e for e in range(E) if e // size in groups])
        wanted.append([(e, p[e] * 16) for e in chosen])
    check(deepseek_v2(logits(), 3, scale=16.0, n_group=n_group, topk_group=topk_group), wanted)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (3, 1), (12, 5)])
def test_deepseek_v3(n_group, topk_group, renormalise):
    bias = np.random.default_rng(9).standard_normal(E).astype(np.float32)  # large: biased scores go below zero
    size, wanted = E // n_group, []
    for row in logits():
        s = 1 / (1 + np.exp(-np.float64(row)))
        b = s + bias
        groups = best([sum(sorted(b[g * size : (g + 1) * size])[-2:]) for g in range(n_group)], topk_group)
        chosen = best(b, 3, [e for e in range(E) if e // size in groups])
        total = s[chosen].sum() + 1e-20 if renormalise else 1
        wanted.append([(e, s[e] / total * 2.5) for e in chosen])
    routing = deepseek_v3(logits(), 3, bias, scale=2.5, renormalise=renormalise, n_group=n_group, topk_group=topk_group)
    check(routing, wanted)


def test_ties_among_many_experts_too_where_an_unstable_sort_would_show():
    scores = np.zeros((3, 384), np.float32)
    scores[1, ::2] = 1
    scores[2] = np.arange(384) % 7
    wanted = [[0, 1, 2, 3], [0, 2, 4, 6], [6, 13, 20, 27]]
    assert top_k_stable(scores, 4).tolist() == wanted


def test_ties_go_to_the_lower_index_everywhere():
    flat = np.zeros((2, E), np.float32)
    flat[1, 5:] = 1
    zero = np.zeros(E, np.float32)
    for routing in (
        softmax_topk(flat, 3, renormalise=True),
        topk_softmax(flat, 3),
        deepseek_v2(flat, 3, scale=1.0),
        deepseek_v3(flat, 3, zero, scale=1.0, renormalise=True),
    ):
        assert routing[0].tolist() == [[0, 1, 2], [5, 6, 7]]
    for routing in (
        deepseek_v2(flat[:1], 3, scale=1.0, n_group=6, topk_group=2),
        deepseek_v3(flat[:1], 3, zero, scale=1.0, renormalise=True, n_group=6, topk_group=2),
    ):
        assert routing[0].tolist() == [[0, 1, 2]]


def test_no_tokens_route_nowhere():
    none, zero = np.zeros((0, E), np.float32), np.zeros(E, np.float32)
    for experts, weights in (
        softmax_topk(none, 2, renormalise=True),
        topk_softmax(none, 2),
        deepseek_v2(none, 2, scale=1.0, n_group=4, topk_group=2),
        deepseek_v3(none, 2, zero, scale=1.0, renormalise=True, n_group=4, topk_group=2),
    ):
        assert experts.shape == weights.shape == (0, 2)


def test_large_logits_overflow_into_nothing():
    big = np.array([[1e4, -1e4, 0]], np.float32)
    assert softmax(big).tolist() == [[1, 0, 0]]
    assert sigmoid(big).tolist() == [[1, 0, 0.5]]


def test_impossible_settings_are_value_errors():
    with pytest.raises(ValueError, match="top-k of 13 among 12"):
        top_k_stable(logits(), 13)
    with pytest.raises(ValueError, match="do not form 5 equal groups"):
        deepseek_v2(logits(), 2, scale=1.0, n_group=5, topk_group=1)
    with pytest.raises(ValueError, match="1 groups of 2 experts hold fewer than the top 3"):
        deepseek_v2(logits(), 3, scale=1.0, n_group=6, topk_group=1)


def test_topk_sigmoid_weighs_each_for_itself():
    check(
        topk_sigmoid(logits(), 2),
        [[(e, 1 / (1 + np.exp(-np.float64(row[e])))) for e in best(row, 2)] for row in logits()],
    )


@pytest.mark.parametrize("p", [None, 1.0, 2.0])
def test_softmax_norm(p):
    wanted = []
    for row in logits():
        s = soft(row)
        chosen = best(s, 3)
        norm = 1 if p is None else sum(s[chosen] ** p) ** (1 / p)
        wanted.append([(e, s[e] / norm) for e in chosen])
    check(softmax_norm(logits(), 3, p=p), wanted)


@pytest.mark.parametrize("least", [1e-12, 0.9])
def test_ernie_chooses_with_the_bias_and_divides_by_no_less_than_the_least(least):
    bias, wanted = logits(5)[0] / 10, []
    for row in logits():
        s = soft(row)
        chosen = best(s + bias, 3)
        wanted.append([(e, s[e] / max(sum(s[chosen]), least)) for e in chosen])
    check(ernie(logits(), 3, bias, least=least), wanted)


@pytest.mark.parametrize("jitter", [0.01, 0.1, 0.4])
def test_sparsemixer_weighs_within_what_is_nearly_as_good(jitter):
    wanted = []
    for row in logits().astype(np.float64):
        left, chosen = list(range(E)), []
        for _ in range(2):
            top = max(left, key=lambda e: row[e])
            near = [e for e in left if (row[top] - row[e]) / max(abs(row[e]), row[top]) <= 2 * jitter]
            chosen.append((top, np.exp(row[top]) / np.exp(row[near]).sum()))
            left.remove(top)
        wanted.append(chosen)
    check(sparsemixer(logits(), 2, jitter=jitter), wanted)
    if jitter > 0.05:
        assert len({round(weight, 6) for row in wanted for _, weight in row}) > T // 2


def test_sparsemixer_is_for_two():
    with pytest.raises(ValueError, match="2 experts per token, not 3"):
        sparsemixer(logits(), 3, jitter=0.01)
