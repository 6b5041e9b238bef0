"""layout on GGUF names: merged, fused, per expert; per layer; families by architecture; blocks that compute."""

import numpy as np
import pytest
from checkpoints import expert_views
from ggufs import experts, gguf, moe_pairs, stored, string, u32, weights

import fastcache
from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.layout.build import build_layout
from fastcache.moe import load_block
from fastcache.quant.blocks import blocks_to_float32, is_blocks

ROLES = ("gate", "up", "down")


def model(path, tensors, **metadata):
    """A file of `tensors` and, for each layer that has experts, a router."""
    layers = sorted({int(name.split(".")[1]) for name, *_ in tensors})
    count = metadata.get("experts", 4)
    routers = [stored(f"blk.{layer}.ffn_gate_inp.weight", weights((count, 64), layer, 9)) for layer in layers]
    return gguf(path, [*tensors, *routers], moe_pairs(**{"layers": len(layers), **metadata}))


def block_output(path, layer=0):
    x = weights((5, 64), 7)
    return load_block(path, layer, experts="resident")(x)


def numbers(array):
    return blocks_to_float32(array) if is_blocks(array.dtype) else np.asarray(array, np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_experts_have_plain_labels_and_the_first_tensor_is_one_of_them(tmp_path, kind):
    path = model(tmp_path / "m.gguf", experts(0, kinds=(kind,) * 3))
    layout = build_layout(path)
    assert (layout.family, layout.top_k, layout.format, len(layout.layers[0])) == ("qwen3_moe", 2, "gguf", 4)
    assert layout.layers[0].offset[0, 0] == layout.layers[0].offset.min()
    for expert in range(4):
        views = expert_views(layout, 0, expert)
        assert list(views) == list(ROLES)
        for number, role in enumerate(ROLES):
            shape = (64, 32) if role == "down" else (32, 64)
            wanted = stored("x", weights((4, *shape), 0, number)[expert], kind)[3]
            assert views[role].tobytes() == wanted and views[role].shape == shape
    assert list(layout.trunk) == ["blk.0.ffn_gate_inp.weight"]


def test_quantised_experts_stand_under_role_and_suffix_and_say_their_type(tmp_path):
    path = model(tmp_path / "m.gguf", experts(0, kinds=("Q8_0", "Q4_0", "F16")))
    layout = build_layout(path)
    (record,) = layout.layers[0].records
    assert {tensor.label: (tensor.dtype, tensor.shape) for tensor in record.tensors} == {
        "gate.weight": ("Q8_0", (32, 64)),
        "up.weight": ("Q4_0", (32, 64)),
        "down": ("F16", (64, 32)),
    }
    assert set(record.refused) == {"gate", "up"}
    with fastcache.open(path, budget="all") as store:
        lease = store[0, 3]
        assert lease["gate.weight"].shape == (32, 68) and lease["up.weight"].dtype.metadata == {"ggml": "Q4_0"}
        with pytest.raises(KeyError, match=r'use fastcache.linear\(x, lease, "gate"\)'):
            lease["gate"]
        x = weights((2, 64), 1)
        y = fastcache.linear(x, lease, "up")
        np.testing.assert_allclose(y, x @ numbers(lease["up.weight"]).T, rtol=1e-4, atol=1e-4)


def fused(tensors, count=4):
    """Gate and up of merged tensors as one, gate first."""
    gate, up, down = tensors
    row = len(gate[3]) // count
    both = b"".join(gate[3][e * row :][:row] + up[3][e * row :][:row] for e in range(count))
    return [("blk.0.ffn_gate_up_exps.weight", (count, 64, 64), gate[2], both), down]


def split(tensors, count=4):
    """Merged tensors as the old names have them: one tensor an expert."""
    for name, shape, kind, content in tensors:
        row = len(content) // count
        for e in range(count):
            yield (name.replace("_exps", f".{e}"), shape[1:], kind, content[e * row :][:row])


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "MXFP4"])
def test_merged_fused_and_per_expert_tensors_of_the_same_weights_give_the_same_bits(tmp_path, kind):
    merged = experts(0, kinds=(kind,) * 3)
    wanted = block_output(model(tmp_path / "merged.gguf", merged))
    assert block_output(model(tmp_path / "fused.gguf", fused(merged))).tobytes() == wanted.tobytes()
    assert block_output(model(tmp_path / "split.gguf", list(split(merged)))).tobytes() == wanted.tobytes()
    swapped = fused([merged[1], merged[0], merged[2]])
    assert not np.allclose(block_output(model(tmp_path / "swapped.gguf", swapped)), wanted)


def test_a_fused_tensor_has_its_own_label_and_rows_for_gate_and_up(tmp_path):
    merged = experts(0, kinds=("Q8_0",) * 3)
    layout = build_layout(model(tmp_path / "m.gguf", fused(merged)))
    views = expert_views(layout, 0, 2)
    assert set(views) == {"gate.weight", "up.weight", "down.weight", "ffn_gate_up_exps.weight"}
    apart = expert_views(build_layout(model(tmp_path / "n.gguf", merged)), 0, 2)
    for label in ("gate.weight", "up.weight", "down.weight"):
        assert views[label].tobytes() == apart[label].tobytes()
        assert is_blocks(views[label].dtype)


def test_biases_travel_with_their_expert_and_gpt_oss_adds_them(tmp_path):
    biases = [
        stored(f"blk.0.ffn_{role}_exps.bias", weights((4, width), 5, number))
        for number, (role, width) in enumerate((("gate", 32), ("up", 32), ("down", 64)))
    ]
    router = [stored("blk.0.ffn_gate_inp.bias", weights((4,), 6))]
    path = model(tmp_path / "m.gguf", [*experts(0), *biases, *router], arch="gpt-oss")
    layout = build_layout(path)
    assert layout.family == "gpt_oss" and set(layout.trunk) == {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_inp.bias"}
    views = expert_views(layout, 0, 3)
    assert list(views) == ["gate", "gate.bias", "up", "up.bias", "down", "down.bias"]
    assert views["down.bias"].tobytes() == weights((4, 64), 5, 2)[3].tobytes()
    x = weights((5, 64), 7)
    block = load_block(layout, 0, experts="resident")
    chosen, weight = block.route(x)
    wanted = np.zeros_like(x, np.float64)
    for token in range(5):
        for place in range(2):
            v = {k: a.astype(np.float64) for k, a in expert_views(layout, 0, int(chosen[token, place])).items()}
            gate = np.minimum(v["gate"] @ x[token] + v["gate.bias"], 7)
            up = np.clip(v["up"] @ x[token] + v["up.bias"], -7, 7)
            inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            wanted[token] += weight[token, place] * (v["down"] @ inner + v["down.bias"])
    np.testing.assert_allclose(block(x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def shared(layer=0, gate=True, kind="Q8_0"):
    shapes = (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32)))
    found = [stored(f"blk.{layer}.ffn_{role}_shexp.weight", weights(shape, 8, 8), kind) for role, shape in shapes]
    return [*found, *([stored(f"blk.{layer}.ffn_gate_inp_shexp.weight", weights((64,), 8, 9))] if gate else [])]


def test_a_shared_expert_is_none_of_the_experts_and_is_added(tmp_path):
    alone = block_output(model(tmp_path / "a.gguf", experts(0), arch="qwen2moe", expert_shared_feed_forward_length=0))
    path = model(tmp_path / "b.gguf", [*experts(0), *shared()], arch="qwen2moe", expert_shared_feed_forward_length=32)
    layout = build_layout(path)
    assert len(layout.layers[0]) == 4 and {name for name in layout.trunk if "shexp" in name}
    x = weights((5, 64), 7)
    weight = {role: numbers_of(layout, f"blk.0.ffn_{role}_shexp.weight") for role in ROLES}
    inner = x @ weight["gate"].T
    inner = inner / (1 + np.exp(-inner)) * (x @ weight["up"].T)
    scale = 1 / (1 + np.exp(-(x @ weights((64,), 8, 9))))
    wanted = alone + scale[:, None] * (inner @ weight["down"].T)
    np.testing.assert_allclose(block_output(path), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def numbers_of(layout, name):
    from fastcache.formats import ggml

    info = layout.trunk[name]
    raw = np.fromfile(layout.files[info.file], np.uint8, info.nbytes, offset=info.offset)
    return blocks_to_float32(raw.reshape(info.shape[0], -1).view(ggml.carrier(info.dtype)))


def test_tensors_that_the_forward_does_not_know_are_refused_not_left_out(tmp_path):
    path = model(tmp_path / "m.gguf", [*experts(0), *shared(gate=False)])
    with pytest.raises(UnsupportedCheckpoint, match="'qwen3_moe' does not compute with ffn_down_shexp.weight"):
        load_block(path, 0, experts="resident")
    with pytest.raises(UnsupportedCheckpoint, match="'newmoe'"):
        load_block(model(tmp_path / "n.gguf", experts(0), arch="newmoe"), 0, experts="resident")


@pytest.mark.parametrize(
    ("arch", "more", "family"),
    [
        ("llama", {}, "mixtral"),
        ("qwen2moe", {}, "qwen2_moe"),
        ("olmoe", {}, "olmoe"),
        ("deepseek2", {}, "deepseek_v2"),
        ("deepseek2", {"expert_gating_func": 1}, "deepseek_v2"),
        ("deepseek2", {"expert_gating_func": 2}, "deepseek_v3"),
        ("granitemoe", {}, "granitemoe"),
        ("newmoe", {}, "newmoe"),
    ],
)
def test_the_architecture_tells_the_family(tmp_path, arch, more, family):
    path = model(tmp_path / "m.gguf", experts(0), arch=arch, **more)
    with fastcache.open(path, budget="all") as store:
        assert store.family == family and store.top_k == 2


def test_deepseek_v3_routes_by_the_metadata(tmp_path):
    bias = stored("blk.0.exp_probs_b.bias", weights((4,), 3))
    metadata = {
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": 1,
        "expert_shared_count": 1,
    }
    path = model(tmp_path / "m.gguf", [*experts(0), bias, *shared(gate=False)], arch="deepseek2", **metadata)
    block, x = load_block(path, 0, experts="resident"), weights((5, 64), 7)
    scores = 1 / (1 + np.exp(-(x @ weights((4, 64), 0, 9).T).astype(np.float64)))
    chosen = np.argsort(-(scores + weights((4,), 3)), axis=1)[:, :2]
    got, weight = block.route(x)
    np.testing.assert_array_equal(got, chosen)
    picked = np.take_along_axis(scores, chosen, 1)
    np.testing.assert_allclose(weight, 2.5 * picked / picked.sum(axis=1, keepdims=True), rtol=1e-5)


def test_each_layer_has_its_own_types_and_its_own_size_class(tmp_path):
    tensors = [t for layer in range(6) for t in experts(layer, kinds=("Q4_0", "Q4_0", "Q8_0"))]
    tensors += experts(6)
    path = model(tmp_path / "m.gguf", tensors, layers=7)
    layout = build_layout(path)
    sizes = [experts_of.records[0].nbytes for experts_of in layout.layers.values()]
    assert len(set(sizes[:6])) == 1 and sizes[6] == 3 * 32 * 64 * 4 > sizes[0]
    with fastcache.open(path, budget="50% of experts") as store:
        assert len(store.describe()["slot_classes"]) == 2
        for layer in store.layers:
            for expert in range(4):
                lease = store[layer, expert]
                stored_gate = lease["gate" if layer == 6 else "gate.weight"]
                assert stored_gate.tobytes() == expert_views(layout, layer, expert)[next(iter(lease))].tobytes()


def test_a_split_model_streams_from_all_its_parts(tmp_path):
    from ggufs import i32, u16

    whole = model(tmp_path / "whole.gguf", [*experts(0), *experts(1)], layers=2)
    parts = []
    for number, layer in enumerate((None, 0, 1)):  # the first part of a split often holds the metadata alone
        pairs = [u16("split.no", number), u16("split.count", 3), i32("split.tensors.count", 8)]
        tensors = [] if layer is None else experts(layer)
        if layer is not None:
            tensors.append(stored(f"blk.{layer}.ffn_gate_inp.weight", weights((4, 64), layer, 9)))
        more = moe_pairs(layers=2) if number == 0 else []
        parts.append(gguf(tmp_path / f"x-{number + 1:05d}-of-00003.gguf", tensors, [*more, *pairs]))
    with fastcache.open(parts[0], budget="all") as store, fastcache.open(whole, budget="all") as other:
        assert store.layers == other.layers
        for layer in store.layers:
            assert store[layer, 3]["down"].tobytes() == other[layer, 3]["down"].tobytes()
    assert block_output(parts[2], 1).tobytes() == block_output(whole, 1).tobytes()


def test_draft_layers_are_no_decoder_layers(tmp_path):
    path = model(tmp_path / "m.gguf", [*experts(0), *experts(1)], layers=2, nextn_predict_layers=1)
    layout = build_layout(path)
    assert list(layout.layers) == [0] and "blk.1.ffn_down_exps.weight" in layout.trunk


def test_what_is_missing_or_contradicts_itself_is_named(tmp_path):
    def refused(error, message, tensors, **metadata):
        with pytest.raises(error, match=message):
            build_layout(model(tmp_path / "m.gguf", tensors, **metadata))

    refused(MissingTensor, "layer 1: missing blk.1.ffn_down_exps.weight.*1 of 2", [*experts(0), *experts(1)[:2]])
    refused(MissingTensor, "layer 0: missing blk.0.ffn_up_exps.weight", [experts(0)[0], experts(0)[2]])
    refused(MissingTensor, "layer 0 has 4 experts, but its metadata says expert_count 5", experts(0), expert_count=5)
    refused(CheckpointError, "layer 0 has 4 experts, but its metadata says expert_count 3", experts(0), expert_count=3)
    other = [experts(0)[0], *experts(0, n_experts=3)[1:]]
    refused(CheckpointError, "disagree on the number of experts", other)
    empty = [(f"blk.0.ffn_{role}_exps.weight", (2**40, 64, 0), "F32", b"") for role in ROLES]
    refused(CheckpointError, "would be 1099511627776 experts", empty)
    turned = [*experts(0)[:2], stored("blk.0.ffn_down_exps.weight", weights((4, 32, 64), 1))]
    refused(CheckpointError, r"down \[32, 64\] do not fit", turned)
    turned = [
        *experts(0, kinds=("Q8_0",) * 3)[:2],
        stored("blk.0.ffn_down_exps.weight", weights((4, 32, 64), 1), "Q4_0"),
    ]
    refused(CheckpointError, r"down \[32, 64\] do not fit", turned)
    old = list(split(experts(0)))
    refused(
        MissingTensor, "layer 0 expert 3: missing ffn_up.weight", [t for t in old if t[0] != "blk.0.ffn_up.3.weight"]
    )
    with pytest.raises(UnsupportedCheckpoint, match="no routed experts"):
        dense = [stored("blk.0.ffn_up.weight", weights((32, 64), 1))]
        build_layout(gguf(tmp_path / "d.gguf", dense, moe_pairs("llama", experts=0, used=0)))


def test_a_file_without_an_architecture_is_served_all_the_same(tmp_path):
    path = gguf(tmp_path / "m.gguf", experts(0), [u32("general.file_type", 0), string("general.name", "x")])
    with fastcache.open(path, budget="all") as store:
        assert (store.family, store.top_k) == ("unknown", None)
        assert store[0, 1]["up"].tobytes() == weights((4, 32, 64), 0, 1)[1].tobytes()


def test_many_experts_keep_their_numbers(tmp_path):
    path = model(tmp_path / "m.gguf", experts(0, n_experts=300, inter=2, hidden=64), experts=300)
    with fastcache.open(path, budget="all") as store:
        for expert in (0, 2, 10, 255, 256, 299):
            assert store[0, expert]["up"].tobytes() == weights((300, 2, 64), 0, 1)[expert].tobytes()
        with pytest.raises(fastcache.errors.UnknownExpert):
            store[0, 300]
