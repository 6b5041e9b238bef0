"""The table of families: each row against tensors under its names, each rule against a slow statement of it."""

import json

import numpy as np
import pytest
from checkpoints import expert_views, st

import fastcache
from fastcache.errors import MissingTensor, UnsupportedCheckpoint
from fastcache.layout import families
from fastcache.layout.build import build_layout
from fastcache.moe import Forward, load_block
from fastcache.moe.families import FORWARDS

H, INTER, E, K, T = 12, 8, 6, 2, 9
PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
NO_GATE = {"up": "up_proj", "down": "down_proj"}
LOCAL = ("num_local_experts", "num_experts_per_tok")
ROUTED = ("n_routed_experts", "num_experts_per_tok")
AS_DEEPSEEK = ("deepseek_v32", "dots1", "glm4_moe_lite", "glm_moe_dsa", "solar_open")
AS_QWEN = (
    "hy_v3",
    "afmoe",
    "cohere2_moe",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "laguna",
    "qwen3_next",
    "qwen3_5_moe_text",
)
BIAS = "gate.e_score_correction_bias"
RNG = np.random.default_rng(7)


def normal(*shape):
    return (0.6 * RNG.standard_normal(shape)).astype(np.float32)


def write(path, tensors, config):
    st(
        path / "model.safetensors",
        [(n, {"f": "F32", "u": "U8"}[a.dtype.kind], list(a.shape), a.tobytes()) for n, a in tensors.items()],
    )
    (path / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5, **config}))
    return path


def experts_of(width=H, roles=("gate", "up", "down")):
    return [{role: normal(*((width, INTER) if role == "down" else (INTER, width))) for role in roles} for _ in range(E)]


def per_expert(experts, block, modules, layer="model.layers.0"):
    return {
        f"{layer}.{block}.{e}.{modules[role]}.weight": array
        for e, expert in enumerate(experts)
        for role, array in expert.items()
    }


# --- where the experts are


PER_EXPERT = [  # model_type, block, modules, config keys of E and k, prefix
    ("minimax", "block_sparse_moe.experts", W123, *LOCAL, "model"),
    ("minimax_m3_vl", "block_sparse_moe.experts", W123, *LOCAL, "language_model.model"),
    ("kimi_linear", "block_sparse_moe.experts", W123, "num_experts", "num_experts_per_token", "model"),
    ("kimi_k3", "block_sparse_moe.experts", W123, "num_experts", "num_experts_per_token", "language_model.model"),
    ("deepseek_v4", "ffn.experts", W123, *ROUTED, ""),
    ("nemotron_h", "mixer.experts", NO_GATE, *ROUTED, "backbone"),
    ("jamba", "feed_forward.experts", PROJ, "num_experts", "num_experts_per_tok", "model"),
    ("longcat_flash", "mlp.experts", PROJ, "n_routed_experts", "moe_topk", "model"),
    ("bailing_hybrid", "mlp.experts", PROJ, "num_experts", "num_experts_per_token", "model"),
    ("kolibri1", "mlp.experts", PROJ, *LOCAL, "model"),
    *(
        (name, "mlp.experts", PROJ, *ROUTED, "model")
        for name in (*AS_DEEPSEEK, "axk1", "sarvam_moe", "mimo_v2_flash")
    ),
    *(
        (name, "mlp.experts", PROJ, "num_experts", "num_experts_per_tok", "model")
        for name in AS_QWEN
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "block", "modules", "n", "k", "prefix"), PER_EXPERT)
def test_a_row_finds_the_experts_and_leaves_the_rest(model_type, block, modules, n, k, prefix, tmp_path):
    experts, layer = experts_of(roles=tuple(modules)), f"{prefix}.layers.3".lstrip(".")
    rest = {
        f"{layer}.{block.removesuffix('experts')}{name}": normal(2)
        for name in ("gate.weight", "shared_experts.up_proj.weight")
    }
    write(tmp_path, {**per_expert(experts, block, modules, layer), **rest}, {"model_type": model_type, n: E, k: K})
    layout = build_layout(tmp_path)
    assert (model_type in families.family_named(layout.family).model_types, layout.top_k) == (True, K)
    assert list(layout.layers) == [3] and set(layout.trunk) == set(rest)
    for e, expert in enumerate(experts):
        views = expert_views(layout, 3, e)
        assert views.keys() == expert.keys()
        assert all((views[role] == expert[role]).all() for role in expert)
    write(tmp_path, per_expert(experts, block, modules, layer), {"model_type": model_type, n: E + 1, k: K})
    with pytest.raises(MissingTensor, match=f"config.json says {n} {E + 1}"):
        build_layout(tmp_path)


def turned(array):
    return np.ascontiguousarray(array.T)


FUSED = [  # model_type, block, names of gate with up and of down, transposed
    ("aria_text", "mlp.experts", "fc1.weight", "fc2.weight", True),
    ("llama4_text", "feed_forward.experts", "gate_up_proj", "down_proj", True),
    ("hy_v4", "mlp.experts", "gate_up_proj", "down_proj", False),
    ("zaya", "mlp.experts", "gate_up_proj", "down_proj", False),
    ("minimax_m3_vl_text", "mlp.experts", "gate_up_proj", "down_proj", False),
    ("gemma4_text", "experts", "gate_up_proj", "down_proj", False),
    ("granitemoe_swa", "block_sparse_moe.experts", "gate_up_proj", "down_proj", False),
    ("granitemoehybrid", "block_sparse_moe", "input_linear.weight", "output_linear.weight", False),
    ("jetmoe", "mlp", "input_linear.weight", "output_linear.weight", False),
    ("qwen3_moe", "mlp.experts", "gate_up_proj", "down_proj", False),  # as transformers 5 has it in memory
    ("mixtral", "mlp.experts", "gate_up_proj", "down_proj", False),
]


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("model_type", "block", "both", "down", "transposed"), FUSED)
def test_the_orientation_of_a_fused_tensor_is_the_rows(model_type, block, both, down, transposed, square, tmp_path):
    width = INTER if square else H
    experts, way = experts_of(width), turned if transposed else np.asarray
    tensors = {
        f"model.layers.0.{block}.{both}": np.stack([way(np.concatenate([e["gate"], e["up"]])) for e in experts]),
        f"model.layers.0.{block}.{down}": np.stack([way(e["down"]) for e in experts]),
        "model.layers.0.self_attention.experts.input_linear.weight": normal(E, 2, 3),
    }
    if model_type != "jetmoe":
        tensors.popitem()
    layout = build_layout(write(tmp_path, tensors, {"model_type": model_type}))
    for e, expert in enumerate(experts):
        views = expert_views(layout, 0, e)
        assert all((views[role] == expert[role]).all() for role in expert)
    tensors.pop(f"model.layers.0.{block}.{down}")
    with pytest.raises(MissingTensor, match='layer 0: missing "down"'):
        build_layout(write(tmp_path, tensors, {"model_type": model_type}))


def test_experts_that_pass_on_what_they_are_given_are_no_experts_to_read(tmp_path):
    tensors = per_expert(experts_of(), "mlp.experts", PROJ)
    extra = {
        f"model.layers.0.mlp.experts.{e}.{name}.weight": normal(INTER, H)
        for e in (E, E + 1)
        for name in ("gate_proj", "up_proj")
    }
    config = {"model_type": "longcat_flash", "n_routed_experts": E, "zero_expert_num": 2}
    layout = build_layout(write(tmp_path, {**tensors, **extra}, config))
    assert len(layout.layers[0]) == E and set(layout.trunk) == set(extra)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("layers.1.mlp.experts.gate_up_proj_bias", "layer 1: missing gate_up_proj_bias, present for 1 of 2 layers"),
        ("layers.0.mlp.experts.down_proj_scales", "layer 0: missing down_proj_scales, which down_proj_blocks needs"),
        ("layers.0.mlp.experts.gate_up_proj_blocks", "layer 0: missing gate_up_proj_blocks, present for 1 of 2"),
    ],
)
def test_a_lost_sibling_of_all_experts_of_a_layer_is_named(lost, said, tmp_path):
    tensors = {}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts."
        for name, out, columns in (("gate_up_proj", 64, 1), ("down_proj", 32, 1)):
            tensors[f"{block}{name}_blocks"] = np.zeros((E, out, columns, 16), np.uint8)
            tensors[f"{block}{name}_scales"] = np.zeros((E, out, columns), np.uint8)
            tensors[f"{block}{name}_bias"] = normal(E, out)
    assert len(build_layout(write(tmp_path, tensors, {"model_type": "gpt_oss"})).layers) == 2
    del tensors[f"model.{lost}"]
    with pytest.raises(MissingTensor, match=said):
        build_layout(write(tmp_path, tensors, {"model_type": "gpt_oss"}))


def test_a_packed_weight_without_scales_in_any_layer_is_named(tmp_path):
    tensors = per_expert(experts_of(), "block_sparse_moe.experts", W123)
    tensors = {name.replace(".weight", ".weight_packed"): array.view(np.uint8) for name, array in tensors.items()}
    with pytest.raises(MissingTensor, match="layer 0: missing down.weight_scale, which down.weight_packed needs"):
        build_layout(write(tmp_path, tensors, {"model_type": "kimi_k3"}))


# --- what a block computes


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def swiglu(x, e):
    gate = e["gate"] @ x
    return e["down"] @ (gate * sigmoid(gate) * (e["up"] @ x))


def relu2(x, e):
    return e["down"] @ np.maximum(e["up"] @ x, 0) ** 2


def situ(x, e):
    gate, up = e["gate"] @ x, e["up"] @ x
    return e["down"] @ (4 * np.tanh(gate / 4) * sigmoid(gate) * 25 * np.tanh(up / 25))


def grouped(logits, bias, *, scale=2.5, groups=1, kept=1, least=1e-20):
    scores = sigmoid(logits)
    size = E // groups
    rank = [sum(sorted((scores + bias)[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    open_ = [e for g in sorted(range(groups), key=lambda g: -rank[g])[:kept] for e in range(g * size, (g + 1) * size)]
    chosen = sorted(open_, key=lambda e: -(scores + bias)[e])[:K]
    return {e: scores[e] / (sum(scores[chosen]) + least) * scale for e in chosen}


def best(logits, bias):
    chosen = np.argsort(-logits)[:K]
    return dict(zip(chosen, softmax(logits)[chosen] / softmax(logits)[chosen].sum(), strict=True))


SIGMOID = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
KIMI = {"num_expert_group": 2, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.5}
HUNYUAN = {"router_scaling_factor": 2.5}
SITU = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
K3 = {**KIMI, **SITU, "latent_moe_use_norm": True}


def grouped2(logits, bias):
    return grouped(logits, bias, groups=2)


AS_KIMI = ("block_sparse_moe", W123, "gate.weight", BIAS, "shared_experts", grouped2)
BLOCKS = {  # model_type -> block, modules, router, bias, shared, rule, config, what an expert computes
    **dict.fromkeys(AS_DEEPSEEK, ("mlp", PROJ, "gate.weight", BIAS, "shared_experts", grouped2, SIGMOID, swiglu)),
    "mimo_v2_flash": ("mlp", PROJ, "gate.weight", BIAS, None, grouped2, SIGMOID, swiglu),
    "exaone_moe": ("mlp", PROJ, "gate.weight", "e_score_correction_bias", "shared_experts", grouped2, SIGMOID, swiglu),
    "sarvam_moe": ("mlp", PROJ, "gate.weight", "gate.expert_bias", "shared_experts", grouped2, SIGMOID, swiglu),
    "hy_v3": ("mlp", PROJ, "router.gate.weight", "expert_bias", "shared_mlp", grouped, HUNYUAN, swiglu),
    "minimax": ("block_sparse_moe", W123, "gate.weight", None, None, best, {}, swiglu),
    "kimi_linear": (*AS_KIMI, KIMI, swiglu),
    "kimi_k3": (*AS_KIMI, K3, situ),
    "nemotron_h": ("mixer", NO_GATE, "gate.weight", BIAS, "shared_experts", grouped2, SIGMOID, relu2),
    "qwen3_next": ("mlp", PROJ, "gate.weight", None, "shared_expert", best, {"norm_topk_prob": True}, swiglu),
    "qwen3_5_moe_text": ("mlp", PROJ, "gate.weight", None, "shared_expert", best, {}, swiglu),
}  # fmt: skip
LATENT = {
    "kimi_k3": ("routed_expert_down_proj", "routed_expert_up_proj", "routed_expert_hidden_size"),
    "nemotron_h": ("fc1_latent_proj", "fc2_latent_proj", "moe_latent_size"),
}


def made(path, model_type, latent=None, prefix="model"):
    """Write a checkpoint of one block; return its path and what the block gives for x [T, H], in float64."""
    block, modules, router, bias, shared, rule, config, ffn = BLOCKS[model_type]
    layer = f"{prefix}.layers.0.{block}"
    experts, weight, correction = experts_of(latent or H, tuple(modules)), normal(E, H), normal(E)
    tensors = {**per_expert(experts, f"{block}.experts", modules, f"{prefix}.layers.0"), f"{layer}.{router}": weight}
    if bias:
        tensors[f"{layer}.{bias}"] = correction
    other = {role: normal(*((H, 2 * INTER) if role == "down" else (2 * INTER, H))) for role in modules}
    into, out, norm, gate = normal(latent or 1, H), normal(H, latent or 1), normal(latent or 1), normal(1, H)
    if shared:
        tensors |= {f"{layer}.{shared}.{PROJ[role]}.weight": array for role, array in other.items()}
    if shared == "shared_expert":
        tensors[f"{layer}.shared_expert_gate.weight"] = gate
    if latent:
        down, up, width = LATENT[model_type]
        tensors |= {f"{layer}.{down}.weight": into, f"{layer}.{up}.weight": out}
        config = {**config, width: latent}
        if model_type == "kimi_k3":
            tensors[f"{layer}.routed_expert_norm.weight"] = norm
    config = {"model_type": model_type, "num_experts_per_tok": K, "num_experts_per_token": K, **config}

    def slowly(x):
        rows = []
        for token in x.astype(np.float64):
            inner = into @ token if latent else token
            weights = rule(weight @ token, correction.astype(np.float64))
            y = sum(w * ffn(inner, experts[e]) for e, w in weights.items())
            if latent and model_type == "kimi_k3":
                y = y / np.sqrt((y**2).mean() + 1e-5) * norm
            y = out @ y if latent else y
            if shared:
                y = y + ffn(token, other) * (sigmoid(gate @ token) if shared == "shared_expert" else 1)
            rows.append(y)
        return np.stack(rows)

    return write(path, tensors, config), slowly


@pytest.mark.parametrize(
    ("model_type", "latent", "prefix"),
    [(name, None, "backbone" if name == "nemotron_h" else "model") for name in BLOCKS]
    + [("kimi_k3", 5, "language_model.model"), ("nemotron_h", 5, "backbone")],
)
def test_a_block_equals_its_formula_token_by_token(model_type, latent, prefix, tmp_path):
    path, slowly = made(tmp_path, model_type, latent, prefix)
    x = normal(T, H)
    wanted = slowly(x)
    got = load_block(path, 0, experts="resident")(x)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    with fastcache.open(path, budget="1MiB") as store:
        assert load_block(path, 0, experts=store)(x).tobytes() == got.tobytes()


@pytest.mark.parametrize("key", ["activation_situ_beta", "routed_scaling_factor", "moe_renormalize", "rms_norm_eps"])
def test_what_a_config_must_say_is_not_made_up(key, tmp_path):
    path, _ = made(tmp_path, "kimi_k3", 5)
    config = json.loads((path / "config.json").read_text())
    del config[key]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match=f"has no {key}"):
        load_block(path, 0, experts="resident")


def test_hunyuans_experts_per_token_may_be_listed_by_layer(tmp_path):
    tensors = {}
    for layer in range(2):
        tensors |= per_expert(experts_of(), "mlp.experts", PROJ, f"model.layers.{layer}")
        tensors[f"model.layers.{layer}.mlp.gate.wg.weight"] = normal(E, H)
    config = {"model_type": "hunyuan_v1_moe", "num_experts": E, "moe_topk": [1, 3], "use_mixed_mlp_moe": False}
    path = write(tmp_path, tensors, config)
    assert [load_block(path, layer, experts="resident").top_k for layer in range(2)] == [1, 3]


# --- a user's own


@pytest.fixture
def restored():
    """Put the tables back afterwards."""
    rows, forwards = list(families.FAMILIES), dict(FORWARDS)
    yield
    families.FAMILIES[:] = rows
    FORWARDS.clear()
    FORWARDS.update(forwards)


@pytest.mark.usefixtures("restored")
def test_a_registered_family_is_read_and_computed_as_its_row_says(tmp_path):
    experts, weight = experts_of(), normal(E, H)
    modules = {"gate": "a", "up": "b", "down": "c"}
    tensors = {**per_expert(experts, "ffn.experts", modules), "model.layers.0.ffn.choose.weight": weight}
    path = write(tmp_path, tensors, {"model_type": "my_moe", "experts": E, "num_experts_per_tok": K})
    assert "gate" not in expert_views(build_layout(path), 0, 0)
    row = fastcache.Family(
        "my_moe", ("my_moe",), "ffn.experts", {"a": "gate", "b": "up", "c": "down"}, n_experts=("experts",)
    )
    fastcache.register_family(row)
    assert (expert_views(build_layout(path), 0, 4)["up"] == experts[4]["up"]).all()
    with pytest.raises(UnsupportedCheckpoint, match="forward is not available for the family 'my_moe'"):
        load_block(path, 0, experts="resident")
    mixtral = FORWARDS["mixtral"]
    fastcache.register_family(row, Forward("ffn.choose.weight", mixtral.router, mixtral.ffn))
    assert [family.name for family in families.FAMILIES].count("my_moe") == 1
    x = normal(T, H)
    wanted = np.stack(
        [sum(w * swiglu(t, experts[e]) for e, w in best(weight @ t, None).items()) for t in x.astype(float)]
    )
    np.testing.assert_allclose(load_block(path, 0, experts="resident")(x), wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("restored")
def test_a_registered_row_wins_over_the_one_of_its_model_type(tmp_path):
    experts = experts_of()
    path = write(tmp_path, per_expert(experts, "mlp.experts", PROJ), {"model_type": "qwen3_moe", "num_experts": E})
    roles = {"gate_proj": "up", "up_proj": "gate", "down_proj": "down"}
    fastcache.register_family(fastcache.Family("other", ("qwen3_moe",), roles=roles))
    assert build_layout(path).family == "other"
    assert (expert_views(build_layout(path), 0, 1)["up"] == experts[1]["gate"]).all()


def test_a_row_that_says_nothing_is_refused():
    with pytest.raises(TypeError, match="fastcache.Family"):
        fastcache.register_family("mixtral")
    with pytest.raises(ValueError, match="a name of its own"):
        fastcache.register_family(fastcache.Family("unknown", ("x",), roles={"a": "up"}))
    with pytest.raises(ValueError, match="neither"):
        fastcache.register_family(fastcache.Family("x", ("x",)))
    with pytest.raises(TypeError, match="fastcache.moe.Forward"):
        fastcache.register_family(fastcache.Family("x", ("x",), roles={"a": "up"}), "silu")
    assert families.family_named("x") is None


def test_every_forward_belongs_to_a_row_and_no_architecture_to_two():
    assert FORWARDS.keys() <= {family.name for family in families.FAMILIES}
    architectures = [architecture for family in families.FAMILIES for architecture in family.gguf]
    assert len(set(architectures)) == len(architectures)
