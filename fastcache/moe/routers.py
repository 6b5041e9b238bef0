"""Which experts serve a token, and with what weight: one function per published rule, float32.

Owns the arithmetic from router logits to (experts, weights). Knows no checkpoint and no expert. Imports numpy.

Every function takes logits [T, E] float32 and returns experts [T, k] int64, best first, and weights [T, k] float32.
Equal scores go to the lower index, as in a stable sort, so that routing never depends on a library's top-k.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
Routing: TypeAlias = tuple[NDArray[np.int64], F32]


def softmax(logits: F32) -> F32:
    """Return exp(l - max) / sum over the last axis; [..., E] float32."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: F32 = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def sigmoid(x: F32) -> F32:
    """Return 1 / (1 + exp(-x)), float32; 0 where exp overflows."""
    with np.errstate(over="ignore"):
        result: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def top_k_stable(scores: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the indices [T, k] of the k largest scores of each row [T, E], largest first, ties to the lower index."""
    if not 0 < k <= scores.shape[-1]:
        raise ValueError(f"top-k of {k} among {scores.shape[-1]} experts")
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.ascontiguousarray(order[:, :k], np.int64)


def softmax_topk(logits: F32, k: int, *, renormalise: bool) -> Routing:
    """Score by softmax over all experts, take the k best.

    Parameters
    ----------
    renormalise : bool
        Divide the k weights by their sum. Mixtral always does; Qwen2-MoE, Qwen3-MoE and OLMoE if `norm_topk_prob`.

    Notes
    -----
    Source: transformers, `modeling_mixtral.py`, `modeling_qwen2_moe.py`, `modeling_qwen3_moe.py`, `modeling_olmoe.py`.
    """
    scores = softmax(logits)
    experts = top_k_stable(scores, k)
    weights = np.take_along_axis(scores, experts, axis=-1)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts, weights


def topk_softmax(logits: F32, k: int) -> Routing:
    """Take the k largest logits, softmax over those k: gpt-oss and Granite.

    Notes
    -----
    Source: transformers, `modeling_gpt_oss.py` (GptOssTopKRouter), `modeling_granitemoe.py` (GraniteMoeTopKGating).
    """
    experts = top_k_stable(logits, k)
    return experts, softmax(np.take_along_axis(logits, experts, axis=-1))


def topk_sigmoid(logits: F32, k: int) -> Routing:
    """Take the k largest logits; weight = sigmoid of each, never renormalised: Llama 4.

    Notes
    -----
    Source: transformers, `modeling_llama4.py` (Llama4Router). The weight multiplies what an expert is given.
    """
    experts = top_k_stable(logits, k)
    return experts, sigmoid(np.take_along_axis(logits, experts, axis=-1))


def softmax_norm(logits: F32, k: int, *, p: float | None) -> Routing:
    """Score by softmax, take the k best, divide their weights by their L_p norm, if p is given: DBRX.

    Parameters
    ----------
    p : float or None
        `moe_normalize_expert_weights`.

    Notes
    -----
    Source: transformers, `modeling_dbrx.py` (DbrxFFN.route_tokens_to_experts).
    """
    experts, weights = softmax_topk(logits, k, renormalise=False)
    if p is not None:
        power = np.float32(p)
        weights = weights / (weights**power).sum(axis=-1, keepdims=True) ** (np.float32(1) / power)
    return experts, weights


def ernie(logits: F32, k: int, bias: F32, *, least: float) -> Routing:
    """Score by softmax, choose by score + bias; weight = score / max(sum of the k, `least`): ERNIE 4.5.

    Parameters
    ----------
    bias : ndarray, float32, [E]
        `moe_statics.e_score_correction_bias`.
    least : float
        `moe_norm_min`.

    Notes
    -----
    Source: transformers, `modeling_ernie4_5_moe.py` (Ernie4_5_MoeTopKRouter).
    """
    scores = softmax(logits)
    experts = top_k_stable(scores + bias, k)
    weights = np.take_along_axis(scores, experts, axis=-1)
    return experts, weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.float32(least))


def sparsemixer(logits: F32, k: int, *, jitter: float) -> Routing:
    """Take the best logit, then the best of the others; weigh each within those that are nearly as good: Phi-3.5-MoE.

    A weight is the softmax at the chosen one over the candidates l with (best - l) / max(abs(l), best) <= 2 * jitter,
    where best is the chosen one's logit. The two weights do not add up to one.

    Parameters
    ----------
    k : int
        2, as the rule is written for.
    jitter : float
        `router_jitter_noise`: a bound of the rule, not a noise, outside training.

    Raises
    ------
    ValueError
        k is not 2, or there is one expert only.

    Notes
    -----
    Source: transformers, `modeling_phimoe.py` (sparsemixer); Liu et al., "Sparse Backpropagation for MoE Training"
    (arXiv:2310.00811).
    """
    if k != 2 or logits.shape[-1] < 2:
        raise ValueError(f"sparsemixer takes 2 experts per token, not {k} of {logits.shape[-1]}")
    left = logits.copy()
    chosen, weights = [], []
    for _ in range(2):
        expert = top_k_stable(left, 1)
        best = np.take_along_axis(logits, expert, axis=-1)
        # A best logit of zero, with no larger magnitude beside it: 0 / 0 is not above the bound, as in the source.
        with np.errstate(invalid="ignore", divide="ignore"):
            far = (best - logits) / np.maximum(np.abs(logits), best) > np.float32(2 * jitter)
        scores = softmax(np.where(far, np.float32(-np.inf), left))
        chosen.append(expert)
        weights.append(np.take_along_axis(scores, expert, axis=-1))
        np.put_along_axis(left, expert, np.float32(-np.inf), axis=-1)
    return np.concatenate(chosen, axis=-1), np.concatenate(weights, axis=-1)


def deepseek_v2(logits: F32, k: int, *, scale: float, n_group: int = 1, topk_group: int = 1) -> Routing:
    """Score by softmax, take the k best within the best groups; weight = score * scale, never renormalised.

    Parameters
    ----------
    scale : float
        `routed_scaling_factor`.
    n_group, topk_group : int
        Experts form `n_group` equal groups in index order; the `topk_group` groups with the best single expert stay
        ("group_limited_greedy"). One group is "greedy".

    Notes
    -----
    Source: transformers, `modeling_deepseek_v2.py` (route_tokens_to_experts).
    """
    scores = softmax(logits)
    best = _groups(scores, n_group).max(axis=-1)
    experts = top_k_stable(_within_groups(scores, best, topk_group, k), k)
    return experts, np.take_along_axis(scores, experts, axis=-1) * np.float32(scale)


def deepseek_v3(
    logits: F32,
    k: int,
    bias: F32 | None,
    *,
    scale: float,
    renormalise: bool,
    n_group: int = 1,
    topk_group: int = 1,
    least: float = 1e-20,
) -> Routing:
    """Score by sigmoid, choose by score + bias within the best groups, weigh by the score without the bias.

    Parameters
    ----------
    bias : ndarray, float32, [E], or None
        `e_score_correction_bias`: changes who is chosen, not the weight.
    scale : float
        `routed_scaling_factor`, after normalising.
    renormalise : bool
        `norm_topk_prob`: divide the k weights by (their sum + `least`).
    n_group, topk_group : int
        A group's score is the sum of its two best biased scores; the `topk_group` best groups stay.
    least : float
        What is added to the sum: 1e-20, but 1e-6 of LFM2.

    Notes
    -----
    Source: DeepSeek-V3, section 2.1.2 and `inference/model.py` (Gate); Kimi K2 is the same with one group. Experts
    of other groups are out, as there; older transformers set their biased score to 0, which differs only where a
    chosen group's biased score is negative.
    """
    scores = sigmoid(logits)
    biased = scores if bias is None else scores + bias
    groups = _groups(biased, n_group)
    two_best = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    experts = top_k_stable(_within_groups(biased, two_best, topk_group, k), k)
    weights = np.take_along_axis(scores, experts, axis=-1)
    if renormalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(least))
    return experts, weights * np.float32(scale)


def _groups(scores: F32, n_group: int) -> F32:
    """[T, E] as [T, n_group, E / n_group]."""
    n_tokens, n_experts = scores.shape
    if n_group < 1 or n_experts % n_group:
        raise ValueError(f"{n_experts} experts do not form {n_group} equal groups")
    return scores.reshape(n_tokens, n_group, n_experts // n_group)


def _within_groups(scores: F32, group_scores: F32, topk_group: int, k: int) -> F32:
    """Scores [T, E] with -inf outside the `topk_group` best of the groups [T, n_group]."""
    n_group = group_scores.shape[-1]
    if n_group == 1:
        return scores
    size = scores.shape[-1] // n_group
    if k > topk_group * size:
        raise ValueError(f"{topk_group} groups of {size} experts hold fewer than the top {k}")
    kept = np.zeros(group_scores.shape, np.bool_)
    np.put_along_axis(kept, top_k_stable(group_scores, topk_group), True, axis=-1)
    result: F32 = np.where(np.repeat(kept, size, axis=-1), scores, np.float32(-np.inf))
    return result
