"""Latent attention against recorded hidden states, and against attention with expanded keys, written out here."""

import math

import numpy as np
import pytest
from recorded import RTOL, case, recorded
from trunks import Rows, trunk_of

from fastcache.errors import MissingTensor, UnsupportedCheckpoint
from fastcache.moe import load_block, mla
from fastcache.moe.ffn import swiglu
from fastcache.moe.mla import mla_of
from fastcache.moe.rope import rope_of
from fastcache.quant.floats import to_float32

PREFIX = "model.layers.3.self_attn."
CONFIG = {
    "num_attention_heads": 3,
    "q_lora_rank": 9,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    },
}
HIDDEN = 16


def rms_norm(x, weight):
    return to_float32(weight) * (x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)))


def weights(*, compressed_query=True, bias=False):
    shapes = {
        "kv_a_proj_with_mqa.weight": (16, HIDDEN),
        "kv_a_layernorm.weight": (12,),
        "kv_b_proj.weight": (3 * 11, 12),
        "o_proj.weight": (HIDDEN, 15),
    }
    if compressed_query:
        shapes |= {"q_a_proj.weight": (9, HIDDEN), "q_a_layernorm.weight": (9,), "q_b_proj.weight": (30, 9)}
    else:
        shapes["q_proj.weight"] = (30, HIDDEN)
    if bias:
        shapes |= {"kv_a_proj_with_mqa.bias": (16,), "o_proj.bias": (HIDDEN,)}
        if compressed_query:
            shapes["q_a_proj.bias"] = (9,)
    rng = np.random.default_rng(7)
    return {PREFIX + name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def hidden(n, seed=8):
    return np.random.default_rng(seed).standard_normal((n, HIDDEN), dtype=np.float32)


def expanded(trunk, x):
    """Attention as the paper's section 2.1 has it, a head and a token at a time, in float64."""
    w = {name.removeprefix(PREFIX): value.astype(np.float64) for name, value in trunk.items()}

    def project(y, name):
        return y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(y, name):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def turn(y, position):
        angle = position * to_float64(rope_of(CONFIG, 4).inv_freq)
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], axis=-1).reshape(y.shape)

    x = x.astype(np.float64)
    if "q_proj.weight" in w:
        q = project(x, "q_proj")
    else:
        q = project(norm(project(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    q = q.reshape(len(x), 3, 10)
    compressed = project(x, "kv_a_proj_with_mqa")
    kv = project(norm(compressed[:, :12], "kv_a_layernorm"), "kv_b_proj").reshape(len(x), 3, 11)
    scale = 10**-0.5 * (0.1 * math.log(4) + 1) ** 2
    out = np.empty((len(x), 3, 5))
    for t in range(len(x)):
        for head in range(3):
            scores = np.array(
                [
                    q[t, head, :6] @ kv[s, head, :6] + turn(q[t, head, 6:], t) @ turn(compressed[s, 12:], s)
                    for s in range(t + 1)
                ]
            )
            p = np.exp(scale * (scores - scores.max()))
            out[t, head] = p / p.sum() @ kv[: t + 1, head, 6:]
    return project(out.reshape(len(x), 15), "o_proj")


def to_float64(array):
    return array.astype(np.float64)


@pytest.mark.parametrize("compressed_query", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_attention_with_expanded_keys(compressed_query, bias):
    trunk, x = weights(compressed_query=compressed_query, bias=bias), hidden(9)
    wanted = expanded(trunk, x)
    got = mla_of({**CONFIG, "q_lora_rank": 9 if compressed_query else None}, trunk, PREFIX)(x, 0, Rows())
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("pieces", [(1,) * 9, (4, 5), (8, 1), (2, 3, 4)])
def test_tokens_in_pieces_are_the_tokens_at_once(pieces):
    trunk, x = weights(), hidden(9)
    whole = mla_of(CONFIG, trunk, PREFIX)(x, 0, Rows())
    attention, cache, start, parts = mla_of(CONFIG, trunk, PREFIX), Rows(), 0, []
    for n in pieces:
        parts.append(attention(x[start : start + n], start, cache))
        start += n
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-6 * np.abs(whole).max())


def test_the_cache_takes_one_row_of_latent_and_rotated_key_a_token():
    cache = Rows()
    mla_of(CONFIG, weights(), PREFIX)(hidden(9), 0, cache)
    (rows,) = cache.kept
    assert rows.shape == (9, 12 + 4) and rows.dtype == np.float32


def test_few_scores_at_a_time_give_the_same(monkeypatch):
    trunk, x = weights(), hidden(9)
    whole = mla_of(CONFIG, trunk, PREFIX)(x, 0, Rows())
    monkeypatch.setattr(mla, "SCORES", 1)  # so one token at a time
    np.testing.assert_allclose(
        mla_of(CONFIG, trunk, PREFIX)(x, 0, Rows()), whole, rtol=0, atol=1e-6 * np.abs(whole).max()
    )


def test_a_later_token_changes_no_earlier_one():
    trunk, x = weights(), hidden(9)
    other = x.copy()
    other[-1] = 100
    attention = mla_of(CONFIG, trunk, PREFIX)
    a, b = attention(x, 0, Rows()), attention(other, 0, Rows())
    np.testing.assert_allclose(a[:-1], b[:-1], rtol=0, atol=1e-6 * np.abs(a).max())
    assert np.abs(a[-1] - b[-1]).max() > 0.1


def test_halves_that_gguf_keeps_apart_are_the_same_weight():
    trunk, x = weights(), hidden(5)
    wanted = mla_of(CONFIG, trunk, PREFIX)(x, 0, Rows())
    both = trunk.pop(f"{PREFIX}kv_b_proj.weight").reshape(3, 11, 12)
    trunk[f"{PREFIX}k_b_proj.weight"] = np.ascontiguousarray(both[:, :6].swapaxes(1, 2))
    trunk[f"{PREFIX}v_b_proj.weight"] = np.ascontiguousarray(both[:, 6:])
    got = mla_of(CONFIG, trunk, PREFIX)(x, 0, Rows())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_half_split_rope_is_another_attention():
    trunk, x = weights(), hidden(9)
    pairs = mla_of(CONFIG, trunk, PREFIX)(x, 0, Rows())
    halves = mla_of({**CONFIG, "rope_interleave": False}, trunk, PREFIX)(x, 0, Rows())
    assert np.abs(pairs - halves).max() > 1e-3
    np.testing.assert_array_equal(pairs, mla_of({**CONFIG, "rope_interleave": True}, trunk, PREFIX)(x, 0, Rows()))


def test_positions_far_away_attend_as_near_ones_do():
    trunk, x = weights(), hidden(6)

    class Shifted(Rows):  # a cache that had 100,000 tokens of which none is looked at
        def append(self, *rows):
            (kept,) = super().append(*rows)
            return (np.concatenate([np.zeros((100_000, kept.shape[1]), np.float32), kept]),)

    rope = rope_of(CONFIG, 4, interleaved=True)
    q, k = (np.random.default_rng(i).standard_normal((1, 1, 4), dtype=np.float32) for i in (1, 2))
    near = float((rope.rotate(q, 5) * rope.rotate(k, 2)).sum())
    far = float((rope.rotate(q, 100_005) * rope.rotate(k, 100_002)).sum())
    assert far == pytest.approx(near, abs=0.05)  # float32 angles
    at_once = mla_of(CONFIG, trunk, PREFIX)(x, 100_000, Shifted())
    cache, parts = Shifted(), []
    for t in range(6):
        parts.append(mla_of(CONFIG, trunk, PREFIX)(x[t : t + 1], 100_000 + t, cache))
    np.testing.assert_allclose(np.concatenate(parts), at_once, rtol=0, atol=2e-6 * np.abs(at_once).max())


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_attention_heads"])
def test_a_config_without_a_size_is_refused_by_name(key):
    with pytest.raises(UnsupportedCheckpoint, match=key):
        mla_of({**CONFIG, key: None}, weights(), PREFIX)


def test_a_weight_of_another_shape_than_the_config_says_is_named():
    trunk = weights()
    trunk[f"{PREFIX}kv_b_proj.weight"] = trunk[f"{PREFIX}kv_b_proj.weight"][:-1]
    with pytest.raises(UnsupportedCheckpoint, match="kv_b_proj"):
        mla_of(CONFIG, trunk, PREFIX)(hidden(2), 0, Rows())


@pytest.mark.parametrize("name", sorted(weights()))
def test_a_missing_tensor_is_named(name):
    trunk = weights()
    del trunk[name]
    with pytest.raises(MissingTensor, match=name.replace(".", r"\.")):
        mla_of(CONFIG, trunk, PREFIX)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_a_layer_equals_the_recorded_one(family, stored):
    path = case(family)
    layout, trunk = trunk_of(path / stored)
    full = recorded(path)
    last = layout.config["num_hidden_layers"] - 1
    for layer in range(last + 1):
        prefix, h = f"model.layers.{layer}.", full[f"hidden.{layer}"]
        attention = mla_of(layout.config, trunk, f"{prefix}self_attn.")
        h = h + attention(rms_norm(h, trunk[f"{prefix}input_layernorm.weight"]), 0, Rows())
        x = rms_norm(h, trunk[f"{prefix}post_attention_layernorm.weight"])
        if layer in layout.layers:
            h = h + load_block(layout, layer, "resident")(x)
        else:
            h = h + swiglu(x, {role: trunk[f"{prefix}mlp.{role}_proj.weight"] for role in ("gate", "up", "down")})
        if layer == last:
            h = rms_norm(h, trunk["model.norm.weight"])
        wanted = full[f"hidden.{layer + 1}"]
        np.testing.assert_allclose(h, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
