"""layout on checkpoints that transformers wrote: each label holds what the reference reader finds under its name."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import expert_views

from fastcache.errors import CheckpointError, UnsupportedCheckpoint
from fastcache.layout.build import build_layout
from fastcache.moe import load_block

DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
OURS = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "oracle" / "cases"
PROJ = {"gate": "mlp.experts.{}.gate_proj", "up": "mlp.experts.{}.up_proj", "down": "mlp.experts.{}.down_proj"}
W123 = {role: f"block_sparse_moe.experts.{{}}.{w}" for role, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
AS_QWEN = ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "ernie4_5_moe")
SPLIT = {  # family -> stored module of each role
    **dict.fromkeys(("mixtral", "phimoe", "minimax_m2"), W123),
    **dict.fromkeys((*AS_QWEN, "hunyuan_v1_moe"), PROJ),
    "jamba": {role: name.replace("mlp", "feed_forward") for role, name in PROJ.items()},
    "lfm2_moe": {role: name.replace("block_sparse_moe", "feed_forward") for role, name in W123.items()},
}
FUSED = ("gpt_oss", "granitemoe", "llama4_text", "dbrx")
CASES = [(family, kind) for family in (*SPLIT, *FUSED) for kind in ("f32", "bf16")]
MOE_LAYERS = {
    "qwen3_moe": [0, 2],
    "jamba": [1, 3],
    **{name: [1, 2] for name in ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "ernie4_5_moe", "lfm2_moe")},
}


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
            for label, array in expected(family, full, prefix(family, layer), expert).items():
                same(views.pop(label), array)
            assert not views
            assert not experts.records[0].refused


def prefix(family, layer):
    return f"transformer.blocks.{layer}." if family == "dbrx" else f"model.layers.{layer}."


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
    if family == "llama4_text":
        both = full[layer + "feed_forward.experts.gate_up_proj"][e]
        down = full[layer + "feed_forward.experts.down_proj"][e]
        half = both.shape[1] // 2
        named = {"gate_up_proj": both, "down_proj": down}
        return {"gate": both[:, :half].T, "up": both[:, half:].T, "down": down.T, **named}
    if family == "dbrx":
        named = {f"mlp.{w}": full[f"{layer}ffn.experts.mlp.{w}"] for w in ("w1", "v1", "w2")}
        named = {name: rows[len(rows) // 8 * e : len(rows) // 8 * (e + 1)] for name, rows in named.items()}
        return {"gate": named["mlp.w1"], "up": named["mlp.v1"], "down": named["mlp.w2"].T, **named}
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


def unknown(path, to):
    """Return a copy of the checkpoint whose config says a model_type that has no row."""
    for file in path.iterdir():
        (to / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (to / "config.json").unlink()
    (to / "config.json").write_text(json.dumps({**config, "model_type": "made_up"}))
    return to


@pytest.mark.parametrize("family", [*SPLIT, *FUSED])
def test_a_family_without_a_row_is_served_as_unknown(family, tmp_path):
    layout = build_layout(case(family, "f32"))
    served = build_layout(unknown(case(family, "f32"), tmp_path))
    assert served.family == "unknown"
    assert list(served.layers) == list(layout.layers)
    assert served.trunk.keys() == layout.trunk.keys()
    for layer in served.layers:
        for expert in range(8):
            views, known = expert_views(served, layer, expert), expert_views(layout, layer, expert)
            if set(SPLIT.get(family, {}).values()) & {*PROJ.values(), *SPLIT["jamba"].values()}:
                assert list(views) == ["gate", "up", "down"]  # as the names say
            elif family in SPLIT:
                assert set(views) == {"w1.weight", "w2.weight", "w3.weight"}
                known = {"w1.weight": known["gate"], "w3.weight": known["up"], "w2.weight": known["down"]}
            else:
                assert not set(views) & {"gate", "up", "down"}
            for label, array in views.items():
                same(array, known[label])
    with pytest.raises(UnsupportedCheckpoint, match="forward is not available for the family 'unknown'"):
        load_block(served, next(iter(served.layers)), experts="resident")


def test_what_all_experts_share_in_two_dimensions_is_cut_by_the_config_alone(tmp_path):
    path = unknown(case("dbrx", "f32"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    for model_type in ("dbrx", "made_up"):
        (path / "config.json").write_text(json.dumps({**config, "model_type": model_type, "ffn_config": {}}))
        with pytest.raises(CheckpointError, match="layer 0: mlp.* holds all experts.*does not say how many"):
            build_layout(path)
    (path / "config.json").write_text(json.dumps({**config, "ffn_config": {"moe_num_experts": 7}}))
    with pytest.raises(CheckpointError, match=r"layer 0: rows of .*mlp.w1 \[256, 64\].* are no multiple of 7 experts"):
        build_layout(path)


def test_the_recorded_numbers_are_there():
    for family in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"):
        with np.load(OURS / family / "block.npz") as recorded:
            assert recorded.files
