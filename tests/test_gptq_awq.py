"""Checkpoints of GPTQ and AWQ: the config's word reaches `linear`, siblings travel, and quantised trunks run."""

import json
import re

import numpy as np
import pytest
from checkpoints import moe_dir
from qweights import AWQ_ORDER, borrowed, packed_across, packed_down, weight_of
from test_decoders import case, recorded, run
from trunks import tensors_of

import fastcache
from fastcache import moe, packing
from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.formats.scheme import Scheme, schemes_of
from fastcache.inspection import inspect_checkpoint
from fastcache.layout.build import build_layout
from fastcache.layout.quantization import Quantization
from fastcache.moe.trunk import layer_tensor
from fastcache.quant.coded import coded_weight

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
EIGHT = {**GPTQ, "bits": 8, "sym": True, "group_size": -1, "checkpoint_format": "gptq_v2"}
CONFIGS = {
    "gptq": GPTQ,
    "gptq in act-order": {**GPTQ, "desc_act": True, "checkpoint_format": "gptq"},
    "gptq of gptqmodel": {**GPTQ, "meta": {"quantizer": ["gptqmodel:4.0.0"]}, "dynamic": {"-:.*gate$": {}}},
    "gptq_v2, 8 bits, symmetric": EIGHT,
    "awq": AWQ,
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def schemes(config, stored="I32"):
    return schemes_of(Quantization({"quantization_config": config}).carrier(stored, np.dtype(np.int32)))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (GPTQ, Scheme((1, 16), 4, asymmetric=True, packing="gptq")),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Scheme((1, 128), 4, packing="gptq")),
        ({"quant_method": "gptq", "bits": 2, "group_size": -1}, Scheme((1, 0), 2, packing="gptq")),
        ({"quant_method": "gptq", "bits": 4}, Scheme((1, 0), 4, packing="gptq")),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Scheme((1, 16), 4, asymmetric=True, packing="gptq_v2")),
        ({**GPTQ, "format": "gptq_v2", "pack_dtype": "int32"}, Scheme((1, 16), 4, asymmetric=True, packing="gptq_v2")),
        ({**GPTQ, "desc_act": True}, Scheme((1, 16), 4, asymmetric=True, packing="gptq", ordered=True)),
        (
            {**GPTQ, "sym": True, "meta": {"quantizer": "gptqmodel:1.4.0"}},
            Scheme((1, 16), 4, packing="gptq", carries=True),
        ),
        ({**GPTQ, "meta": {"quantizer": "intel/auto-round"}}, Scheme((1, 16), 4, asymmetric=True, packing="gptq")),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, Scheme(None, 0, asymmetric=True, packing="gptq")),
        (AWQ, Scheme((1, 16), 4, packing="awq")),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Scheme((1, 64), 4, packing="awq")),
        ({"quant_method": "awq", "bits": 4}, Scheme((1, 128), 4, packing="awq")),
    ],
)
def test_a_config_says_how_words_are_packed(config, wanted):
    assert schemes(config) == (wanted,)
    assert schemes(config, "F16") == schemes(config, "F32") == ()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3"),
        ({**GPTQ, "bits": None}, "quantization_config.bits is None"),
        ({**GPTQ, "group_size": 0}, "quantization_config.group_size is 0"),
        ({**GPTQ, "group_size": "128"}, "quantization_config.group_size is '128'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "quantization_config.is_marlin_format is True"),
        ({**GPTQ, "pack_dtype": "int16"}, "quantization_config.pack_dtype is 'int16'"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version is 'gemv'"),
        ({**AWQ, "version": "marlin"}, "quantization_config.version is 'marlin'"),
        ({**AWQ, "bits": 8}, "quantization_config.bits is 8"),
        ({**AWQ, "group_size": True}, "quantization_config.group_size is True"),
    ],
)
def test_what_is_packed_otherwise_names_the_key_and_its_bytes_are_served(config, said, tmp_path):
    path = quantised(tmp_path, "mixtral", AWQ if config["quant_method"] == "awq" else GPTQ, config)[0]
    assert any(said in problem for problem in inspect_checkpoint(path)["problems"])
    with pytest.raises(UnsupportedCheckpoint, match=said):
        moe.load_block(path, 0, "resident")
    with fastcache.open(path, "all") as store:
        lease = store[0, 1]
        assert lease["gate.qweight"].dtype == np.int32
        with pytest.raises(UnsupportedCheckpoint, match=said):
            fastcache.linear(np.zeros(64, np.float32), lease, "gate")


QUANTISED = re.compile(r"\.(\w+_proj|w1|w2|w3)\.weight$")


def quantised(path, family, config, said=None):
    """Write the recorded checkpoint with its projections quantised, and its twin with what they then stand for."""
    source = case(family) / "f32"
    coded, twin = [], []
    rng = np.random.default_rng(0)
    for name, weight in tensors_of(source).items():
        plain = (name, "F32", weight.shape, weight.tobytes())
        if not QUANTISED.search(name):
            coded.append(plain)
            twin.append(plain)
            continue
        arrays, stands_for = quantise(rng, weight.T, config)
        kinds = {"int32": "I32", "float16": "F16"}
        for suffix, array in arrays.items():
            at = f"{name.removesuffix('weight')}{suffix}"
            coded.append((at, kinds[array.dtype.name], array.shape, array.tobytes()))
        twin.append((name, "F32", weight.shape, stands_for.astype(np.float32).tobytes()))
    settings = json.loads((source / "config.json").read_text())
    coded.sort(key=lambda entry: entry[0].rpartition(".")[2])  # each expert lies in several places
    return (
        moe_dir(path / "coded", [coded[::2], coded[1::2]], {**settings, "quantization_config": said or config}),
        moe_dir(path / "twin", [twin], settings),
    )


def quantise(rng, weight, config):
    """Round a weight [in, out] to the nearest, and pack it; the stored tensors by suffix, and what they stand for."""
    n_in, n_out = weight.shape
    bits, size, most = config["bits"], config["group_size"], 2 ** config["bits"] - 1
    groups = np.arange(n_in) // size if size > 0 else np.zeros(n_in, int)
    if config.get("desc_act"):
        groups = rng.permutation(groups)
    scales, zeros = np.empty((groups.max() + 1, n_out), np.float16), np.empty((groups.max() + 1, n_out), int)
    for group in range(len(scales)):
        low, high = weight[groups == group].min(0), weight[groups == group].max(0)
        if config.get("sym"):
            scales[group], zeros[group] = 2 * np.maximum(-low, high) / most, 2 ** (bits - 1)
        else:
            scales[group] = (high - low) / most
            zeros[group] = np.clip(np.round(-low / scales[group]), 0 if "meta" in config else 1, most)
    codes = np.clip(np.round(weight / scales[groups] + zeros[groups]), 0, most).astype(int)
    if config["quant_method"] == "awq":
        packed = {"qweight": packed_across(codes, 4, AWQ_ORDER), "qzeros": packed_across(zeros, 4, AWQ_ORDER)}
    else:
        stored = zeros if config.get("checkpoint_format") == "gptq_v2" else zeros - 1
        across = borrowed(zeros, bits) if "meta" in config else packed_across(stored, bits)
        packed = {"qweight": packed_down(codes, bits), "qzeros": across, "g_idx": groups.astype(np.int32)}
    return {**packed, "scales": scales}, weight_of(codes, zeros, scales, groups)


@configs
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_what_their_tensors_stand_for_streamed_at_any_budget_as_from_memory(family, config, tmp_path):
    path, twin = quantised(tmp_path, family, config)
    layout = build_layout(path)
    twins = build_layout(twin)
    x = np.random.default_rng(9).standard_normal((5, 64), np.float32)
    figures = inspect_checkpoint(path)
    own = {"qweight", "qzeros", "scales"} | ({"g_idx"} if config["quant_method"] == "gptq" else set())
    assert set(figures["siblings"]) == {f"{role}.{suffix}" for role in ("gate", "up", "down") for suffix in own}
    assert set(figures["dtypes"]) == {"I32", "F16"} and figures["family"] == family
    assert not any("no arithmetic" in problem or "config" in problem for problem in figures["problems"])
    for budget in ("all", "one", 0):
        size = max(figures["expert_bytes"]["max"], 4096) + 8192
        with fastcache.open(path, size if budget == "one" else budget) as store:
            for layer in layout.layers:
                got = moe.load_block(layout, layer, "resident")(x)
                assert moe.load_block(layout, layer, store)(x).tobytes() == got.tobytes()
                wanted = moe.load_block(twins, layer, "resident")(x)
                np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
            lease, plain = store[0, 3], moe.ResidentExperts(twins, 0).acquire(0, 3)
            for role in ("gate", "up", "down"):
                assert coded_weight(lease, role).dense().tobytes() == plain[role].tobytes()
                assert coded_weight(lease.copy(), role).dense().tobytes() == plain[role].tobytes()
                with pytest.raises(KeyError, match=rf"{role}.qweight.*fastcache.linear"):
                    lease[role]


@configs
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_decoder_whose_trunk_is_quantised_too_runs_as_its_twin_of_plain_weights(family, config, tmp_path):
    path, twin = quantised(tmp_path, family, config)
    ids = recorded(case(family))["input_ids"]
    with moe.load(twin, experts="resident") as model:
        wanted = model.forward(ids)
    with moe.load(path, experts="resident") as model:
        bits = run(model, ids)
    for budget in ("all", "0.5 cycles", 1):
        with moe.load(path, budget=budget) as model:
            assert run(model, ids) == bits
    for trunk in ("mapped", "resident"):
        with moe.load(path, budget="all", trunk=trunk) as model:
            logits = model.forward(ids)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    name = "self_attn.q_proj.weight"
    assert layer_tensor(build_layout(path), 0, name).tobytes() == layer_tensor(build_layout(twin), 0, name).tobytes()
    with pytest.raises(MissingTensor, match="no tensor 'model.layers.0.self_attn.z_proj.weight'"):
        layer_tensor(build_layout(path), 0, "self_attn.z_proj.weight")


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_sibling_that_one_expert_or_all_of_a_layer_or_all_lack_is_named_when_it_is_opened(method, suffix, tmp_path):
    if method == "awq" and suffix == "g_idx":
        pytest.skip("AWQ has none")
    config = CONFIGS["gptq in act-order"] if method == "gptq" else AWQ
    path = quantised(tmp_path, "qwen3_moe", config)[0]
    assert build_layout(path).layers
    for pattern in (r"layers\.0\.mlp\.experts\.3\.", r"layers\.0\.mlp\.experts\.", r"mlp\.experts\."):
        cut = pruned(path, tmp_path / str(len(pattern)), re.compile(rf"{pattern}.*up_proj\.{suffix}$"))
        with pytest.raises(MissingTensor, match=suffix):
            build_layout(cut)


def pruned(path, into, gone):
    """Copy a checkpoint without the tensors whose names match."""
    entries, found = [], 0
    for shard in sorted(path.glob("*.safetensors")):
        raw = shard.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        for name, info in json.loads(raw[8:end]).items():
            first, last = (end + offset for offset in info["data_offsets"])
            if gone.search(name):
                found += 1
            else:
                entries.append((name, info["dtype"], info["shape"], raw[first:last]))
    assert found
    return moe_dir(into, [entries], json.loads((path / "config.json").read_text()))


def test_without_act_order_g_idx_may_be_gone(tmp_path):
    path = quantised(tmp_path, "mixtral", GPTQ)[0]
    bare = pruned(path, tmp_path / "bare", re.compile(r"g_idx$"))
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    assert moe.load_block(bare, 1, "resident")(x).tobytes() == moe.load_block(path, 1, "resident")(x).tobytes()


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("quantize_config.json", GPTQ, {"bits": 4, "group_size": 16, "desc_act": False, "sym": False}),
        ("quant_config.json", AWQ, {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_the_config_that_older_files_have_beside_config_json_is_read(name, config, said, tmp_path):
    path = quantised(tmp_path, "mixtral", config)[0]
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    wanted = moe.load_block(path, 0, "resident")(x)
    settings = json.loads((path / "config.json").read_text())
    del settings["quantization_config"]
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedCheckpoint, match="quant_method"):
        moe.load_block(path, 0, "resident")
    (path / name).write_text(json.dumps(said))
    assert moe.load_block(path, 0, "resident")(x).tobytes() == wanted.tobytes()
    (path / "config.json").write_text(json.dumps({**settings, "quantization_config": {**config, "bits": 3}}))
    with pytest.raises(UnsupportedCheckpoint, match="bits is 3"):  # config.json's own word wins
        moe.load_block(path, 0, "resident")
    (path / "config.json").write_text(json.dumps(settings))
    for text in ("[]", "{"):
        (path / name).write_text(text)
        with pytest.raises(CheckpointError, match=name):
            build_layout(path)


def test_a_config_that_says_other_groups_than_the_tensors_have_is_found_when_the_block_is_loaded(tmp_path):
    path = quantised(tmp_path, "mixtral", AWQ)[0]
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"]["group_size"] = 32
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="4 groups for 64 inputs, and config.json says group_size 32"):
        moe.load_block(path, 0, "resident")


def test_a_packed_copy_of_the_checkpoint_computes_the_same(tmp_path):
    path = quantised(tmp_path, "qwen3_moe", GPTQ)[0]
    packing.pack(path, tmp_path / "packed")
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    packed = moe.load_block(tmp_path / "packed", 0, "resident")(x)
    assert packed.tobytes() == moe.load_block(path, 0, "resident")(x).tobytes()
