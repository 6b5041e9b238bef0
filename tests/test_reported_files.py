"""What was reported of other readers of checkpoints, tried on ours: files, headers and indexes. See test_reports.py."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import as_numbers, moe_dir, name_of, pattern, qwen, split_experts, st, tensor, write_index
from click.testing import CliRunner
from codes import E4M3, nvfp4, product, spread
from ggufs import experts, gguf, moe_pairs
from rig import Caller, scripted
from test_quantization import compressed, entries_of

import fastcache
from fastcache.cli import main
from fastcache.errors import (
    CheckpointHeaderError,
    CheckpointTruncated,
    MissingShard,
    MissingTensor,
    UnsupportedCheckpoint,
    WrongShard,
)
from fastcache.formats.checkpoint import INDEX_NAME
from fastcache.inspection import inspect_checkpoint
from fastcache.moe import load_block

MODULES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
WAYS = (
    lambda path: fastcache.open(path, "all"),
    inspect_checkpoint,
    lambda path: load_block(path, 0, experts="resident"),
)


def refused_everywhere(path, error, match):
    """The store, `inspect` and the forward refuse `path` with the same words, and so does the command line."""
    for way in WAYS:
        with pytest.raises(error, match=match) as caught:
            way(path)
        assert type(caught.value) is error
    result = CliRunner().invoke(main, ["inspect", str(path)], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {error.__name__}: {caught.value}\n"


def single(path, entries, config=None, **more):
    """Write a directory of one file, made by `st` with `more`."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or qwen(2, 1)))
    return st(path / "model.safetensors", entries, **more).parent


def weight_of(store, layer, expert, role, width):
    """The float32 numbers that `linear` multiplies by: the product with the unit matrix is exact."""
    with store[layer, expert] as lease:
        return fastcache.linear(np.eye(width, dtype=np.float32), lease, role).T


def serves(path, entries, layers=(0,), n_experts=2):
    """Every expert's own bytes are those of `entries`, by the labels gate, up and down."""
    stored = {entry[0]: entry for entry in entries}
    with fastcache.open(path, "all") as store:
        for layer in layers:
            for expert in range(n_experts):
                with store[layer, expert] as lease:
                    for role, module in MODULES.items():
                        wanted = as_numbers(stored[name_of(layer, expert, module)])
                        assert lease[role].dtype == wanted.dtype and lease[role].flags.aligned
                        assert lease[role].tobytes() == wanted.tobytes(), (layer, expert, role)


# ---- scales


def nvfp4_experts(rng, n_experts, shape):
    """Entries of NVFP4 experts whose global scales are scalars, and the weights that they stand for."""
    entries, wanted = [], {}
    for expert in range(n_experts):
        for role, module in MODULES.items():
            rows = shape[::-1] if role == "down" else shape
            arrays, wanted[expert, role] = nvfp4(rng, rows)
            arrays["up.weight_global_scale"] = arrays["up.weight_global_scale"].reshape(())
            entries += entries_of(name_of(0, expert, module, "{}"), arrays)
    return entries, wanted


def test_an_expert_travels_with_its_global_scale_and_one_that_lost_it_is_named_at_open(tmp_path):
    entries, wanted = nvfp4_experts(np.random.default_rng(1), 8, (48, 32))
    scheme = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16, "symmetric": True}
    config = {**qwen(8, 1), "quantization_config": compressed([scheme], "nvfp4-pack-quantized")}
    router = tensor("model.layers.0.mlp.gate.weight", "F32", [8, 32], 1)
    root = moe_dir(tmp_path / "whole", [[*entries, router]], config)
    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
    with fastcache.open(root, "all") as store:
        for (expert, role), weight in wanted.items():
            lease = store[0, expert]
            assert set(lease) == {f"{each}.{suffix}" for each in MODULES for suffix in suffixes}
            assert lease[f"{role}.weight_global_scale"].shape == ()
            np.testing.assert_array_equal(weight_of(store, 0, expert, role, weight.shape[1]), weight)
    lost = name_of(0, 3, "up_proj", "weight_global_scale")
    without = [[entry for entry in entries if entry[0] != lost] + [router]]
    refused_everywhere(
        moe_dir(tmp_path / "lost", without, config),
        MissingTensor,
        "layer 0 expert 3: missing up_proj.weight_global_scale, present for 7 of 8 siblings",
    )


def test_a_scale_is_found_under_each_of_its_names_and_float8_without_one_is_bytes(tmp_path):
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 0x7E, (32, 32), np.uint8)
    scales = 2.0 ** rng.integers(-12, -4, (2, 2))  # exact in float32 and in E8M0
    wanted = product(E4M3[codes], spread(scales, codes.shape, (16, 16)))
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    config = {**qwen(1, 1, num_experts_per_tok=1), "quantization_config": fp8}
    weights = [(name_of(0, 0, module), "F8_E4M3", codes.shape, codes.tobytes()) for module in MODULES.values()]
    kinds = {"F32": np.float32, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
    for suffix in ("scale", "weight_scale_inv", "weight_scale"):
        for kind, dtype in kinds.items():
            grid = [
                (name_of(0, 0, module, suffix), kind, scales.shape, scales.astype(dtype).tobytes())
                for module in MODULES.values()
            ]
            with fastcache.open(single(tmp_path / f"{suffix}-{kind}", [*weights, *grid], config), "all") as store:
                for role in MODULES:
                    np.testing.assert_array_equal(weight_of(store, 0, 0, role, 32), wanted)
    router = tensor("model.layers.0.mlp.gate.weight", "F32", [1, 32], 1)
    alone = single(tmp_path / "none", [*weights, router], config)
    with pytest.raises(UnsupportedCheckpoint, match="'gate'.*float8 without a scale"):
        load_block(alone, 0, experts="resident")
    with fastcache.open(alone, "all") as store:
        for role in MODULES:
            assert store[0, 0][f"{role}.weight"].tobytes() == codes.tobytes()
            with pytest.raises(UnsupportedCheckpoint, match=f"{role}.*scale"):
                weight_of(store, 0, 0, role, 32)


# ---- headers


def test_an_expert_that_a_header_names_twice_is_a_duplicate_key(tmp_path):
    entries = split_experts([0], 2)
    head = {entry[0]: {"dtype": "F32", "shape": entry[2], "data_offsets": [96 * i, 96 * i + 96]}
            for i, entry in enumerate(entries)}  # fmt: skip
    name = entries[4][0]
    again = json.dumps({name: {"dtype": "F32", "shape": [6, 4], "data_offsets": [576, 672]}})
    raw = (json.dumps(head)[:-1] + ", " + again[1:]).encode()
    root = single(tmp_path / "m", [], raw_header=raw, tail=b"".join(entry[3] for entry in entries) + bytes(96))
    refused_everywhere(root, CheckpointHeaderError, f"model.safetensors: .*duplicate key: '{name}'")


def test_every_byte_has_one_owner_whatever_the_order_of_the_names(tmp_path):
    entries = split_experts([0], 2)
    first, second = entries[2][0], entries[3][0]
    places = {entry[0]: (96 * i, 96 * i + 96) for i, entry in enumerate(entries)}

    def moved(by, from_=3):
        return [(*entry, tuple(at + by * (i >= from_) for at in places[entry[0]])) for i, entry in enumerate(entries)]

    overlap = f"overlap.*'{first}' .192, 288.*'{second}' .287, 383"
    refused_everywhere(single(tmp_path / "overlap", moved(-1)), CheckpointHeaderError, overlap)
    alias = [(*e, places[first] if e[0] == second else places[e[0]]) for e in entries]
    both = f"'{first}' .192, 288.*'{second}' .192, 288|'{second}' .192, 288.*'{first}' .192, 288"
    refused_everywhere(single(tmp_path / "alias", alias), CheckpointHeaderError, both)
    hole = single(tmp_path / "hole", moved(8), tail=bytes(8))
    refused_everywhere(hole, CheckpointHeaderError, f"8 bytes belong to no tensor.*'{first}'.*288.*'{second}'.*296")
    turned = entries[::-1]
    head = {name: {"dtype": d, "shape": s, "data_offsets": places[name]} for name, d, s, _ in turned}
    body = b"".join(entry[3] for entry in entries)
    serves(single(tmp_path / "turned", [], raw_header=json.dumps(head).encode(), tail=body), entries)


@pytest.mark.parametrize("keep", [-1, -4096, "header", 7])
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_a_file_that_was_cut_is_refused_at_open_with_what_it_needs_and_has(keep, format, tmp_path):
    if format == "gguf":
        root = path = gguf(tmp_path / "m.gguf", experts(0), moe_pairs())
        start = path.stat().st_size - 3 * 4 * 32 * 64 * 4
    else:
        entries = split_experts([0, 1], 4, inter=40, hidden=24)
        root = moe_dir(tmp_path / "m", [entries[:12], entries[12:]], qwen())
        path = root / "model-00002-of-00002.safetensors"
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    fastcache.open(root, "all").close()
    size = path.stat().st_size
    left = start if keep == "header" else 7 if keep == 7 else size + keep
    os.truncate(path, left)
    least = 8 if format == "safetensors" else 24
    said = f"7 bytes, and the .* alone takes {least}" if keep == 7 else f"{size} bytes needed, {left} present"
    refused_everywhere(root, CheckpointTruncated, f"^{path}: .*{said}|^{path}: {said}")


def test_bytes_after_the_last_tensor_are_refused_by_every_way_in(tmp_path):
    root = single(tmp_path / "m", split_experts([0], 2), tail=bytes(16))
    refused_everywhere(root, CheckpointHeaderError, "16 bytes after the last tensor")


def test_tensors_of_no_elements_are_listed_and_nothing_is_read_for_them(tmp_path):
    entries = split_experts([0], 2)
    markers = [(name_of(0, e, "gate_proj", "marker"), "F8_E4M3", [0], b"") for e in range(2)]
    ends = [("scaled_fp8", "F8_E4M3", [0], b""), ("z.last", "F8_E4M3", [0, 64], b"")]
    root = single(tmp_path / "m", [ends[0], *entries[:1], markers[0], *entries[1:], markers[1], ends[1]])
    figures = inspect_checkpoint(root)
    assert figures["trunk_dtypes"] == {"F8_E4M3": 0} and figures["dtypes"] == {"F32": 576}
    assert "gate.marker" in figures["siblings"]
    serves(root, entries)
    with fastcache.open(root, "all") as store:
        assert {name: array.shape for name, array in store.trunk.items()} == {"scaled_fp8": (0,), "z.last": (0, 64)}
        assert store[0, 1]["gate.marker"].shape == (0,)
    with scripted(root, slots=2) as (store, engine):
        caller, ops = Caller(store.acquire_many, 0, [0, 1]), []
        while not caller.done():
            ops += engine.take()
            for op in engine.in_hand:
                engine.fill(op)
        with caller.result() as leases:
            assert sum(lease.nbytes for lease in leases) == 576
        assert ops and all(op.nbytes > 0 and op.expected > 0 for op in ops)
    refused = single(tmp_path / "one", [*entries, ("scaled_fp8", "F8_E4M3", [1], b"")])
    refused_everywhere(refused, CheckpointHeaderError, "'scaled_fp8' is F8_E4M3 .1. = 1 bytes.*give it 0")


@pytest.mark.parametrize("pad", [1, 3, 5])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_experts_that_begin_on_an_odd_byte_arrive_aligned_and_whole(pad, dtype, tmp_path):
    entries = split_experts([0], 2, dtype=dtype)
    head = {entry[0]: {"dtype": dtype, "shape": entry[2], "data_offsets": [0, 0]} for entry in entries}
    at = 0
    for entry in entries:
        head[entry[0]]["data_offsets"] = [at, at := at + len(entry[3])]
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8 + pad)  # so that the data begins `pad` bytes after a multiple of 8
    root = single(tmp_path / "m", [], raw_header=raw, tail=b"".join(entry[3] for entry in entries))
    assert inspect_checkpoint(root)["misaligned_fraction"] == 1
    serves(root, entries)


def test_every_stored_type_has_its_carrier_and_one_that_nobody_knows_is_refused_only_in_use(tmp_path):
    kinds = {
        "BF16": ([2, 8], 32, ml_dtypes.bfloat16, (2, 8)),
        "F8_E4M3": ([2, 8], 16, ml_dtypes.float8_e4m3fn, (2, 8)),
        "F8_E5M2": ([2, 8], 16, ml_dtypes.float8_e5m2, (2, 8)),
        "F8_E8M0": ([2, 8], 16, ml_dtypes.float8_e8m0fnu, (2, 8)),
        "F4": ([2, 8], 8, np.uint8, (2, 4)),
    }
    entries = split_experts([0], 2)
    others = [(f"t.{dtype}", dtype, row[0], pattern(row[1], dtype)) for dtype, row in kinds.items()]
    others.append(("t.F3_X", "F3_X", [5], b"abc"))
    root = single(tmp_path / "m", [*entries, *others])
    figures = inspect_checkpoint(root)
    assert figures["trunk_dtypes"] == {name[2:]: len(content) for name, _, _, content in others}
    serves(root, entries)
    with fastcache.open(root, "all") as store:
        for name, dtype, _, content in others[:-1]:
            array = store.trunk[name]
            assert (array.dtype, array.shape, array.tobytes()) == (*kinds[dtype][2:], content)
        with pytest.raises(UnsupportedCheckpoint, match="F3_X"):
            store.trunk["t.F3_X"]
    odd = single(tmp_path / "odd", [*entries, ("t", "F4", [1, 3], b"ab")])
    refused_everywhere(odd, CheckpointHeaderError, "'t'.*F4 .1, 3. takes 12 bits")


# ---- indexes


def test_experts_come_from_the_files_of_the_index_and_the_others_open_by_their_path(tmp_path):
    entries = split_experts([0, 1], 4)
    root = moe_dir(tmp_path / "m", [entries[:12], entries[12:]], qwen())
    draft = split_experts([0], 4, prefix="mtp", hidden=8)
    mtp = st(root / "model-mtp.safetensors", draft)
    stray = st(root / "model.safetensors", [(n, "U8", s, pattern(24, n)) for n, _, s, _ in entries])
    assert inspect_checkpoint(root)["not_indexed"] == [str(mtp), str(stray)]
    serves(root, entries, (0, 1), 4)
    with fastcache.open(mtp, "all") as store:
        assert store.layers == (0,)
        stored = next(entry for entry in draft if entry[0] == name_of(0, 3, "down_proj", prefix="mtp"))
        assert store[0, 3]["down"].tobytes() == stored[3]
    with fastcache.open(stray, "all") as store:
        views = store[1, 2]
        assert b"".join(views[label].tobytes() for label in views) == b"".join(
            pattern(24, name_of(1, 2, module)) for module in MODULES.values()
        )


def bytes_read_by_this_process():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_an_index_is_held_against_headers_alone(tmp_path):
    part = 2**30
    modules = tuple(MODULES.values())
    shards = [
        [
            (name_of(layer, 0, module), "U8", [2**15, 2**15], b"", (i * part, (i + 1) * part))
            for i, module in enumerate(modules)
        ]
        for layer in (0, 1)
    ]
    root = moe_dir(tmp_path / "m", shards, qwen(1, 2, num_experts_per_tok=1))
    for path in root.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size + len(modules) * part)  # a hole
    index = json.loads((root / INDEX_NAME).read_text())["weight_map"]
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    name = name_of(1, 0, "up_proj")
    before = bytes_read_by_this_process()
    assert inspect_checkpoint(root)["expert_bytes"]["total"] == 6 * part
    write_index(root, {**index, name: first})
    refused_everywhere(root, WrongShard, f"'{name}' is in {first}.*does not hold it; found in {second}")
    write_index(root, {**index, "ghost": first})
    refused_everywhere(root, MissingTensor, f"in none of its 2 files: ghost; {first}")
    write_index(root, index)
    (root / second).unlink()
    refused_everywhere(root, MissingShard, f"1 of 2 files are missing: {second}")
    assert bytes_read_by_this_process() - before < 1 << 20
