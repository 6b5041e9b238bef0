"""The NumPy MoE block equals what transformers recorded, from any store, in any order of arrival."""

import numpy as np
import pytest
from recorded import RTOL, case, recorded
from shuffled import Shuffled

from fastcache.errors import UnknownExpert
from fastcache.layout.build import build_layout
from fastcache.layout.families import FAMILIES as LAYOUTS
from fastcache.moe import ResidentExperts, load_block
from fastcache.moe.families import FORWARDS

FAMILIES = (
    "dbrx",
    "ernie4_5_moe",
    "glm4_moe",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2_moe",
    "llama4_text",
    "minimax_m2",
    "phimoe",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "gpt_oss",
    "granitemoe",
)


def moe_layers(path):
    return sorted({int(name[1:].split(".")[0]) for name in recorded(path, "block")})


ENCODED = [("gpt_oss_mxfp4", "mxfp4"), ("deepseek_v3_fp8", "fp8")]
CASES_OF = [(family, stored) for family in FAMILIES for stored in ("f32", "bf16")] + ENCODED
cases = pytest.mark.parametrize(("family", "stored"), CASES_OF)


@cases
def test_a_block_equals_the_recorded_one(family, stored):
    path = case(family, "block")
    data = recorded(path, "block")
    layout = build_layout(path / stored)
    assert list(layout.layers) == moe_layers(path)
    for layer in layout.layers:
        block = load_block(layout, layer, experts="resident")
        x, y = data[f"L{layer}.x"], data[f"L{layer}.y"]
        assert (block.layer, block.family) == (layer, layout.family)
        logits = data[f"L{layer}.router_logits"]
        np.testing.assert_allclose(block.router_logits(x), logits, rtol=0, atol=RTOL * np.abs(logits).max())
        experts, weights = block.route(x)
        assert experts.dtype == np.int64 and weights.dtype == np.float32
        wanted = data[f"L{layer}.topk_index"]
        assert experts.shape == wanted.shape == (len(x), block.top_k)
        ours, theirs = np.argsort(experts), np.argsort(wanted)
        np.testing.assert_array_equal(np.take_along_axis(experts, ours, 1), np.take_along_axis(wanted, theirs, 1))
        theirs = np.take_along_axis(data[f"L{layer}.topk_weight"], theirs, 1)
        np.testing.assert_allclose(np.take_along_axis(weights, ours, 1), theirs, rtol=RTOL)
        got = block(x)
        assert got.dtype == np.float32 and got.shape == y.shape
        np.testing.assert_allclose(got, y, rtol=0, atol=RTOL * np.abs(y).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_and_bfloat16_files_of_the_same_weights_give_the_same_bits(family):
    path = case(family, "block")
    for layer in moe_layers(path):
        x = recorded(path, "block")[f"L{layer}.x"]
        blocks = [load_block(path / stored, layer, experts="resident") for stored in ("f32", "bf16")]
        assert blocks[0](x).tobytes() == blocks[1](x).tobytes()
        assert blocks[0](x[:1]).tobytes() == blocks[1](x[:1]).tobytes()


@cases
def test_arrival_order_never_changes_a_bit(family, stored):
    path = case(family, "block")
    layout = build_layout(path / stored)
    layer = moe_layers(path)[-1]
    x = recorded(path, "block")[f"L{layer}.x"]
    wanted = load_block(layout, layer, experts="resident")(x).tobytes()
    for seed in range(5):
        store = Shuffled(layout, layer, seed)
        block = load_block(layout, layer, experts=store)
        assert block(x).tobytes() == wanted
        assert store.asked == [(layer, sorted(set(block.route(x)[0].flat)))]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_resident_arrays_are_read_only_aligned_and_strided_as_the_layout_says(family):
    layout = build_layout(case(family, "block") / "bf16")
    for layer, located in layout.layers.items():
        resident = ResidentExperts(layout, layer)
        assert len(resident) == len(located)
        for view in located.records[0].views:
            array = resident.acquire(layer, len(located) - 1)[view.label]
            assert (array.dtype, array.shape, array.strides) == (view.dtype, view.shape, view.strides)
            assert array.flags.aligned and not array.flags.writeable


def test_a_dense_layer_is_an_unknown_expert_that_names_the_others():
    with pytest.raises(UnknownExpert, match=r"layer 1 .*0, 2"):
        load_block(case("qwen3_moe", "block") / "f32", 1, experts="resident")


def test_every_forward_has_a_layout_and_every_recorded_case_a_forward():
    assert set(FORWARDS) <= {family.name for family in LAYOUTS}
    assert set(FORWARDS) >= set(FAMILIES) - {"kimi_k2"}  # which is a deepseek_v3
