"""layout on checkpoints that transformers wrote: each label holds what the reference reader finds under its name."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import expert_views

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.build import build_layout

DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
OURS = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "oracle" / "cases"
PROJ = {"gate": "mlp.experts.{}.gate_proj", "up": "mlp.experts.{}.up_proj", "down": "mlp.experts.{}.down_proj"}
W123 = {role: f"block_sparse_moe.experts.{{}}.{w}" for role, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
SPLIT = {  # family -> stored module of each role
    "mixtral": W123,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2"), PROJ),
}
CASES = [(family, kind) for family in (*SPLIT, "gpt_oss", "granitemoe") for kind in ("f32", "bf16")]
MOE_LAYERS = {"qwen3_moe": [0, 2], "deepseek_v2": [1, 2], "deepseek_v3": [1, 2], "kimi_k2": [1, 2]}


def case(family, kind):
    for root in (OURS, SHARED):
        if (root / family / kind).is_dir():
            return root / family / kind
    pytest.skip(f"no {family}/{kind} in tests/data or ../shared/oracle/cases")


def stored(path):
    """Read everything with the reference reader, which has no names for the types that numpy lacks."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(file.read_bytes()):
            found[name] = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return found


def same(view, array):
    assert view.shape == array.shape
    assert view.dtype == array.dtype
    assert view.tobytes() == array.tobytes()


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_each_label_is_the_tensor_that_the_reference_reads(family, kind):
    path = case(family, kind)
    layout, full = build_layout(path), stored(path)
    assert layout.family == ("deepseek_v3" if family == "kimi_k2" else family)
    assert list(layout.layers) == MOE_LAYERS.get(family, [0, 1])
    for layer, experts in layout.layers.items():
        assert len(experts) == 8
        for expert in range(8):
            views = expert_views(layout, layer, expert)
            for label, array in expected(family, full, f"model.layers.{layer}.", expert).items():
                same(views.pop(label), array)
            assert not views
            assert not experts.records[0].refused


def expected(family, full, layer, e):
    if family == "gpt_oss":
        block = layer + "mlp.experts."
        gate_up, bias = full[block + "gate_up_proj"][e], full[block + "gate_up_proj_bias"][e]
        down, down_bias = full[block + "down_proj"][e], full[block + "down_proj_bias"][e]
        return {
            "gate": gate_up[:, 0::2].T,
            "up": gate_up[:, 1::2].T,
            "down": down.T,
            "gate.bias": bias[0::2],
            "up.bias": bias[1::2],
            "down.bias": down_bias,
            "gate_up_proj": gate_up,
            "gate_up_proj_bias": bias,
            "down_proj": down,
            "down_proj_bias": down_bias,
        }
    if family == "granitemoe":
        both = full[layer + "block_sparse_moe.input_linear.weight"][e]
        down = full[layer + "block_sparse_moe.output_linear.weight"][e]
        half = len(both) // 2
        named = {"input_linear.weight": both, "output_linear.weight": down}
        return {"gate": both[:half], "up": both[half:], "down": down, **named}
    return {role: full[f"{layer}{name.format(e)}.weight"] for role, name in SPLIT[family].items()}


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_experts_and_trunk_share_out_every_tensor(family, kind):
    path = case(family, kind)
    layout, full = build_layout(path), stored(path)
    routed = {name for name in full if ".experts." in name or "_linear." in name}
    assert set(layout.trunk) == full.keys() - routed
    for name, info in layout.trunk.items():
        with open(layout.files[info.file], "rb") as file:
            file.seek(info.offset)
            assert file.read(info.nbytes) == full[name].tobytes()


def test_mixtral_experts_come_from_several_shards():
    layout = build_layout(case("mixtral", "f32"))
    assert len(layout.files) == 9
    spread = [len(set(row)) > 1 for experts in layout.layers.values() for row in experts.file.tolist()]
    assert spread == [True] * 16


def test_float8_is_served_under_role_and_suffix():
    path = case("deepseek_v3_fp8", "fp8")
    layout, full = build_layout(path), stored(path)
    for expert in range(8):
        views = expert_views(layout, 1, expert)
        for role in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.{expert}.{role}_proj.weight"
            same(views.pop(f"{role}.weight"), full[name])
            same(views.pop(f"{role}.weight_scale_inv"), full[name + "_scale_inv"])
        assert not views
    assert set(layout.layers[1].records[0].refused) == {"gate", "up", "down"}


def test_mxfp4_is_served_as_stored_and_its_biases_are_plain():
    path = case("gpt_oss_mxfp4", "mxfp4")
    layout, full = build_layout(path), stored(path)
    for expert in range(8):
        views = expert_views(layout, 0, expert)
        block = "model.layers.0.mlp.experts."
        for name in ("gate_up_proj", "down_proj"):
            for part in ("_blocks", "_scales", "_bias"):
                same(views[name + part], full[block + name + part][expert])
        same(views["up.bias"], full[block + "gate_up_proj_bias"][expert, 1::2])
    refused = layout.layers[0].records[0].refused
    assert '"down_proj_blocks" (U8), "down_proj_scales" (U8): use fastcache.linear(x, lease, "down")' in refused["down"]


@pytest.mark.parametrize(
    ("family", "labels"),
    [
        ("lfm2_moe", {"w1.weight", "w2.weight", "w3.weight"}),
        ("minimax_m2", {"w1.weight", "w2.weight", "w3.weight"}),
        ("llama4_text", {"gate_up_proj", "down_proj"}),
        ("jamba", {"gate", "up", "down"}),
        ("glm4_moe", {"gate", "up", "down"}),
    ],
)
def test_a_family_without_a_row_is_served_as_unknown(family, labels):
    path = case(family, "f32")
    layout, full = build_layout(path), stored(path)
    assert layout.family == "unknown"
    layer = next(iter(layout.layers))
    for expert in range(8):
        views = expert_views(layout, layer, expert)
        assert set(views) == labels
        if family == "llama4_text":
            same(views["down_proj"], full[f"model.layers.{layer}.feed_forward.experts.down_proj"][expert])


def test_a_family_whose_experts_are_stacked_in_two_dimensions_is_refused():
    with pytest.raises(UnsupportedCheckpoint, match="no routed experts.*'dbrx'"):
        build_layout(case("dbrx", "f32"))


def test_the_recorded_numbers_are_there():
    for family in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"):
        with np.load(OURS / family / "block.npz") as recorded:
            assert recorded.files
