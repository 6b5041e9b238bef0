"""What was reported of other readers of checkpoints, tried on ours: whose a tensor is. See test_reports.py."""

import errno
import json
import re

import numpy as np
import pytest
from checkpoints import as_numbers, moe_dir, name_of, qwen, split_experts, st, tensor
from ggufs import experts, gguf, moe_pairs, weights
from rig import Caller, held, scripted
from test_gguf_layout import block_output, model, split

import fastcache
from fastcache.errors import (
    CheckpointHeaderError,
    CheckpointTruncated,
    ReadFailed,
    UnknownExpert,
    UnsupportedCheckpoint,
)
from fastcache.formats.gguf import read_header
from fastcache.inspection import inspect_checkpoint
from fastcache.moe import load_block
from fastcache.traces import read_trace

MODULES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
N_EXPERTS = 3


def f32(name, array):
    return (name, "F32", array.shape, np.ascontiguousarray(array, np.float32).tobytes())


# ---- fused tensors


def fused_as(family, gate, up, down):
    """The experts' tensors of layer 0 as `family` stores them, and the rest of its config."""
    if family == "gpt_oss":  # [E, H, 2I], gate and up alternating
        both = np.stack([gate, up], axis=2).reshape(N_EXPERTS, -1, gate.shape[2]).transpose(0, 2, 1)
        block = "model.layers.0.mlp.experts."
        return {block + "gate_up_proj": both, block + "down_proj": down.transpose(0, 2, 1)}
    block = "model.layers.0.block_sparse_moe."  # granitemoe: [E, 2I, H], all gate rows first
    both = np.concatenate([gate, up], axis=1)
    return {block + "input_linear.weight": both, block + "output_linear.weight": down}


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
@pytest.mark.parametrize("hidden", [4, 8, 12])
def test_orientation_and_interleaving_come_from_the_family_never_from_sizes(family, hidden, tmp_path):
    inter = 4  # two of it are above, equal to and below hidden
    gate, up = weights((2, N_EXPERTS, inter, hidden), 1)
    down = weights((N_EXPERTS, hidden, inter), 2)
    stored = fused_as(family, gate, up, down)
    config = {"num_local_experts": N_EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    entries = [f32(name, array) for name, array in stored.items()]
    root = moe_dir(tmp_path / "m", [entries], {"model_type": family, **config})
    with fastcache.open(root, "all") as store:
        for expert in range(N_EXPERTS):
            lease = store[0, expert]
            for role, wanted in (("gate", gate), ("up", up), ("down", down)):
                np.testing.assert_array_equal(lease[role], wanted[expert], strict=True)
            raw = b"".join(array[expert].tobytes() for array in stored.values())
            assert bytes(lease) == raw
    block = "model.layers.0.mlp.experts."
    entries = [
        f32(block + name, array) for name, array in zip(("gate_up_proj", "down_proj"), stored.values(), strict=True)
    ]
    nobody = moe_dir(tmp_path / "nobody", [entries], {"model_type": "nobodys", **config})
    with fastcache.open(nobody, "all") as store:
        for expert in range(N_EXPERTS):
            lease = store[0, expert]
            assert bytes(lease) == b"".join(array[expert].tobytes() for array in stored.values())
            assert not set(lease) & set(MODULES)
            with pytest.raises(KeyError, match="gate"):
                lease["gate"]
    with pytest.raises(UnsupportedCheckpoint, match="forward is not available for the family 'unknown'"):
        load_block(nobody, 0, experts="resident")


def fused_layer(layer, n_experts=4, prefix="model"):
    block = f"{prefix}.layers.{layer}.mlp.experts."
    return [
        tensor(block + "gate_up_proj", "F32", [n_experts, 12, 4], layer, prefix, 1),
        tensor(block + "down_proj", "F32", [n_experts, 4, 6], layer, prefix, 2),
    ]


@pytest.mark.parametrize("draft_fused", [False, True])
def test_each_layer_has_its_own_layout_and_draft_and_shared_experts_are_not_routed_to(draft_fused, tmp_path):
    if draft_fused:
        routed = split_experts([1, 2], 4)
        draft = fused_layer(0, prefix="mtp")
    else:
        routed = [*fused_layer(1), *fused_layer(2)]
        draft = split_experts([0], 4, prefix="mtp")
    dense = [tensor(f"model.layers.0.mlp.{module}.weight", "F32", [6, 4], module) for module in MODULES.values()]
    shared = [tensor(f"model.layers.1.mlp.shared_expert.{m}.weight", "F32", [6, 4], m) for m in MODULES.values()]
    root = moe_dir(tmp_path / "m", [[*draft, *dense, *shared, *routed]], qwen(4, 3))
    figures = inspect_checkpoint(root)
    assert (figures["moe_layers"], figures["n_experts"]) == ([1, 2], 4)
    assert figures["expert_bytes"] == {"min": 288, "max": 288, "total": 8 * 288}
    with fastcache.open(root, "all") as store:
        assert store.layers == (1, 2) and len(store) == 8
        assert set(store.trunk) == {entry[0] for entry in (*draft, *dense, *shared)}
        for layer in store.layers:
            for expert in range(4):
                mine = [each for each in routed if f".layers.{layer}." in each[0]]
                if draft_fused:
                    wanted = [each[3] for each in mine if f".experts.{expert}." in each[0]]
                else:
                    wanted = [as_numbers(each)[expert].tobytes() for each in mine]
                assert bytes(store[layer, expert]) == b"".join(wanted)
        for key in ((0, 0), (3, 0)):  # the dense layer, and one beyond the last
            with pytest.raises(UnknownExpert, match=re.escape(f"layer {key[0]}")):
                store[key]


# ---- experts in several places


def test_an_expert_in_two_files_appears_whole_or_not_at_all(tmp_path):
    entries = split_experts([0], 8)
    late = name_of(0, 7, "gate_proj")
    others = [entry for entry in entries if ".experts.7." not in entry[0]]
    scales = [tensor(name_of(0, 7, module, "weight_scale"), "F32", [6, 1], module) for module in MODULES.values()]
    scales += [
        tensor(name_of(0, e, m, "weight_scale"), "F32", [6, 1], e, m) for e in range(7) for m in MODULES.values()
    ]
    first = [*others, *(entry for entry in entries if entry[0] == late)]
    second = [*(entry for entry in entries if ".experts.7." in entry[0] and entry[0] != late), *scales]
    root = moe_dir(tmp_path / "m", [first, second], qwen(8, 1))
    stored = {entry[0]: entry[3] for entry in (*first, *second)}
    wanted = {f"{role}.{suffix}": stored[name_of(0, 7, module, suffix)]
              for role, module in MODULES.items() for suffix in ("weight", "weight_scale")}  # fmt: skip
    with scripted(root, slots=1) as (store, engine):
        caller, ops = Caller(store.acquire, 0, 7), []
        while sum(op.expected for op in ops) < sum(map(len, wanted.values())):
            ops += engine.take(wait=20)
        assert {op.path for op in ops} == {str(root / f"model-0000{n}-of-00002.safetensors") for n in (1, 2)}
        *some, last = sorted(ops, key=lambda op: op.path)
        for op in some:
            while not engine.fill(op.id):
                pass
        assert not caller.done() and not store.is_resident(0, 7)
        engine.settle(last.id, -errno.EIO)
        error = caller.error()
        assert isinstance(error, ReadFailed) and error.errno == errno.EIO and last.path in str(error)
        assert not store.is_resident(0, 7) and held(store) == 0
        caller = Caller(store.acquire, 0, 7)  # the only slot is free again, and the key is not poisoned
        while not caller.done():
            for op in engine.take():
                while not engine.fill(op.id):
                    pass
        lease = caller.result()
        assert {label: lease[label].tobytes() for label in lease} == wanted
        assert store.stats().overflow_peak_bytes == 0
        lease.release()


# ---- GGUF


def test_gate_and_up_swapped_are_another_model(tmp_path):
    gate, up, down = experts(0)
    pairs = list(zip(*(np.split(np.frombuffer(each[3], "<f4"), 4) for each in (gate, up)), strict=True))

    def fused(order):
        both = b"".join(pair[i].tobytes() for pair in pairs for i in order)
        return [("blk.0.ffn_gate_up_exps.weight", (4, 64, 64), "F32", both), down]

    wanted = block_output(model(tmp_path / "apart.gguf", [gate, up, down]))
    assert block_output(model(tmp_path / "fused.gguf", fused((0, 1)))).tobytes() == wanted.tobytes()
    assert np.abs(block_output(model(tmp_path / "swapped.gguf", fused((1, 0)))) - wanted).max() > 1e-2


def test_tensors_per_expert_and_merged_ones_hold_the_same_bytes_and_never_meet_in_one_layer(tmp_path):
    merged = experts(0)
    apart = list(split(merged))
    with (
        fastcache.open(model(tmp_path / "merged.gguf", merged), "all") as one,
        fastcache.open(model(tmp_path / "apart.gguf", apart), "all") as other,
    ):
        for expert in range(4):
            assert set(one[0, expert]) == set(other[0, expert]) == set(MODULES)
            for role in MODULES:
                assert one[0, expert][role].tobytes() == other[0, expert][role].tobytes()
    for mixed in ([*merged[:2], *apart[-4:]], [*merged, *apart]):
        with pytest.raises(UnsupportedCheckpoint, match="layer 0 mixes"):
            fastcache.open(model(tmp_path / "mixed.gguf", mixed), "all")


@pytest.mark.parametrize("align", [16, 64, 4096])
def test_experts_are_found_at_every_alignment_whatever_the_length_of_the_metadata(align, tmp_path):
    for length in range(0, 64, 7):
        pairs = [*moe_pairs(), ("k" * (length + 1), 0, b"\1")]
        path = gguf(tmp_path / "m.gguf", experts(0, inter=3, hidden=5), pairs, align=align)
        with fastcache.open(path, "all") as store:
            for expert in range(4):
                for number, (role, shape) in enumerate((("gate", (3, 5)), ("up", (3, 5)), ("down", (5, 3)))):
                    wanted = weights((4, *shape), 0, number)[expert]
                    np.testing.assert_array_equal(store[0, expert][role], wanted)


def test_a_tensor_whose_size_nearly_overflows_is_refused(tmp_path):
    for shape in ((2**62 - 4,), (4, 2**60 - 1), (2**62,), (2**63,), (2**32, 2**32)):
        path = gguf(tmp_path / "m.gguf", [("a", (8,), "F32", bytes(32)), ("b", shape, "F32", bytes(32))])
        with pytest.raises((CheckpointTruncated, CheckpointHeaderError), match="'b'"):
            read_header(path)


# ---- the first, and very many


def test_the_first_tensor_of_a_file_may_be_an_expert(tmp_path):
    entries = split_experts([0], 2)
    root = moe_dir(tmp_path / "m", [[*entries, tensor("z", "F32", [2], 1)]], qwen(2, 1))
    path = root / "model-00001-of-00001.safetensors"
    head = path.read_bytes()[8:]
    assert head.startswith(f'{{"{entries[0][0]}"'.encode())
    with fastcache.open(root, "all") as store:
        assert len(store) == 2 and set(store.trunk) == {"z"}
        assert store[0, 0]["gate"].tobytes() == entries[0][3]


def test_each_of_a_thousand_experts_has_its_own_bytes_and_a_trace_keeps_their_numbers(tmp_path):
    count = 1000
    entries = sorted(split_experts([0], count, dtype="U8", inter=2, hidden=2))
    assert ".experts.10." in entries[6][0]  # the names are in string order
    (tmp_path / "config.json").write_text(json.dumps(qwen(count, 1)))
    stored = {entry[0]: entry[3] for entry in entries}
    with fastcache.open(st(tmp_path / "model.safetensors", entries), "all") as store:
        recording = store.record(tmp_path / "trace")
        for expert in range(count):
            with store[0, expert] as lease:
                wanted = [stored[name_of(0, expert, module)] for module in MODULES.values()]
                assert [lease[label].tobytes() for label in lease] == wanted
        for expert in (-1, count):
            with pytest.raises(UnknownExpert, match=re.escape(str(expert))):
                store[0, expert]
        recording.stop()
    assert read_trace(tmp_path / "trace").keys.tolist() == list(range(count))
