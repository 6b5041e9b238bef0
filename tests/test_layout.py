"""layout: which tensors are whose, what they are called, and what is refused; on made-up checkpoints."""

import json

import numpy as np
import pytest
from checkpoints import as_numbers, expert_views, name_of, qwen, split_experts, st, tensor

from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.layout.build import build_layout
from fastcache.layout.families import FAMILIES, config_count, config_value
from fastcache.layout.record import bytes_record


def file_of(tmp_path, entries, config=None):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return st(tmp_path / "model.safetensors", entries)


def numbers(entries, *parts):
    (found,) = [as_numbers(entry) for entry in entries if all(part in entry[0] for part in parts)]
    return found


def bits(array):
    return array.tobytes()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_expert_of_a_plain_checkpoint_has_gate_up_and_down(dtype, tmp_path):
    entries = split_experts([1, 3], 3, dtype=dtype)
    layout = build_layout(file_of(tmp_path, entries, qwen(3, 4)))
    assert (layout.family, layout.top_k, list(layout.layers)) == ("qwen3_moe", 2, [1, 3])
    for layer in (1, 3):
        for expert in range(3):
            views = expert_views(layout, layer, expert)
            assert list(views) == ["gate", "up", "down"]
            for label, array in views.items():
                stored = numbers(entries, f"layers.{layer}.", f"experts.{expert}.{label}_proj")
                assert array.dtype == stored.dtype
                assert bits(array) == bits(stored)
    assert layout.layers[1].records[0] is layout.layers[3].records[0]


def test_a_thousand_experts_in_string_order_with_the_first_tensor_an_expert(tmp_path):
    entries = sorted(split_experts([0], 1000, dtype="U8", inter=2, hidden=2))
    assert entries[3][0] > entries[6][0] or ".10." in entries[6][0]
    layout = build_layout(file_of(tmp_path, entries, qwen(1000, 1)))
    assert len(layout.layers[0]) == 1000
    for expert in (0, 1, 2, 10, 255, 256, 999):
        for label, array in expert_views(layout, 0, expert).items():
            assert bits(array) == bits(numbers(entries, f"experts.{expert}.{label.split('.')[0]}_proj"))


def test_a_contiguous_expert_has_its_tensors_in_the_order_of_the_file(tmp_path):
    entries = []
    for expert in range(3):
        for module in ("w1", "w2", "w3"):
            for suffix, shape in (("weight_packed", [8, 64]), ("weight_scale", [8, 4])):
                name = name_of(0, expert, module, suffix, "block_sparse_moe.experts", "language_model.model")
                entries.append(tensor(name, "U8", shape, expert, module, suffix))
    layout = build_layout(file_of(tmp_path, entries))
    experts = layout.layers[0]
    (record,) = experts.records
    assert layout.family == "kimi_k3"
    assert [stored.label for stored in record.tensors] == [
        f"{role}.{suffix}" for role in ("gate", "down", "up") for suffix in ("weight_packed", "weight_scale")
    ]
    assert [view.label for view in record.views] == [
        f"{role}.{suffix}" for role in ("gate", "up", "down") for suffix in ("weight_packed", "weight_scale")
    ]
    assert record.nbytes == 1632
    assert (experts.offset[:, 1:] == experts.offset[:, :-1] + [512, 32, 512, 32, 512]).all()
    assert (np.diff(experts.offset[:, 0]) == 1632).all()
    for role in ("gate", "up", "down"):
        assert f'use fastcache.linear(x, lease, "{role}")' in record.refused[role]


def scaled(suffix="weight_scale_inv", dtype="F8_E4M3", scale="F32", n_experts=8, layer=0):
    entries = []
    for expert in range(n_experts):
        for module in ("gate_proj", "up_proj", "down_proj"):
            entries.append(tensor(name_of(layer, expert, module), dtype, [4, 4], expert, module))
            entries.append(tensor(name_of(layer, expert, module, suffix), scale, [1, 1], expert, module, 1))
    return entries


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("scale", ["F32", "F8_E8M0"])
def test_encoded_tensors_stand_under_role_and_suffix_and_the_plain_label_says_what_to_use(suffix, scale, tmp_path):
    entries = scaled(suffix, scale=scale)
    layout = build_layout(file_of(tmp_path, entries, qwen(8, 1)))
    views = expert_views(layout, 0, 5)
    assert set(views) == {f"{role}.{each}" for role in ("gate", "up", "down") for each in ("weight", suffix)}
    assert bits(views[f"up.{suffix}"]) == bits(numbers(entries, "experts.5.up_proj." + suffix))
    refused = layout.layers[0].records[0].refused
    assert set(refused) == {"gate", "up", "down"}
    assert 'use fastcache.linear(x, lease, "gate")' in refused["gate"]
    assert "F8_E4M3" in refused["gate"]


def test_a_bf16_weight_with_a_scale_beside_it_is_not_the_weight(tmp_path):
    layout = build_layout(file_of(tmp_path, scaled("weight_scale", "BF16"), qwen(8, 1)))
    (record,) = layout.layers[0].records
    assert "gate" in record.refused
    assert "gate.weight" in [view.label for view in record.views]


def test_an_expert_that_lacks_a_tensor_of_its_siblings_is_named(tmp_path):
    entries = []
    for expert in range(8):
        for module in ("gate_proj", "up_proj", "down_proj"):
            entries.append(tensor(name_of(2, expert, module, "weight_packed"), "U8", [4, 4], expert, module))
            entries.append(tensor(name_of(2, expert, module, "weight_scale"), "F8_E4M3", [4, 1], expert, module, 1))
            entries.append(tensor(name_of(2, expert, module, "weight_global_scale"), "F32", [], expert, module, 2))
    assert len(expert_views(build_layout(file_of(tmp_path, entries, qwen(8, 3))), 2, 3)) == 9
    lost = name_of(2, 3, "up_proj", "weight_global_scale")
    with pytest.raises(
        MissingTensor, match="layer 2 expert 3: missing up_proj.weight_global_scale, present for 7 of 8 siblings"
    ):
        build_layout(file_of(tmp_path, [entry for entry in entries if entry[0] != lost]))
    whole = [entry for entry in entries if "experts.3.up_proj" not in entry[0]]
    with pytest.raises(MissingTensor, match="layer 2 expert 3: missing up_proj.*, present for 7 of 8"):
        build_layout(file_of(tmp_path, whole))
    with pytest.raises(MissingTensor, match="layer 2 expert 3: missing all tensors, present for 7 of 8"):
        build_layout(file_of(tmp_path, [entry for entry in entries if "experts.3." not in entry[0]]))
    with pytest.raises(MissingTensor, match="layer 2 expert 0: missing all"):
        build_layout(file_of(tmp_path, [entry for entry in entries if "experts.0." not in entry[0]]))


def test_experts_stored_differently_in_one_layer_have_records_of_their_own(tmp_path):
    quantised = [entry for entry in scaled() if ".experts.2." not in entry[0] and ".experts.6." not in entry[0]]
    plain = [
        tensor(name_of(0, expert, module), "BF16", [4, 4], expert, module)
        for expert in (2, 6)
        for module in ("gate_proj", "up_proj", "down_proj")
    ]
    layout = build_layout(file_of(tmp_path, quantised + plain, qwen(8, 1)))
    experts = layout.layers[0]
    assert len(experts.records) == 2
    assert len(set(experts.record_of[[2, 6]])) == 1
    assert (experts.file[2] == [0, 0, 0, -1, -1, -1]).all()
    assert bits(expert_views(layout, 0, 6)["gate"]) == bits(numbers(plain, "experts.6.gate"))
    stored = next(entry for entry in quantised if entry[0].endswith("experts.7.gate_proj.weight"))
    assert bits(expert_views(layout, 0, 7)["gate.weight"]) == stored[3]


def test_experts_of_different_widths_are_fine_and_parts_that_do_not_fit_are_not(tmp_path):
    wide = split_experts([0], 2, inter=6)
    narrow = [
        tensor(entry[0].replace("experts.1", "experts.2"), "F32", [2, 4] if "down" not in entry[0] else [4, 2], 7)
        for entry in wide
        if "experts.1" in entry[0]
    ]
    layout = build_layout(file_of(tmp_path, wide + narrow, qwen(3, 1)))
    assert expert_views(layout, 0, 2)["gate"].shape == (2, 4)
    assert expert_views(layout, 0, 1)["gate"].shape == (6, 4)
    turned = [(n, d, s[::-1], b) if "down" in n else (n, d, s, b) for n, d, s, b in wide]
    with pytest.raises(CheckpointError, match="layer 0 expert 0: gate .6, 4., up .6, 4., down .6, 4. do not fit"):
        build_layout(file_of(tmp_path, turned, qwen(2, 1)))


def test_the_number_of_experts_is_the_config_s(tmp_path):
    entries = split_experts([0], 4)
    with pytest.raises(CheckpointError, match="layer 0 has 4 experts, but config.json says num_experts 3"):
        build_layout(file_of(tmp_path, entries, qwen(3, 1)))
    with pytest.raises(MissingTensor, match="has 4 experts.*num_experts 5; it is one file of several"):
        build_layout(file_of(tmp_path, entries, qwen(5, 1)))
    with pytest.raises(CheckpointError, match="num_experts is 'four'"):
        build_layout(file_of(tmp_path, entries, qwen("four", 1)))


def test_one_tensor_under_two_spellings_of_its_number_is_refused(tmp_path):
    entries = split_experts([0], 2)
    entries.append((entries[0][0].replace("experts.0", "experts.00"), *entries[0][1:]))
    with pytest.raises(CheckpointError, match="expert 0: gate_proj.weight appears under two names"):
        build_layout(file_of(tmp_path, entries, qwen(2, 1)))


def test_shared_experts_dense_layers_and_draft_layers_are_trunk(tmp_path):
    routed = split_experts([1, 2], 4)
    others = [
        *split_experts([0], 4, prefix="mtp"),
        *split_experts([3], 4),  # a multi-token-prediction layer, numbered on
        *(
            tensor(f"model.layers.1.mlp.shared_experts.{m}_proj.weight", "F32", [2, 2], m)
            for m in ("gate", "up", "down")
        ),
        *(tensor(f"model.layers.0.mlp.{m}_proj.weight", "F32", [2, 2], m) for m in ("gate", "up", "down")),
        tensor("model.layers.1.mlp.gate.weight", "F32", [4, 4], 1),
        tensor("model.layers.1.mlp.experts.e_score_correction_bias", "F32", [4], 1),
        tensor("model.embed_tokens.weight", "F32", [4, 4], 2),
    ]
    config = {"model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    layout = build_layout(file_of(tmp_path, others + routed, config))
    assert list(layout.layers) == [1, 2]
    assert set(layout.trunk) == {entry[0] for entry in others}
    for name, dtype, shape, content, *_ in others:
        info = layout.trunk[name]
        assert (info.name, info.dtype, list(info.shape), info.nbytes) == (name, dtype, list(shape), len(content))
        with open(layout.files[info.file], "rb") as file:
            file.seek(info.offset)
            assert file.read(info.nbytes) == content
    (tmp_path / "config.json").unlink()
    assert list(build_layout(tmp_path).layers) == [1, 2, 3]  # nothing says that layer 3 drafts


def test_the_layout_is_found_per_layer(tmp_path):
    entries = [
        *split_experts([0], 4),
        tensor("model.layers.1.mlp.experts.gate_up_proj", "F32", [4, 8, 6], 1),
        tensor("model.layers.1.mlp.experts.down_proj", "F32", [4, 6, 4], 2),
    ]
    layout = build_layout(file_of(tmp_path, entries, qwen(4, 2)))
    assert list(expert_views(layout, 0, 0)) == ["gate", "up", "down"]
    views = expert_views(layout, 1, 3)
    assert list(views) == ["gate", "up", "down", "gate_up_proj", "down_proj"]
    assert bits(views["up"]) == bits(as_numbers(entries[-2])[3, 4:])
    assert bits(views["down"]) == bits(as_numbers(entries[-1])[3])
    mixed = [*entries, *split_experts([1], 4)]
    with pytest.raises(UnsupportedCheckpoint, match="layer 1 mixes fused tensors and tensors per expert"):
        build_layout(file_of(tmp_path, mixed, qwen(4, 2)))


@pytest.mark.parametrize("hidden", [4, 8, 12, 16])
def test_gpt_oss_is_transposed_and_interleaved_whatever_its_sizes(hidden, tmp_path):
    inter = 4  # 2 * inter is below, equal to and above hidden
    block = "model.layers.0.mlp.experts."
    entries = [
        tensor(block + "gate_up_proj", "F32", [3, hidden, 2 * inter], 1),
        tensor(block + "gate_up_proj_bias", "F32", [3, 2 * inter], 2),
        tensor(block + "down_proj", "F32", [3, inter, hidden], 3),
        tensor(block + "down_proj_bias", "F32", [3, hidden], 4),
    ]
    config = {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    layout = build_layout(file_of(tmp_path, entries, config))
    gate_up, gate_up_bias, down, down_bias = (as_numbers(entry) for entry in entries)
    for expert in range(3):
        views = expert_views(layout, 0, expert)
        assert bits(views["gate"]) == bits(gate_up[expert, :, 0::2].T)
        assert bits(views["up"]) == bits(gate_up[expert, :, 1::2].T)
        assert bits(views["down"]) == bits(down[expert].T)
        assert bits(views["gate.bias"]) == bits(gate_up_bias[expert, 0::2])
        assert bits(views["up.bias"]) == bits(gate_up_bias[expert, 1::2])
        assert bits(views["down.bias"]) == bits(down_bias[expert])
        assert bits(views["gate_up_proj"]) == bits(gate_up[expert])
        assert views["gate"].shape == (inter, hidden)
        assert views["down"].shape == (hidden, inter)


@pytest.mark.parametrize("hidden", [4, 8, 12])
def test_granite_has_gate_rows_first_whatever_its_sizes(hidden, tmp_path):
    block = "model.layers.0.block_sparse_moe."
    entries = [
        tensor(block + "input_linear.weight", "BF16", [3, 8, hidden], 1),
        tensor(block + "output_linear.weight", "BF16", [3, hidden, 4], 2),
        tensor(block + "router.layer.weight", "BF16", [3, hidden], 3),
    ]
    for config in ({"model_type": "granitemoe", "num_local_experts": 3}, None):
        layout = build_layout(file_of(tmp_path, entries, config))
        assert layout.family == "granitemoe"
        views = expert_views(layout, 0, 2)
        assert bits(views["gate"]) == bits(as_numbers(entries[0])[2, :4])
        assert bits(views["up"]) == bits(as_numbers(entries[0])[2, 4:])
        assert bits(views["down"]) == bits(as_numbers(entries[1])[2])
        assert list(layout.trunk) == [entries[2][0]]
        (tmp_path / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("shape", [[4, 8, 16], [4, 16, 8], [4, 8, 8]])
def test_an_unknown_family_serves_fused_bytes_and_no_orientation(shape, tmp_path):
    entries = [tensor("model.layers.0.moe.experts.gate_up_proj", "F32", shape, 1)]
    layout = build_layout(file_of(tmp_path, entries, {"model_type": "made_up"}))
    views = expert_views(layout, 0, 3)
    assert layout.family == "unknown"
    assert list(views) == ["gate_up_proj"]
    assert bits(views["gate_up_proj"]) == bits(as_numbers(entries[0])[3])
    assert 'is not known for family "unknown"' in layout.layers[0].records[0].refused["gate"]


def test_an_unknown_family_has_stored_names_unless_the_names_say_what_they_are(tmp_path):
    entries = split_experts([0], 2, modules=("w1", "w2", "w3"), block="feed_forward.experts")
    layout = build_layout(file_of(tmp_path, entries, {"model_type": "made_up", "num_experts_per_tok": 2}))
    assert (layout.family, layout.top_k) == ("unknown", 2)
    assert list(expert_views(layout, 0, 1)) == ["w1.weight", "w2.weight", "w3.weight"]
    layout = build_layout(file_of(tmp_path, split_experts([0], 2, block="moe.experts")))
    assert list(expert_views(layout, 0, 1)) == ["gate", "up", "down"]


def test_a_family_is_told_by_its_names_only_where_no_config_says_another(tmp_path):
    entries = split_experts([0], 2, modules=("w1", "w2", "w3"), block="block_sparse_moe.experts")
    assert build_layout(file_of(tmp_path, entries)).family == "mixtral"
    assert build_layout(file_of(tmp_path, entries, {"model_type": "phimoe"})).family == "phimoe"
    assert build_layout(file_of(tmp_path, entries, {"model_type": "made_up"})).family == "unknown"


def test_a_config_of_a_model_that_also_sees_has_its_numbers_inside(tmp_path):
    text = {"model_type": "kimi_k2", "n_routed_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    entries = split_experts([0, 1], 2, prefix="language_model.model")
    layout = build_layout(file_of(tmp_path, entries, {"model_type": "kimi_k25_vl", "text_config": text}))
    assert (layout.family, layout.top_k, list(layout.layers)) == ("deepseek_v3", 1, [0])


def test_empty_tensors_beside_experts_cost_nothing(tmp_path):
    entries = split_experts([0], 2)
    for expert in range(2):
        entries.append(tensor(name_of(0, expert, "gate_proj", "marker"), "F8_E4M3", [0], 1))
    entries.append(tensor("scaled_fp8", "F8_E4M3", [0, 64], 1))
    layout = build_layout(file_of(tmp_path, entries, qwen(2, 1)))
    assert layout.trunk["scaled_fp8"].nbytes == 0
    assert expert_views(layout, 0, 1)["gate.marker"].shape == (0,)
    assert layout.layers[0].records[0].nbytes == 3 * 96


def test_an_expert_tensor_of_an_unknown_dtype_has_bytes_and_no_view(tmp_path):
    entries = [(name, "F3_X" if "up" in name else dtype, shape, b) for name, dtype, shape, b in split_experts([0], 2)]
    (record,) = build_layout(file_of(tmp_path, entries, qwen(2, 1))).layers[0].records
    assert [view.label for view in record.views] == ["gate", "down"]
    assert record.nbytes == 3 * 96
    assert "F3_X" in record.refused["up.weight"]


def test_packed_experts_are_viewed_as_bytes_and_must_end_on_one(tmp_path):
    block = "model.layers.0.mlp.experts."
    config = {"model_type": "gpt_oss"}
    entries = [(block + "gate_up_proj", "F4", [2, 4, 4], bytes(range(16)))]
    layout = build_layout(file_of(tmp_path, entries, config))
    assert expert_views(layout, 0, 1)["gate_up_proj"].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert layout.layers[0].records[0].tensors[0].shape == (4, 4)
    assert "gate" in layout.layers[0].records[0].refused
    with pytest.raises(UnsupportedCheckpoint, match="do not end on a byte"):
        build_layout(file_of(tmp_path, [(block + "gate_up_proj", "F4", [2, 3, 1], b"abc")], config))


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"gate_up_proj": [4, 6]}, "axes are expected"),
        ({"gate_up_proj": []}, "disagree on the number of experts|fused"),
        ({"gate_up_proj": [0, 4, 4]}, "disagree on the number of experts"),
        ({"gate_up_proj": [4, 4, 5]}, "5 rows are not gate and up"),
        ({"gate_up_proj": [4, 4, 4], "down_proj": [3, 2, 4]}, "disagree on the number of experts"),
        ({"gate_up_proj": [4, 4, 4], "down_proj": [4, 4, 2]}, "do not fit"),
    ],
)
def test_fused_tensors_that_contradict_their_family_are_refused(shapes, text, tmp_path):
    entries = [tensor(f"model.layers.0.mlp.experts.{name}", "F32", shape, name) for name, shape in shapes.items()]
    with pytest.raises(CheckpointError, match=text):
        build_layout(file_of(tmp_path, entries, {"model_type": "gpt_oss"}))


def test_experts_in_two_places_of_one_layer_are_not_guessed_at(tmp_path):
    entries = [*split_experts([0], 2), *split_experts([0], 2, block="self_attn.experts")]
    with pytest.raises(UnsupportedCheckpoint, match="experts in more than one place"):
        build_layout(file_of(tmp_path, entries, qwen(2, 1)))


@pytest.mark.parametrize("names", [[], ["model.layers.0.mlp.gate_proj.weight"], ["model.layers.0.mlp.experts.bias"]])
def test_a_checkpoint_without_experts_is_refused(names, tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match="no routed experts"):
        build_layout(file_of(tmp_path, [tensor(name, "F32", [2], 1) for name in names], {"model_type": "llama"}))


def test_a_header_that_asks_for_a_huge_table_gets_none(tmp_path):
    entries = [tensor(name_of(0, expert, f"m{expert}"), "U8", [1], expert) for expert in range(2000)]
    with pytest.raises(CheckpointError, match="hardly any two"):
        build_layout(file_of(tmp_path, entries))


def test_every_row_of_the_table_is_reached_by_its_model_types():
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(set(types)) == len(types)
    assert config_value({"a": None, "text_config": {"a": 0}}, "a") == 0
    assert config_count({"a": [1, 2], "b": 3}, ("a", "b")) == 3
    for wrong in (True, 0, -1, 2.0, "2"):
        with pytest.raises(CheckpointError, match="not a positive integer"):
            config_count({"a": wrong}, ("a",))


def test_an_expert_of_plain_bytes_has_one_view_of_them():
    record = bytes_record(7)
    assert (record.nbytes, [view.label for view in record.views], record.views[0].shape) == (7, ["data"], (7,))
