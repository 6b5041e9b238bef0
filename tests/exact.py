"""The models of the recorded GGUF files in float64, from tensors that the gguf package dequantised: nothing of ours."""

import functools

import gguf as package
import numpy as np

ROLES = ("gate", "up", "down")
HEADS, GROUPS, WIDTH = 4, 2, 32  # of all recorded files


@functools.cache
def dequantised(path):
    """Every tensor as float32, by the package's own reader and code."""
    return {each.name: package.dequantize(each.data, each.tensor_type) for each in package.GGUFReader(path).tensors}


def block(x, tensors, layer):
    """Softmax over all experts, the best two, renormalised, SwiGLU: x [T, H] -> (experts [T, 2], y [T, H])."""
    x = x.astype(np.float64)
    logits = x @ tensors[f"blk.{layer}.ffn_gate_inp.weight"].T.astype(np.float64)
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    y, chosen = np.zeros_like(x), np.argsort(-logits, axis=1)[:, :2]
    for token, experts in enumerate(chosen):
        for expert in experts:
            gate, up, down = (tensors[f"blk.{layer}.ffn_{role}_exps.weight"][expert].astype(float) for role in ROLES)
            inner = gate @ x[token]
            inner *= (up @ x[token]) / (1 + np.exp(-inner))
            y[token] += scores[token, expert] / scores[token, experts].sum() * (down @ inner)
    return chosen, y


def logits(path, ids, *, base, factors=None):
    """Of every token [T, vocabulary]: all of them anew, no cache. `factors` divide the frequencies of the rotation."""
    tensors = dequantised(path)
    llama = "llama" in path.name
    x = tensors["token_embd.weight"][ids].astype(np.float64)
    for layer in range(sum(name.endswith("attn_norm.weight") for name in tensors)):
        before = norm(x, tensors[f"blk.{layer}.attn_norm.weight"])
        x = x + attention(before, tensors, layer, llama, base, factors)
        x = x + block(norm(x, tensors[f"blk.{layer}.ffn_norm.weight"]), tensors, layer)[1]
    return norm(x, tensors["output_norm.weight"]) @ tensors["output.weight"].T.astype(np.float64)


def greedy(path, ids, steps, **how):
    """Return the likeliest tokens that follow."""
    text = list(ids)
    for _ in range(steps):
        text.append(int(logits(path, text, **how)[-1].argmax()))
    return text[len(ids) :]


def norm(x, weight, eps=1e-6):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + eps) * weight


def turned(x, base, *, interleaved, factors=None):
    """Rotary positions of x [T, heads, WIDTH]: pairs are neighbours, or the halves."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    if factors is not None:
        angle = angle / factors
    cos, sin = np.cos(angle), np.sin(angle)
    one, two = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = np.empty_like(x)
    parts = (out[..., 0::2], out[..., 1::2]) if interleaved else (out[..., :half], out[..., half:])
    parts[0][...], parts[1][...] = one * cos - two * sin, one * sin + two * cos
    return out


def attention(x, tensors, layer, llama, base, factors=None):
    def project(short, heads):
        return (x @ tensors[f"blk.{layer}.attn_{short}.weight"].T.astype(np.float64)).reshape(len(x), heads, WIDTH)

    q, k, v = project("q", HEADS), project("k", GROUPS), project("v", GROUPS)
    if not llama:
        q, k = (norm(each, tensors[f"blk.{layer}.attn_{s}_norm.weight"]) for each, s in ((q, "q"), (k, "k")))
    q, k = (turned(each, base, interleaved=llama, factors=factors) for each in (q, k))
    k, v = (np.repeat(each, HEADS // GROUPS, axis=1) for each in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(WIDTH)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
    return mixed @ tensors[f"blk.{layer}.attn_output.weight"].T.astype(np.float64)
