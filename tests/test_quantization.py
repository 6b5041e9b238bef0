"""Checkpoints whose experts are codes with scales: config.json's word reaches `linear`, from a store as from memory."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import moe_dir, name_of, qwen
from codes import float8, mxfp4_packed, nvfp4, nvfp4_of_modelopt, packed_integers
from recorded import SHARED, case

import fastcache
from fastcache.errors import CheckpointError, UnsupportedCheckpoint
from fastcache.formats.scheme import Scheme, schemes_of
from fastcache.layout.build import build_layout
from fastcache.layout.quantization import Quantization
from fastcache.moe import ResidentExperts, load_block
from fastcache.moe.trunk import layer_tensor
from fastcache.quant.coded import coded_weight

STORED = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int32": "I32"}
STORED |= {"int64": "I64", "float16": "F16", "int8": "I8"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def compressed(weights, form="pack-quantized", **more):
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


def schemes(config, stored):
    return schemes_of(Quantization({"quantization_config": config}).carrier(stored, np.dtype(np.uint8)))


@pytest.mark.parametrize(
    ("config", "stored", "wanted"),
    [
        (FP8, "F8_E4M3", (Scheme((16, 24)),)),
        (FP8, "BF16", ()),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "F8_E4M3", ()),
        ({"quant_method": "fp8", "weight_block_size": None}, "F8_E5M2", ()),
        ({"quant_method": "fbgemm_fp8"}, "F8_E4M3", ()),
        ({"quant_method": "mxfp4"}, "U8", ()),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "F8_E4M3", ()),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "U8", ()),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "U8", ()),
        (compressed([INT4]), "I32", (Scheme((1, 32), 4),)),
        (compressed([INT4]), "BF16", ()),
        (compressed([{**INT4, "symmetric": False, "group_size": 128}]), "I32", (Scheme((1, 128), 4, True),)),
        (compressed([{**INT4, "strategy": None, "group_size": -1}]), "I32", (Scheme((1, 0), 4),)),
        (compressed([INT4, {**INT4, "num_bits": 8}]), "I32", (Scheme((1, 32), 4), Scheme((1, 32), 8))),
        (compressed([INT4, INT4]), "I32", (Scheme((1, 32), 4),)),
        (compressed([{"num_bits": 8, "type": "float", "strategy": "channel"}]), "F8_E4M3", (Scheme((1, 0), 8),)),
        (compressed([{"num_bits": 8, "type": "float", "strategy": "tensor"}]), "F8_E4M3", (Scheme((0, 0), 8),)),
        (
            compressed([{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}]),
            "F8_E4M3",
            (Scheme((128, 128), 8),),
        ),
        (
            compressed([{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}]),
            "F8_E4M3",
            (Scheme((128, 64), 8),),
        ),
        (
            compressed(
                [{"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}], "mxfp4-pack-quantized"
            ),
            "U8",
            (Scheme((1, 32), 4),),
        ),
        (compressed([{"num_bits": 4, "type": "float"}]), "I32", ()),
        ({}, "F8_E4M3", ()),
    ],
)
def test_a_config_says_by_which_schemes_a_stored_type_is_coded(config, stored, wanted):
    assert schemes(config, stored) == wanted


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quantization_config.quant_method is 'hqq'"),
        ({"quant_method": "gptq", "bits": 4}, "gptq has a qweight"),
        ({"quant_method": "awq", "bits": 4}, "awq has a qweight"),
        ({"bits": 4}, "quantization_config.quant_method is None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"quantization_config.weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "quantization_config.config_groups is None"),
        (compressed([INT4], "marlin-24"), "quantization_config.format is 'marlin-24'"),
        (compressed([INT4], transform_config={"R1": {}}), "quantization_config.transform_config"),
        (compressed([{**INT4, "strategy": "token"}]), "config_groups.group_0.weights.strategy is 'token'"),
        (compressed([{**INT4, "group_size": None}]), "config_groups.group_0.weights.strategy is 'group'"),
        (compressed([{**INT4, "strategy": "block"}]), "config_groups.group_0.weights.strategy is 'block'"),
    ],
)
def test_an_unsupported_scheme_names_the_config_key_and_the_bytes_are_served(config, said, tmp_path):
    path = write(tmp_path, [lambda rng, shape: packed_integers(rng, shape, 32)], config)[0]
    layout = build_layout(path)
    with pytest.raises(UnsupportedCheckpoint, match=said):
        load_block(layout, 0, experts="resident")
    with fastcache.open(path, "all") as store:
        lease = store[0, 1]
        assert lease["gate.weight_packed"].dtype == np.int32
        with pytest.raises(UnsupportedCheckpoint, match=said):
            fastcache.linear(np.zeros((1, HIDDEN), np.float32), lease, "gate")


def test_the_config_of_a_model_that_also_sees_is_found():
    inner = {"text_config": {"quantization_config": FP8}}
    assert schemes_of(Quantization(inner).carrier("F8_E4M3", np.dtype(np.uint8))) == (Scheme((16, 24)),)


HIDDEN, INTER, N_EXPERTS = 96, 64, 4


def entries_of(name, arrays):
    """Return entries of a safetensors file for arrays "up.weight...", under another name than "up"."""
    return [
        (name.format(label.removeprefix("up.")), STORED[array.dtype.name], array.shape, array.tobytes())
        for label, array in arrays.items()
    ]


def plain(rng, shape):
    weight = (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)
    return {"up.weight": weight}, weight.astype(np.float32)


def write(path, makers, config):
    """Write a qwen3_moe checkpoint, layer l by makers[l], and its twin in float32."""
    coded, twin = [], []
    for layer, make in enumerate(makers):
        rng = np.random.default_rng(layer)
        router = rng.standard_normal((N_EXPERTS, HIDDEN), np.float32)
        entry = (f"model.layers.{layer}.mlp.gate.weight", "F32", router.shape, router.tobytes())
        coded.append(entry)
        twin.append(entry)
        for expert in range(N_EXPERTS):
            for module in ("gate_proj", "up_proj", "down_proj"):
                shape = (HIDDEN, INTER) if module == "down_proj" else (INTER, HIDDEN)
                arrays, weight = make(rng, shape)
                coded += entries_of(name_of(layer, expert, module, "{}"), arrays)
                twin += entries_of(name_of(layer, expert, module, "{}"), {"up.weight": weight})
    settings = qwen(N_EXPERTS, len(makers))
    return (
        moe_dir(path / "coded", [coded[::2], coded[1::2]], {**settings, "quantization_config": config}),
        moe_dir(path / "twin", [twin], settings),
    )


MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "a": {"format": "pack-quantized", "weights": INT4},
        "b": {"format": "pack-quantized", "weights": {**INT4, "group_size": 16, "symmetric": False}},
        "c": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        "d": {
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 40]},
        },
        "e": {"format": "mxfp4-pack-quantized", "weights": {**INT4, "type": "float"}},
        "f": {"format": "nvfp4-pack-quantized", "weights": {**INT4, "type": "float", "group_size": 16}},
    },
}
MAKERS = {
    "int4": lambda rng, shape: packed_integers(rng, shape, 32),
    "int4 with zero points": lambda rng, shape: packed_integers(rng, shape, 16, symmetric=False),
    "float8 by row": lambda rng, shape: float8(rng, shape, (1, shape[1]), suffix="weight_scale"),
    "float8 in ragged blocks": lambda rng, shape: float8(rng, shape, (24, 40), suffix="weight_scale"),
    "mxfp4": mxfp4_packed,
    "nvfp4": nvfp4,
    "bf16": plain,
}


def test_a_model_whose_layers_are_stored_in_seven_ways_is_the_same_from_a_store_and_from_memory(tmp_path):
    path, twin = write(tmp_path, MAKERS.values(), MIXED)
    layout = build_layout(path)
    assert list(layout.layers) == list(range(len(MAKERS)))
    x = np.random.default_rng(9).standard_normal((5, HIDDEN), np.float32)
    with fastcache.open(path, "64K") as store:
        for layer in layout.layers:
            resident, streamed = load_block(layout, layer, "resident"), load_block(layout, layer, store)
            wanted = load_block(twin, layer, "resident")(x)
            got = resident(x)
            assert streamed(x).tobytes() == got.tobytes()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
            lease, twins = store[layer, 2], ResidentExperts(build_layout(twin), layer).acquire(layer, 2)
            copies = lease.copy()
            for role in ("gate", "up", "down"):
                if role not in lease:
                    assert coded_weight(lease, role).dense().tobytes() == twins[role].tobytes()
                    with pytest.raises(KeyError, match="fastcache.linear"):
                        lease[role]
                y = fastcache.linear(np.ones(twins[role].shape[1], np.float32), lease, role)
                assert (
                    fastcache.linear(np.ones(twins[role].shape[1], np.float32), copies, role).tobytes() == y.tobytes()
                )


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_experts_of_modelopt_in_nvfp4_are_what_they_stand_for(method, tmp_path):
    path, twin = write(tmp_path, [nvfp4_of_modelopt, plain], {"quant_method": method, "quant_algo": "NVFP4"})
    x = np.random.default_rng(9).standard_normal((5, HIDDEN), np.float32)
    with fastcache.open(path, "64K") as store:
        assert set(store[0, 1]) >= {"gate.weight", "gate.weight_scale", "gate.weight_scale_2", "gate.input_scale"}
        for layer in (0, 1):
            got, wanted = load_block(path, layer, "resident")(x), load_block(twin, layer, "resident")(x)
            assert load_block(path, layer, store)(x).tobytes() == got.tobytes()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.19.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.mlp.gate"],
    },
}


def test_modelopts_own_file_is_read_where_config_json_is_silent(tmp_path):
    path = write(tmp_path, [nvfp4_of_modelopt, plain], {"quant_method": "modelopt", "quant_algo": "NVFP4"})[0]
    x = np.random.default_rng(9).standard_normal((5, HIDDEN), np.float32)
    wanted = load_block(path, 0, "resident")(x).tobytes()
    config, apart = path / "config.json", path / "hf_quant_config.json"
    settings = json.loads(config.read_text())
    said = settings.pop("quantization_config")
    config.write_text(json.dumps(settings))
    apart.write_text(json.dumps(HF_QUANT))
    assert build_layout(path).config["quantization_config"] == {**HF_QUANT["quantization"], "quant_method": "modelopt"}
    assert load_block(path, 0, "resident")(x).tobytes() == wanted
    for other, key in (
        (
            {"quantization": {"quant_algo": "W4A8_AWQ", "group_size": 128}},
            "quantization_config.quant_algo is 'W4A8_AWQ'",
        ),
        ({**HF_QUANT, "producer": {"name": "another"}}, "quantization_config.quant_method is 'another'"),
    ):
        apart.write_text(json.dumps(other))
        with pytest.raises(UnsupportedCheckpoint, match=key):
            load_block(path, 0, "resident")
        config.write_text(json.dumps({**settings, "quantization_config": said}))  # whose word wins
        assert load_block(path, 0, "resident")(x).tobytes() == wanted
        config.write_text(json.dumps(settings))
    for text in ("{", "[]", "{}", '{"quantization": "NVFP4"}', '{"quantization": {}, "producer": "modelopt"}'):
        apart.write_text(text)
        with pytest.raises(CheckpointError, match=r"hf_quant_config\.json"):
            build_layout(path)


@pytest.mark.parametrize(("family", "stored"), [("gpt_oss_mxfp4", "mxfp4"), ("deepseek_v3_fp8", "fp8")])
def test_dequantised_weights_are_those_of_the_reference_bit_for_bit(family, stored):
    path = SHARED / "cases" / family
    if not (path / "dequant.npz").exists():
        pytest.skip(f"{path / 'dequant.npz'} is not there")
    with np.load(path / "dequant.npz") as file:
        wanted = dict(file)
    layout, layer = build_layout(path / stored), int(wanted["layer"])
    expert = ResidentExperts(layout, layer).acquire(layer, 3)
    gate, up, down = (coded_weight(expert, role).dense() for role in ("gate", "up", "down"))
    if family == "gpt_oss_mxfp4":  # [in, out], gate and up in turn
        assert np.stack([gate, up], 1).reshape(-1, gate.shape[1]).T.tobytes() == wanted["gate_up_proj"].tobytes()
        assert down.T.tobytes() == wanted["down_proj"].tobytes()
        for role in ("gate", "up"):
            assert (expert[f"{role}.bias"] == wanted["gate_up_proj_bias"][role == "up" :: 2]).all()
    else:
        assert np.concatenate([gate, up]).tobytes() == wanted["gate_up_proj"].tobytes()
        assert down.tobytes() == wanted["down_proj"].tobytes()


def test_every_expert_of_gpt_oss_keeps_its_stored_tensors_beside_the_rows_of_each_role():
    path = case("gpt_oss_mxfp4", "block") / "mxfp4"
    with fastcache.open(path, "all") as store:
        lease = store[0, 5]
        assert (lease["gate.blocks"] == lease["gate_up_proj_blocks"][::2]).all()
        assert (lease["up.blocks"] == lease["gate_up_proj_blocks"][1::2]).all()
        assert (lease["up.scales"] == lease["gate_up_proj_scales"][1::2]).all()
        assert (lease["down.blocks"] == lease["down_proj_blocks"]).all()
        assert np.shares_memory(lease["up.blocks"], lease["gate_up_proj_blocks"])


def test_trunk_tensors_are_decoded_ragged_blocks_and_longer_prefixes_included(tmp_path):
    rng = np.random.default_rng(0)
    ragged, wanted = float8(rng, (72, 40), (16, 24))
    packed, integers = packed_integers(rng, (24, 32), 32)
    extra = entries_of("language_model.model.layers.0.self_attn.kv_a_proj.{}", ragged)
    layout = build_layout(moe_dir(tmp_path / "both", [routed(), extra], {**qwen(4, 1), "quantization_config": FP8}))
    assert layer_tensor(layout, 0, "self_attn.kv_a_proj.weight").tobytes() == wanted.tobytes()
    extra = entries_of("model.layers.0.self_attn.o_proj.{}", packed)
    layout = build_layout(
        moe_dir(tmp_path / "int4", [routed(), extra], {**qwen(4, 1), "quantization_config": compressed([INT4])})
    )
    assert layer_tensor(layout, 0, "self_attn.o_proj.weight").tobytes() == integers.tobytes()
    alone = {name: info for name, info in layout.trunk.items() if not name.endswith("_scale")}
    with pytest.raises(UnsupportedCheckpoint, match="no scale"):
        layer_tensor(dataclasses.replace(layout, trunk=alone), 0, "self_attn.o_proj.weight")


def routed():
    rng = np.random.default_rng(1)
    return [
        entry
        for expert in range(4)
        for module in ("gate_proj", "up_proj", "down_proj")
        for entry in entries_of(name_of(0, expert, module, "{}"), plain(rng, (8, 8))[0])
    ]


def test_a_grid_that_is_not_that_of_the_config_is_found_when_the_block_is_loaded(tmp_path):
    path = write(tmp_path, [lambda rng, shape: float8(rng, shape, (16, 16))], FP8)[0]
    with pytest.raises(CheckpointError, match="blocks of 16 x 24"):
        load_block(path, 0, "resident")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (path / "config.json").write_text(json.dumps(config))
    load_block(path, 0, "resident")
