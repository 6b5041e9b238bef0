"""Rotary embedding against the published formulas, written here a second time in plain Python."""

import cmath
import math
import weakref
from pathlib import Path

import numpy as np
import pytest

from fastcache import moe
from fastcache.errors import UnsupportedCheckpoint
from fastcache.moe.rope import rope_of, rope_parameters, softmax_scale

PLAIN = {"rope_theta": 10000.0, "max_position_embeddings": 4096}
DEEPSEEK_V3 = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def x_of(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def plain(theta, dim):
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def yarn(theta, dim, factor, context, fast, slow, truncate):
    """YaRN's section 3.2: how often a pair turns within the original context decides."""

    def at(turns):
        return dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = at(fast), at(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for i, frequency in enumerate(plain(theta, dim)):
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        out.append(frequency / factor * ramp + frequency * (1 - ramp))
    return out


@pytest.mark.parametrize("dim", [2, 8, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 150000.0, 1e6])
def test_default_frequencies_are_powers_of_theta(theta, dim):
    rope = rope_of({"rope_theta": theta}, dim)
    np.testing.assert_allclose(rope.inv_freq, plain(theta, dim), rtol=3e-7)
    assert rope.inv_freq.dtype == np.float32 and rope.attention_scale == 1.0 and rope.limit is None


def test_linear_divides_every_frequency():
    rope = rope_of({**PLAIN, "rope_scaling": {"type": "linear", "factor": 4.0}}, 64)
    np.testing.assert_allclose(rope.inv_freq, np.array(plain(1e4, 64)) / 4, rtol=3e-7)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    rope = rope_of({"rope_theta": 500000.0, "rope_scaling": LLAMA31}, 128)
    kinds = set()
    for got, frequency in zip(rope.inv_freq, plain(500000.0, 128), strict=True):
        wave = 2 * math.pi / frequency
        if wave < 8192 / 4:
            kind, wanted = "short", frequency
        elif wave > 8192 / 1:
            kind, wanted = "long", frequency / 8
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            kind, wanted = "between", (1 - smooth) * frequency / 8 + smooth * frequency
        kinds.add(kind)
        assert got == pytest.approx(wanted, rel=1e-6)
    assert kinds == {"short", "between", "long"}


@pytest.mark.parametrize(
    ("theta", "dim", "scaling"),
    [
        (10000.0, 64, DEEPSEEK_V3),
        (150000.0, 64, GPT_OSS),
        (50000.0, 64, {**DEEPSEEK_V3, "factor": 32.0, "beta_fast": 1.0}),  # Kimi K2: one pair's edge
        (50000.0, 8, {**DEEPSEEK_V3, "factor": 32.0, "beta_fast": 1.0, "original_max_position_embeddings": 64}),
    ],
)
def test_yarn_is_the_papers_ramp(theta, dim, scaling):
    rope = rope_of({"rope_theta": theta, "max_position_embeddings": 131072, "rope_scaling": scaling}, dim)
    wanted = yarn(
        theta,
        dim,
        scaling["factor"],
        scaling["original_max_position_embeddings"],
        scaling["beta_fast"],
        scaling["beta_slow"],
        scaling.get("truncate", True),
    )
    np.testing.assert_allclose(rope.inv_freq, wanted, rtol=1e-6)
    assert len({round(float(a / b), 6) for a, b in zip(rope.inv_freq, plain(theta, dim), strict=True)}) > 1


def test_untruncated_yarn_is_another_rope():
    config = {"rope_theta": 150000.0, "rope_scaling": GPT_OSS}
    rounded = {"rope_theta": 150000.0, "rope_scaling": {**GPT_OSS, "truncate": True}}
    assert np.abs(rope_of(config, 64).inv_freq / rope_of(rounded, 64).inv_freq - 1).max() > 0.01


def test_yarn_scales_cosines_as_published():
    assert rope_of({"rope_theta": 150000.0, "rope_scaling": GPT_OSS}, 64).attention_scale == pytest.approx(
        0.1 * math.log(32) + 1
    )
    # DeepSeek-V3: both mscales, whose quotient it is; V2 has 0.707 twice.
    assert rope_of({**PLAIN, "rope_scaling": DEEPSEEK_V3}, 64).attention_scale == 1.0
    uneven = {**DEEPSEEK_V3, "mscale": 0.707}
    assert rope_of({**PLAIN, "rope_scaling": uneven}, 64).attention_scale == pytest.approx(
        (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    )
    given = {**GPT_OSS, "attention_factor": 1.5}
    assert rope_of({"rope_theta": 150000.0, "rope_scaling": given}, 64).attention_scale == 1.5


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts():
    scaling = {key: value for key, value in GPT_OSS.items() if key != "factor"}
    config = {"rope_theta": 150000.0, "max_position_embeddings": 131072, "rope_scaling": scaling}
    with_factor = rope_of({"rope_theta": 150000.0, "rope_scaling": GPT_OSS}, 64)
    np.testing.assert_array_equal(rope_of(config, 64).inv_freq, with_factor.inv_freq)


def test_softmax_scale_of_deepseek_v3_is_the_published_one():
    assert softmax_scale({**PLAIN, "rope_scaling": DEEPSEEK_V3}, 192) == pytest.approx(0.1352337788608801, rel=1e-12)
    assert softmax_scale(PLAIN, 192) == pytest.approx(192**-0.5, rel=1e-15)
    assert softmax_scale({**PLAIN, "rope_scaling": GPT_OSS}, 64) == 0.125


def test_both_spellings_are_one_rope():
    old = {**PLAIN, "partial_rotary_factor": 0.5, "rope_scaling": DEEPSEEK_V3}
    new = {
        "max_position_embeddings": 4096,
        "rope_parameters": {
            **{key: value for key, value in DEEPSEEK_V3.items() if key != "type"},
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    a, b = rope_of(old, 64), rope_of(new, 64)
    np.testing.assert_array_equal(a.inv_freq, b.inv_freq)
    assert len(a.inv_freq) == 16
    nested = rope_of({"text_config": new}, 64)
    np.testing.assert_array_equal(nested.inv_freq, b.inv_freq)


def test_parameters_may_differ_by_type_of_layer():
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    }
    np.testing.assert_allclose(rope_of(config, 64, "full_attention").inv_freq, np.array(plain(1e6, 64)) / 8, rtol=3e-7)
    np.testing.assert_allclose(rope_of(config, 64, "sliding_attention").inv_freq, plain(1e4, 64), rtol=3e-7)
    with pytest.raises(UnsupportedCheckpoint, match="full_attention, sliding_attention"):
        rope_of(config, 64)


def test_null_scaling_is_the_default():
    assert rope_parameters({**PLAIN, "rope_scaling": None})["rope_type"] == "default"
    assert rope_parameters({**PLAIN, "rope_scaling": {"type": "default"}})["rope_theta"] == 10000.0


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 7, 100_000])
def test_rotating_is_a_product_of_complex_numbers(interleaved, start):
    rng = np.random.default_rng(1)
    x = x_of(rng, 3, 2, 8)
    rope = rope_of({"rope_theta": 10000.0}, 8, interleaved=interleaved)
    got = rope.rotate(x, start)
    for t in range(3):
        for head in range(2):
            for i in range(4):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
                angle = float(np.float32(start + t) * rope.inv_freq[i])  # float32, as the models do
                z = complex(x[t, head, first], x[t, head, second]) * cmath.exp(1j * angle)
                assert got[t, head, first] == pytest.approx(z.real, abs=1e-6)
                assert got[t, head, second] == pytest.approx(z.imag, abs=1e-6)


def test_interleaved_is_half_split_of_permuted_rows():
    x = x_of(np.random.default_rng(2), 5, 4, 16)
    halves, pairs = rope_of(PLAIN, 16), rope_of(PLAIN, 16, interleaved=True)
    apart = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    wanted = halves.rotate(apart, 3)
    got = pairs.rotate(x, 3)
    np.testing.assert_array_equal(np.concatenate([got[..., 0::2], got[..., 1::2]], axis=-1), wanted)


def test_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(3)
    q, k = x_of(rng, 1, 1, 64), x_of(rng, 1, 1, 64)
    rope = rope_of(PLAIN, 64)
    near = float((rope.rotate(q, 9) * rope.rotate(k, 4)).sum())
    far = float((rope.rotate(q, 1009) * rope.rotate(k, 1004)).sum())
    assert near == pytest.approx(far, abs=1e-3)
    assert abs(near - float((q * k).sum())) > 0.1


def test_what_is_not_rotated_passes_through():
    x = x_of(np.random.default_rng(4), 4, 2, 16)
    got = rope_of({**PLAIN, "partial_rotary_factor": 0.5}, 16).rotate(x, 11)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(got[..., :8], rope_of(PLAIN, 8).rotate(x[..., :8], 11))


def test_rows_in_pieces_are_the_rows_at_once():
    x = x_of(np.random.default_rng(5), 9, 2, 32)
    rope = rope_of({**PLAIN, "rope_scaling": DEEPSEEK_V3}, 32, interleaved=True)
    whole = rope.rotate(x, 100_000)
    pieces = [rope.rotate(x[a:b], 100_000 + a) for a, b in ((0, 1), (1, 5), (5, 9))]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_dynamic_ntk_is_the_default_within_its_context_and_refused_beyond():
    x = x_of(np.random.default_rng(6), 2, 1, 32)
    dynamic = rope_of({**PLAIN, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 32)
    np.testing.assert_array_equal(dynamic.rotate(x, 4094), rope_of(PLAIN, 32).rotate(x, 4094))
    with pytest.raises(ValueError, match="4095 to 4096"):
        dynamic.rotate(x, 4095)


def test_positions_that_float32_cannot_tell_apart_are_refused():
    rope, x = rope_of(PLAIN, 32), np.zeros((2, 1, 32), np.float32)
    rope.rotate(x, (1 << 24) - 2)
    with pytest.raises(ValueError, match="16777216"):
        rope.rotate(x, (1 << 24) - 1)


@pytest.mark.parametrize(
    ("config", "dim", "says"),
    [
        ({**PLAIN, "rope_scaling": {"type": "longrope", "factor": 2.0}}, 64, "longrope"),
        ({**PLAIN, "rope_scaling": {"rope_type": "mrope"}}, 64, "mrope"),
        ({}, 64, "rope_theta"),
        ({"rope_theta": "big"}, 64, "rope_theta"),
        ({"rope_theta": True}, 64, "rope_theta"),
        ({**PLAIN, "rope_scaling": {"type": "linear"}}, 64, "factor"),
        ({**PLAIN, "rope_scaling": {"type": "linear", "factor": -1}}, 64, "factor"),
        ({**PLAIN, "rope_scaling": "linear"}, 64, "not an object"),
        ({**PLAIN, "partial_rotary_factor": 0.3}, 10, "pairs"),
        ({**PLAIN, "partial_rotary_factor": 2.0}, 8, "pairs"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64, "max_position_embeddings"),
        ({"rope_theta": 1e4, "rope_scaling": {**LLAMA31, "high_freq_factor": 1.0}}, 64, "high_freq_factor"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config, dim, says):
    with pytest.raises(UnsupportedCheckpoint, match=says):
        rope_of(config, dim)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"factor": 4.0}, "factor 4.0, and of no kind"),
        ({"rope_type": False}, "rope of kind False"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": "much", "mscale_all_dim": 1.0}, "mscale of the rope is 'much'"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -1}, "mscale_all_dim of the rope is -1"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": [1]}, r"attention_factor of the rope is \[1\]"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}, "attention_factor of the rope is 0"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate of the rope is 'no'"),
        ({"rope_type": "yarn", "factor": 1e300}, "factor of the rope is 1e"),
        ({"rope_theta": 1}, "rope_theta is 1.0; a number above 1"),
        ({"rope_theta": 1e300}, "rope_theta of the rope is 1e"),
    ],
)
def test_parameters_that_are_no_numbers_or_of_no_kind_are_refused_by_name(parameters, said):
    given = {"rope_theta": 1e4, **parameters}
    with pytest.raises(UnsupportedCheckpoint, match=said):
        rope_of({"max_position_embeddings": 64, "rope_parameters": given}, 16)


def test_a_kind_under_the_older_key_counts_where_the_newer_is_null():
    parameters = {"rope_theta": 1e4, "rope_type": None, "type": "linear", "factor": 4.0}
    plain = rope_of({"rope_theta": 1e4}, 16).inv_freq
    np.testing.assert_array_equal(rope_of({"rope_parameters": parameters}, 16).inv_freq, plain / np.float32(4))


def test_ropes_of_the_same_parameters_are_one_and_go_with_the_last_of_them():
    one, other = rope_of({"rope_theta": 12345.0}, 64), rope_of({"rope_theta": 12345.0}, 64)
    assert one is other
    for config, dim, more in (
        ({"rope_theta": 12346.0}, 64, {}),
        ({"rope_theta": 12345.0}, 32, {}),
        ({"rope_theta": 12345.0}, 64, {"interleaved": True}),
        ({"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64, {}),
        (
            {"rope_theta": 12345.0, "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            64,
            {},
        ),
    ):
        assert rope_of(config, dim, **more) is not one
    gone = weakref.ref(one)
    del one, other
    assert gone() is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_all_layers_of_a_model_have_one_rope_and_one_pair_of_tables(family):
    with moe.load(Path(__file__).parent / "data" / family / "bf16", budget="all") as model:
        found = {id(layer.attention._rope): layer.attention._rope for layer in model._layers}
        assert model.layers > 1 and len(found) == 1
        model.forward([1, 2, 3, 4, 5])
        (rope,) = found.values()
        assert rope._last[1].shape == (5, 1, len(rope.inv_freq))
