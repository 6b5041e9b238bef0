"""What one expert computes, from its labelled arrays.

Owns the feed-forward formulas. Knows no routing and no store. Imports linear, quant, routers (sigmoid).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.linear import Arrays, linear
from fastcache.moe.routers import sigmoid
from fastcache.quant.floats import to_float32

F32: TypeAlias = NDArray[np.float32]


def silu(x: F32) -> F32:
    """Return x / (1 + exp(-x)), float32."""
    with np.errstate(over="ignore"):
        result: F32 = np.divide(x, np.float32(1) + np.exp(-x))
    return result


def swiglu(x: F32, expert: Arrays) -> F32:
    """Return down(silu(gate(x)) * up(x)) of an expert.

    Parameters
    ----------
    x : ndarray, float32, [T, hidden]
    expert : mapping of str to ndarray
        "gate" and "up" [inter, hidden], "down" [hidden, inter]; see `fastcache.linear` for their dtypes.

    Returns
    -------
    ndarray, float32, [T, hidden]

    Notes
    -----
    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), as every family here but gpt-oss uses it.
    """
    inner = silu(linear(x, expert, "gate"))
    inner *= linear(x, expert, "up")
    return linear(inner, expert, "down")


def clamped_swiglu(x: F32, expert: Arrays, *, alpha: float, limit: float) -> F32:
    """Return gpt-oss's expert: down((up + 1) * gate * sigmoid(alpha * gate)), clamped, with biases.

    Parameters
    ----------
    x : ndarray, float32, [T, hidden]
    expert : mapping of str to ndarray
        As for `swiglu`, and "gate.bias", "up.bias" [inter], "down.bias" [hidden].
    alpha, limit : float
        gate is cut at `limit` from above, up to [-limit, limit], both after their bias.

    Returns
    -------
    ndarray, float32, [T, hidden]

    Notes
    -----
    Source: transformers, `modeling_gpt_oss.py` (GptOssExperts); openai/gpt-oss, `gpt_oss/torch/model.py` (swiglu).
    """
    gate = linear(x, expert, "gate")
    gate += to_float32(expert["gate.bias"])
    up = linear(x, expert, "up")
    up += to_float32(expert["up.bias"])
    np.minimum(gate, np.float32(limit), out=gate)
    np.clip(up, np.float32(-limit), np.float32(limit), out=up)
    inner = (up + np.float32(1)) * (gate * sigmoid(gate * np.float32(alpha)))
    y = linear(inner, expert, "down")
    y += to_float32(expert["down.bias"])
    return y


def situ(x: F32, expert: Arrays, *, beta: float, linear_beta: float | None) -> F32:
    """Return Kimi K3's expert: down(beta * tanh(gate / beta) * sigmoid(gate) * up'), up' = b * tanh(up / b).

    Parameters
    ----------
    x : ndarray, float32, [T, hidden]
    expert : mapping of str to ndarray
        As for `swiglu`.
    beta : float
        `activation_situ_beta`: bounds the gate from above.
    linear_beta : float or None
        b, `activation_situ_linear_beta`: bounds the magnitude of up; None leaves up as it is.

    Returns
    -------
    ndarray, float32, [T, hidden]

    Notes
    -----
    Source: moonshotai/Kimi-K3, `modeling_kimi_linear.py` (SituAndMul).
    """
    gate, up = linear(x, expert, "gate"), linear(x, expert, "up")
    inner = np.float32(beta) * np.tanh(gate / np.float32(beta)) * sigmoid(gate)
    if linear_beta is not None:
        up = np.float32(linear_beta) * np.tanh(up / np.float32(linear_beta))
    inner *= up
    return linear(inner, expert, "down")


def relu2(x: F32, expert: Arrays) -> F32:
    """Return down(max(up(x), 0) ** 2) of an expert without a gate: Nemotron-H.

    Parameters
    ----------
    x : ndarray, float32, [T, hidden]
    expert : mapping of str to ndarray
        "up" [inter, hidden], "down" [hidden, inter].

    Returns
    -------
    ndarray, float32, [T, hidden]

    Notes
    -----
    Source: So et al., "Primer" (arXiv:2109.08668); transformers, `modeling_nemotron_h.py`.
    """
    inner = np.maximum(linear(x, expert, "up"), np.float32(0))
    inner *= inner
    return linear(inner, expert, "down")
