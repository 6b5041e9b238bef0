"""Kimi K3's experts as the hub has them, packed MXFP4 in a latent space: the block of the same numbers in float32."""

import json

import numpy as np
from checkpoints import st

import fastcache
from fastcache.moe import load_block

HIDDEN, LATENT, INTER, EXPERTS = 64, 32, 64, 4
BLOCK = "language_model.model.layers.1.block_sparse_moe."
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
TEXT = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "num_expert_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS}},
}


def write(path, tensors, **config):
    path.mkdir()
    kinds = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}
    entries = [(name, kinds[array.dtype], list(array.shape), array.tobytes()) for name, array in tensors.items()]
    st(path / "model.safetensors", entries)
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": TEXT, **config}))
    return path


def test_packed_experts_give_what_their_numbers_give(tmp_path):
    random = np.random.default_rng(0)
    shapes = {
        "gate.weight": (EXPERTS, HIDDEN),
        "gate.e_score_correction_bias": (EXPERTS,),
        "routed_expert_down_proj.weight": (LATENT, HIDDEN),
        "routed_expert_norm.weight": (LATENT,),
        "routed_expert_up_proj.weight": (HIDDEN, LATENT),
        "shared_experts.gate_proj.weight": (INTER, HIDDEN),
        "shared_experts.up_proj.weight": (INTER, HIDDEN),
        "shared_experts.down_proj.weight": (HIDDEN, INTER),
    }
    trunk = {BLOCK + name: 0.3 * random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    packed, plain = dict(trunk), dict(trunk)
    for expert in range(EXPERTS):
        for module, (rows, columns) in {"w1": (INTER, LATENT), "w3": (INTER, LATENT), "w2": (LATENT, INTER)}.items():
            name = f"{BLOCK}experts.{expert}.{module}.weight"
            codes = random.integers(0, 256, (rows, columns // 2), np.uint8)
            scales = random.integers(124, 128, (rows, columns // 32), np.uint8)
            packed |= {f"{name}_packed": codes, f"{name}_scale": scales}
            numbers = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(rows, columns)
            plain[name] = numbers * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=1)
    path = write(tmp_path / "packed", packed, quantization_config=PACKED)
    x = random.standard_normal((7, HIDDEN), np.float32)
    wanted = load_block(write(tmp_path / "plain", plain), 1, experts="resident")(x)
    got = load_block(path, 1, experts="resident")(x)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    with fastcache.open(path, budget="16KiB") as store:
        assert load_block(path, 1, experts=store)(x).tobytes() == got.tobytes()
