"""`fastcache inspect`: figures that can be counted by hand, for both formats, and nothing read but headers."""

import json
from pathlib import Path

from checkpoints import moe_dir, pattern, qwen, split_experts, st, tensor
from click.testing import CliRunner
from ggufs import experts, gguf, moe_pairs, stored, weights

from fastcache.cli import main
from fastcache.formats.gguf import read_header
from fastcache.inspection import inspect_checkpoint

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "oracle"
KEYS = set(
    "path format family moe_layers n_experts top_k expert_bytes token_cycle_bytes extents_per_expert dtypes siblings "
    "trunk_bytes misaligned_fraction files not_indexed problems".split()
)


def call(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], catch_exceptions=False)


def mixed(path):
    """Six layers of Q4_0 and Q8_0, one of F32."""
    tensors = [each for layer in range(6) for each in experts(layer, kinds=("Q4_0", "Q4_0", "Q8_0"))]
    router = [stored(f"blk.{layer}.ffn_gate_inp.weight", weights((4, 64), layer)) for layer in range(7)]
    return gguf(path, [*tensors, *experts(6), *router], moe_pairs(layers=7))


def test_a_gguf_with_mixed_types_is_told_layer_by_layer(tmp_path):
    figures = inspect_checkpoint(mixed(tmp_path / "m.gguf"))
    small, large = 2 * 32 * 36 + 64 * 34, 3 * 32 * 64 * 4
    assert figures.keys() >= KEYS
    assert (figures["format"], figures["family"], figures["top_k"]) == ("gguf", "qwen3_moe", 2)
    assert figures["moe_layers"] == list(range(7)) and figures["n_experts"] == 4
    assert figures["expert_bytes"] == {"min": small, "max": large, "total": 4 * (6 * small + large)}
    assert figures["token_cycle_bytes"] == 2 * (6 * small + large)
    assert figures["extents_per_expert"] == {"min": 3, "mean": 3.0, "max": 3}
    assert figures["dtypes"] == {"F32": 4 * large, "Q4_0": 24 * 2 * 32 * 36, "Q8_0": 24 * 64 * 34}
    assert figures["trunk_bytes"] == 7 * 4 * 64 * 4 and figures["trunk_dtypes"] == {"F32": figures["trunk_bytes"]}
    assert figures["layers"][0] == {
        "layer": 0,
        "experts": 4,
        "expert_bytes": {"min": small, "max": small},
        "dtypes": ["Q4_0", "Q8_0"],
    }
    assert figures["layers"][6]["expert_bytes"]["max"] == large
    assert figures["problems"] == [] and figures["misaligned_fraction"] == 0
    text = call(tmp_path / "m.gguf").stdout
    for word in (
        "qwen3_moe (gguf, 1 file",
        "0-5",
        "Q4_0, Q8_0",
        "4.4 KiB",
        "24.0 KiB",
        "4 in a layer, 2 of them per token",
    ):
        assert word in text


def test_json_is_the_same_figures(tmp_path):
    path = mixed(tmp_path / "m.gguf")
    result = call(path, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout) == inspect_checkpoint(path)


def test_places_are_counted_and_neighbours_are_one(tmp_path):
    entries = split_experts([0], 2)  # gate, up, down of an expert side by side
    one = inspect_checkpoint(moe_dir(tmp_path / "a", [entries], qwen(2, 1)))
    assert one["extents_per_expert"] == {"min": 1, "mean": 1.0, "max": 1}
    two = inspect_checkpoint(moe_dir(tmp_path / "b", [entries[:4], entries[4:]], qwen(2, 1)))
    assert two["extents_per_expert"] == {"min": 1, "mean": 1.5, "max": 2}
    assert len(two["files"]) == 2 and two["files"][0]["bytes"] == Path(two["files"][0]["path"]).stat().st_size
    assert one["siblings"] == ["gate", "up", "down"] and one["format"] == "safetensors"


def test_misaligned_tensors_are_counted(tmp_path):
    root = moe_dir(tmp_path / "m", [[]], qwen(2, 1), index=False)
    (root / "model-00001-of-00001.safetensors").unlink()
    for pad in range(4):
        path = st(root / "model.safetensors", split_experts([0], 2), pad=pad)
        figures = inspect_checkpoint(root)
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert figures["misaligned_fraction"] == (0.0 if start % 4 == 0 else 1.0)
        assert any("misaligned" in problem for problem in figures["problems"]) == bool(start % 4)


def test_what_a_user_should_know_is_among_the_problems(tmp_path):
    config = {"model_type": "newmoe", "num_hidden_layers": 1}
    root = moe_dir(tmp_path / "m", [split_experts([0], 2)], config)
    st(root / "model-mtp.safetensors", [tensor("mtp.x", "F32", (2,), 1)])
    figures = inspect_checkpoint(root)
    assert [Path(file).name for file in figures["not_indexed"]] == ["model-mtp.safetensors"]
    text = "\n".join(figures["problems"])
    for words in ("no row for 'newmoe'", "how many experts a token uses", "model-mtp.safetensors"):
        assert words in text
    assert figures["token_cycle_bytes"] is None
    assert "! the family table has no row for 'newmoe'" in call(root).stdout


def test_types_without_arithmetic_and_unknown_ones_are_listed(tmp_path):
    weight = [(name, "F8_E4M3", shape, pattern(24, name)) for name, _, shape, _ in split_experts([0], 2)]
    scales = [tensor(f"{name}_scale_inv", "F32", (1, 1), name) for name, *_ in weight]
    figures = inspect_checkpoint(moe_dir(tmp_path / "fp8", [[*weight, *scales]], qwen(2, 1)))
    assert set(figures["siblings"]) >= {"gate.weight", "gate.weight_scale_inv"}
    assert figures["dtypes"] == {"F8_E4M3": 144, "F32": 24}
    assert not any("arithmetic" in problem for problem in figures["problems"])
    figures = inspect_checkpoint(moe_dir(tmp_path / "alone", [weight], qwen(2, 1)))
    assert any("no arithmetic here" in problem and "float8_e4m3fn" in problem for problem in figures["problems"])
    method = {"quantization_config": {"quant_method": "gptq"}}
    figures = inspect_checkpoint(moe_dir(tmp_path / "gptq", [weight], {**qwen(2, 1), **method}))
    assert any("quantization_config.quant_method is 'gptq'" in problem for problem in figures["problems"])
    odd = [(name, "F3_X", shape, content) for name, _, shape, content in weight]
    figures = inspect_checkpoint(moe_dir(tmp_path / "odd", [odd], qwen(2, 1)))
    assert figures["dtypes"] == {"F3_X": 144} and figures["problems"]


def test_errors_are_one_line(tmp_path):
    broken = mixed(tmp_path / "m.gguf")
    broken.write_bytes(broken.read_bytes()[:-100])
    for path, words in ((broken, "CheckpointTruncated"), (tmp_path / "none", "CheckpointNotFound")):
        for more in ([], ["--json"]):
            result = call(path, *more)
            assert result.exit_code == 1 and not result.stdout
            assert result.stderr.startswith(f"Error: {words}: {path}") and result.stderr.count("\n") == 1


def test_only_headers_are_read(tmp_path):
    path = mixed(tmp_path / "m.gguf")
    wanted = inspect_checkpoint(path)
    size, start = path.stat().st_size, read_header(path).data_start
    with path.open("r+b") as file:
        file.truncate(start)
        file.truncate(size)  # a hole
    assert inspect_checkpoint(path) == wanted


def test_every_recorded_checkpoint_that_opens_is_told_in_full():
    configs = sorted([*DATA.glob("*/*/config.json"), *SHARED.glob("cases/*/*/config.json")])
    paths = [config.parent for config in configs if "dbrx" not in config.parts]
    paths += sorted([*DATA.glob("gguf/*.gguf"), *SHARED.glob("gguf/*.gguf")])
    assert paths
    for path in paths:
        figures = inspect_checkpoint(path)
        total = figures["expert_bytes"]["total"] + figures["trunk_bytes"]
        stored_bytes = sum(file["bytes"] for file in figures["files"])
        assert total <= stored_bytes and total > 0.2 * stored_bytes
        assert sum(figures["dtypes"].values()) == figures["expert_bytes"]["total"]
        assert call(path).exit_code == 0
