"""GGUF files that were made with transformers' logits beside them: experts, blocks and whole models, streamed."""

import functools
from pathlib import Path

import gguf as package
import numpy as np
import pytest

import fastcache
from fastcache.layout.build import build_layout
from fastcache.moe import load_block
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.floats import to_float32

PLACES = (Path(__file__).parent / "data" / "gguf", Path(__file__).parents[2] / "shared" / "oracle" / "gguf")
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4", "q4_k_m", "q5_k", "q2_k", "iq4")
FILES = [f"{arch}-{kind}" for arch in ("llama", "qwen3moe") for kind in KINDS]
ROLES = ("gate", "up", "down")
RTOL = 1e-5
files = pytest.mark.parametrize("name", FILES)


def case(name):
    for place in PLACES:
        if (place / f"{name}.gguf").exists():
            return place / f"{name}.gguf"
    pytest.skip(f"no {name} in tests/data/gguf or ../shared/oracle/gguf")


@functools.cache
def dequantised(path):
    """Every tensor as float32, by the package's own reader and code."""
    return {each.name: package.dequantize(each.data, each.tensor_type) for each in package.GGUFReader(path).tensors}


def as_float32(lease, role):
    stored = lease[role] if role in list(lease) else lease[f"{role}.weight"]
    return blocks_to_float32(stored) if is_blocks(stored.dtype) else to_float32(stored)


@files
def test_experts_dequantise_to_the_packages_bits(name, engine):
    path = case(name)
    wanted = dequantised(path)
    with np.load(path.with_suffix(".npz")) as recorded, fastcache.open(path, engine=engine, budget="2 cycles") as store:
        assert store.family == {"llama": "mixtral", "qwen3moe": "qwen3_moe"}[name.partition("-")[0]]
        assert store.top_k == 2
        for layer in store.layers:
            for expert in store.experts(layer):
                lease = store[layer, expert]
                for role in ROLES:
                    ours, tensor = as_float32(lease, role), f"blk.{layer}.ffn_{role}_exps.weight"
                    assert ours.tobytes() == wanted[tensor][expert].tobytes()
                    ends = f"expert.{tensor}.ends"  # first and last row of the first and last expert
                    if ends in recorded and expert in (0, store.experts(layer)[-1]):
                        assert ours[[0, -1]].tobytes() == recorded[ends][0 if expert == 0 else 1].tobytes()


def reference(x, tensors, layer):
    """The block in float64: softmax over all experts, the best two, renormalised, SwiGLU."""
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


@files
def test_a_streamed_block_equals_the_dequantised_one(name):
    path = case(name)
    layout = build_layout(path)
    with fastcache.open(path, budget=0) as nothing, fastcache.open(path, budget="all") as everything:
        for layer in layout.layers:
            resident = load_block(layout, layer, experts="resident")
            x = np.random.default_rng(layer).standard_normal((12, resident.hidden), np.float32)
            chosen, wanted = reference(x, dequantised(path), layer)
            got = resident(x)
            np.testing.assert_array_equal(np.sort(resident.route(x)[0]), np.sort(chosen))
            np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
            for store in (nothing, everything):
                assert load_block(layout, layer, experts=store)(x).tobytes() == got.tobytes()


def norm(x, weight, eps=1e-6):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + eps) * weight


def turned(x, base, *, interleaved):
    """Rotary positions of x [T, heads, 32]: pairs are neighbours, or the halves."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    one, two = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = np.empty_like(x)
    parts = (out[..., 0::2], out[..., 1::2]) if interleaved else (out[..., :half], out[..., half:])
    parts[0][...], parts[1][...] = one * cos - two * sin, one * sin + two * cos
    return out


def attention(x, tensors, layer, llama, base):
    def project(short, heads):
        return (x @ tensors[f"blk.{layer}.attn_{short}.weight"].T).reshape(len(x), heads, 32)

    q, k, v = project("q", 4), project("k", 2), project("v", 2)
    if not llama:
        q, k = (norm(each, tensors[f"blk.{layer}.attn_{s}_norm.weight"]) for each, s in ((q, "q"), (k, "k")))
    q, k = (turned(each, base, interleaved=llama) for each in (q, k))
    k, v = (np.repeat(each, 2, axis=1) for each in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(32)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
    return mixed @ tensors[f"blk.{layer}.attn_output.weight"].T


@files
def test_a_whole_model_with_streamed_experts_gives_the_recorded_logits(name):
    path = case(name)
    tensors = {key: value.astype(np.float64) for key, value in dequantised(path).items() if "_exps" not in key}
    with np.load(path.with_suffix(".npz")) as recorded:
        ids, wanted = recorded["input_ids"], recorded["logits"]
    layout = build_layout(path)
    base = layout.config["gguf"][f"{name.partition('-')[0]}.rope.freq_base"]
    x = tensors["token_embd.weight"][ids]
    with fastcache.open(layout, budget="1 cycles") as store:
        for layer in layout.layers:
            before = norm(x, tensors[f"blk.{layer}.attn_norm.weight"])
            x = x + attention(before, tensors, layer, "llama" in name, base)
            x = x + load_block(layout, layer, experts=store)(norm(x, tensors[f"blk.{layer}.ffn_norm.weight"]))
    logits = norm(x, tensors["output_norm.weight"]) @ tensors["output.weight"].T
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
    np.testing.assert_array_equal(logits.argmax(axis=1), wanted.argmax(axis=1))
