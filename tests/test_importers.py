"""Traces of other programs: what each format says is what comes out, and a bad record is named."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from routing import groups_of, real, tokens

import fastcache.traces.importers as importers
import fastcache.traces.runs as runs
from fastcache.cli import main
from fastcache.errors import TraceError
from fastcache.traces import write_trace
from fastcache.traces.importers import FORMATS, detect, read


def pairs(path, *rows, tail=b""):
    path.write_bytes(np.array(rows, "<i4").tobytes() + tail)
    return path


def lines(path, *objects):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in objects))
    return path


def named(trace):
    """Batches as (layer number, experts)."""
    number = np.repeat([layer for layer, _ in trace.layers], [count for _, count in trace.layers])
    first = dict(zip((layer for layer, _ in trace.layers), trace.layer_first.tolist(), strict=False))
    found = []
    for group in groups_of(trace):
        (layer,) = set(number[group].tolist())
        found.append((layer, [key - first[layer] for key in group]))
    return found


@pytest.mark.parametrize("block", [1 << 16, 3, 1])
def test_pairs_are_batches_of_distinct_experts_of_one_layer(tmp_path, monkeypatch, block):
    monkeypatch.setattr(importers, "BLOCK", block)
    monkeypatch.setattr(runs, "BLOCK", block)
    rows = [(1, 7), (1, 3), (1, 7), (1, 0), (2, 3), (4, 3), (4, 2), (1, 3), (1, 3)]
    trace = read(pairs(tmp_path / "a.bin", *rows))
    assert named(trace) == [(1, [7, 3, 0]), (2, [3]), (4, [3, 2]), (1, [3])]
    assert trace.layers == tuple((layer, 8) for layer in range(5)) and trace.pool == 40
    assert trace.top_k is None and trace.expert_nbytes is None and trace.name == "a"


def test_bad_pairs_are_named(tmp_path):
    with pytest.raises(TraceError, match="record 2: the file ends after 5 of its 8 bytes"):
        read(pairs(tmp_path / "a", (1, 2), (1, 3), tail=b"abcde"))
    for row in [(-1, 0), (1024, 0), (0, -7), (0, 65536)]:
        with pytest.raises(TraceError, match=f"record 1: layer {row[0]}, expert {row[1]}: no model has one") as caught:
            read(pairs(tmp_path / "a", (0, 0), row), "kimi-k3")
        assert caught.value.record == 1


@pytest.mark.parametrize("bad", [0, 1, 7, 511])
def test_a_bad_pair_at_the_start_is_named_where_no_format_is_given(tmp_path, bad):
    rows = [(layer % 8, layer % 5) for layer in range(600)]
    rows[bad] = (1, -1)
    path = pairs(tmp_path / "a", *rows)
    with pytest.raises(TraceError, match=f"record {bad}: layer 1, expert -1: no model has one.*--format") as caught:
        read(path)
    assert caught.value.record == bad


@pytest.mark.parametrize("name", [None, "kimi-k3"])
def test_pairs_of_int64_are_not_taken_for_pairs_of_int32(tmp_path, name):
    path = tmp_path / "a"
    routed = np.array([(layer, expert) for layer in range(3) for expert in (1, 0)])
    for count in (2, 3, 6):
        routed[:count].astype("<i8").tofile(path)
        with pytest.raises(TraceError, match="pairs of int64: write int32"):
            read(path, name)
        routed[:count].astype("<i4").tofile(path)
        assert read(path, name).requests == count
    np.tile(routed + np.array([0, 2000]), (100_000, 1)).astype("<i8").tofile(path)  # many blocks
    with pytest.raises(TraceError, match="pairs of int64"):
        read(path, name)
    # What a few pairs, or an odd number of them, may be.
    assert read(pairs(path, (0, 0), (1, 0)), name).requests == 2
    assert read(pairs(path, *[(layer, 0) for layer in range(5)]), name).requests == 5
    assert read(pairs(path, *[(layer, layer == 7) for layer in range(8)]), name).requests == 8


HEADER = """# route_trace v1
# model=/some/where/Model-Q4.gguf arch=x n_layer=3 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=100 dense_bytes=5
# layer=2 expert_bytes=200 dense_bytes=5
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""
ROWS = """0,0,0,1,0,5,0.5,0,100
0,0,0,1,1,4,0.5,0,100
0,0,1,1,0,4,0.5,1,100
0,0,1,1,1,3,0.5,0,100
0,0,0,2,0,5,0.5,0,200
0,1,2,1,0,5,0.5,1,0
0,1,2,2,0,7,0.5,0,200
"""


def test_a_route_csv_says_layers_sizes_and_phases(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + ROWS)
    trace = read(path)
    assert named(trace) == [(1, [5, 4, 3]), (2, [5]), (1, [5]), (2, [7])]
    assert trace.phase.tolist() == [1, 1, 2, 2] and trace.token.tolist() == [0, 0, 2, 2]
    assert trace.layers == ((1, 8), (2, 8)) and trace.top_k == 2 and trace.name == "Model-Q4.gguf"
    assert trace.sizes().tolist() == [100] * 8 + [200] * 8


def test_decoding_steps_of_a_route_csv_are_batches_of_their_own(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "0,0,0,1,0,1,1,0,0\n0,0,1,1,0,2,1,0,0\n0,1,2,1,0,1,1,0,0\n0,1,3,1,0,1,1,0,0\n")
    assert named(read(path)) == [(1, [1, 2]), (1, [1]), (1, [1])]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("# route_trace v2\n", 1, "route_trace v1"),
        ("# route_trace v1\n# layer=x expert_bytes=1\n", 2, "no layer and its bytes"),
        ("# route_trace v1\n# layer=1024 expert_bytes=1\n", 2, "no layer and its bytes"),
        ("# route_trace v1\n# layer=1 expert_bytes=-1\n", 2, "no layer and its bytes"),
        (HEADER + ROWS + "0,1,3,1,0\n", 13, "not turn,phase"),
        (HEADER + "0,1,3,1,0,x,1,0,0\n", 6, "not turn,phase,.*: expert is 'x'"),
        (HEADER + "0,1,3,1,0,-1,1,0,0\n", 6, "expert is '-1'"),
        (HEADER + "0,1,3,1,0,1_0,1,0,0\n", 6, "expert is '1_0'"),
        (HEADER + "0,1,3,1,0,1,1,0,0,7\n", 6, "10 fields, not 9"),
        (HEADER + "0,2,3,1,0,1,1,0,0\n", 6, "phase is 2"),
        (HEADER + "0,1,-3,1,0,1,1,0,0\n", 6, "step is '-3'"),
        (HEADER + ROWS + "0,1,99999999999999999999,1,0,1,1,0,0\n", 13, "step is '99999999999999999999'"),
        (HEADER + "0,1,3,-1,0,1,1,0,0\n", 6, "layer is '-1'"),
        (HEADER + "0,1,3,99999999999999999999,0,1,1,0,0\n", 6, "layer is '9"),
        (HEADER + "0,1,3,1,0,99999999999999999999,1,0,0\n", 6, "expert is '9"),
        (HEADER + "x,1,3,1,0,1,1,0,0\n", 6, "turn is 'x'"),
        (HEADER + "0,1,3,1,0.5,1,1,0,0\n", 6, "slot is '0.5'"),
        (HEADER + "0,1,3,1,0,1,abc,0,0\n", 6, "weight is 'abc'"),
        (HEADER + "0,1,3,1,0,1,inf,0,0\n", 6, "weight is 'inf'"),
        (HEADER + "0,1,3,1,0,1,,0,0\n", 6, "weight is ''"),
        (HEADER + "0,1,3,1,0,1,1,3,0\n", 6, "residency is 3"),
        (HEADER + "0,1,3,1,0,1,1,yes,0\n", 6, "residency is 'yes'"),
        (HEADER + "0,1,3,1,0,1,1,0,1e3\n", 6, "expert_bytes is '1e3'"),
        (HEADER + "0,1,3,1,0,1,1,0,99\n", 6, "expert_bytes is 99: the header gives layer 1 100"),
        (HEADER.replace(",expert,", ",experts,") + "0,1,3,1,0,1,1,0,0\n", 5, "the columns have no expert:"),
        (HEADER.replace(",slot,", ",step,") + "0,1,3,1,0,1,1,0,0\n", 5, "the columns have step twice"),
        (HEADER + ROWS + "0,1,3,2,0,8,1,0,0\n", 13, "layer 2, expert 8: the file's header gives that layer 8"),
        (HEADER + ROWS + "0,1,3,0,0,1,1,0,0\n", 13, "layer 0, expert 1: the file's header gives that layer 0"),
        ("# route_trace v1\n0,1,3,0,0,1,1,0,0\n", None, "n_layer and n_expert"),
        ("# route_trace v1\n# layer=1 expert_bytes=9\n# layer=1 expert_bytes=8\n", 3, "layer 1 is there twice"),
        ("# route_trace v1\n# layer=1 expert_bytes=99999999999999999999\n", 2, "no layer and its bytes"),
        ("# route_trace v1\n# n_layer=3 n_expert=8 n_expert_used=9\n", None, "n_expert_used=9"),
        ("# route_trace v1\n# n_layer=3 n_expert=8 n_expert_used=-1\n", None, "n_expert_used=-1"),
        ("# route_trace v1\n# n_layer=1000000000 n_expert=8\n", None, "n_layer=1000000000"),
        ("# route_trace v1\n# n_layer=3 n_expert=800000000000\n", None, "n_expert=800000000000"),
        ("# route_trace v1\n# n_layer=3 n_expert=-8\n", None, "n_expert=-8"),
        ("# route_trace v1\n# n_layer=3 n_expert=8 n_expert_used=two\n", None, "n_expert_used=two"),
    ],
)
def test_bad_lines_of_a_route_csv_are_named(tmp_path, text, line, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read(path)
    assert caught.value.record == line
    assert line is None or f", line {line}: " in str(caught.value)


def test_columns_of_a_route_csv_are_known_by_their_names(tmp_path):
    """Later versions have one more; a weight that the engine does not know is nan."""
    path = tmp_path / "a.csv"
    header, rows = HEADER[: HEADER.index("turn")], [line.split(",") for line in (HEADER + ROWS).splitlines()[4:]]
    path.write_text(HEADER + ROWS)
    whole = read(path)
    columns = list(zip(*rows, strict=True))
    columns[6] = ("weight", *["nan"] * (len(rows) - 1))
    columns[7] = ("residency", *["2"] * (len(rows) - 1))
    for wanted in (
        [*range(9), "dropped"],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
        [1, 2, 3, 5],
    ):
        more = {"dropped": ("dropped", *["1"] * (len(rows) - 1))}
        table = zip(*(more[name] if name in more else columns[name] for name in wanted), strict=True)
        path.write_text(header + "".join(",".join(row) + "\n" for row in table))
        trace = read(path)
        assert named(trace) == named(whole) and trace.phase.tolist() == whole.phase.tolist()
        assert trace.token.tolist() == whole.token.tolist() and trace.sizes().tolist() == whole.sizes().tolist()


def test_routed_experts_are_tokens_by_layers(tmp_path):
    random = np.random.default_rng(1)
    array = np.stack([[random.choice(16, 3, replace=False) for _ in range(4)] for _ in range(50)]).astype(np.int16)
    array[:, 0] = 0  # a dense layer
    np.save(tmp_path / "a.npy", array)
    trace = read(tmp_path / "a.npy")
    assert named(trace) == [(layer, array[token, layer].tolist()) for token in range(50) for layer in (1, 2, 3)]
    assert trace.token.tolist() == np.repeat(np.arange(50), 3).tolist() and trace.top_k == 3
    np.save(tmp_path / "a.npy", array[:, 1:2])
    assert [experts for _, experts in named(read(tmp_path / "a.npy"))] == array[:, 1].tolist()
    np.save(tmp_path / "a.npy", array[:, :, :1].astype(np.uint8))
    assert read(tmp_path / "a.npy").requests == 50 * 4


def test_arrays_that_are_no_routed_experts_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    for array, message in [
        (np.zeros((2, 3)), "wants integers"),
        (np.zeros((2, 3, 4)), "wants integers .* float64"),
        (np.array([[[1, 2], [3, 3]]]), "token 0: layer 1 has an expert twice"),
        (np.array([[[1, 2], [3, 4]], [[1, -1], [3, 4]]]), "token 1: layer 0, expert -1"),
    ]:
        np.save(path, array)
        with pytest.raises(TraceError, match=message):
            read(path)
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(TraceError, match="not an array"):
        read(path)
    path.write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(TraceError, match="not an array"):
        read(path)


def megatron(layer, step, rows, **more):
    record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    return record | {"num_tokens": len(rows), "topk": len(rows[0]), "top_indices": rows} | more


def test_a_megatron_trace_is_one_batch_per_line(tmp_path):
    path = lines(
        tmp_path / "router_trace_rank0.jsonl",
        megatron(1, 0, [[3, 5], [5, 1]]),
        megatron(3, 0, [[3, 5], [5, 3]]),
        megatron(0, 0, [[9, 8], [7, 6]], block="mtp", mtp_idx=0),
        megatron(3, 1, [[0, 5]]),
        "",
    )
    trace = read(path)
    assert named(trace) == [(1, [3, 5, 1]), (3, [3, 5]), (3, [0, 5])]
    assert trace.token.tolist() == [0, 0, 1] and trace.top_k == 2 and trace.layers == ((0, 6), (1, 6), (2, 6), (3, 6))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"layer": 1, "step": 0}, "no 'top_indices'"),
        (megatron(-1, 0, [[1]]), "-1 is not"),
        (megatron(1, 0, [[1, 2]], topk=3), "topk"),
        (megatron(1, 0, [[1, 2]], num_tokens=3), "num_tokens is 3"),
        (megatron(1, 0, [[1, 2.5]]), "not an integer"),
        (megatron(1, 0, [[1, 70000]]), "expert 70000"),
        ({"layer": 1, "step": 0, "top_indices": [[1], [2, 3]]}, "not a record"),
        ({"layer": 1, "step": 0, "top_indices": 5}, "not a record"),
        ("[1]", "not an object"),
        ('{"layer": NaN}', "not JSON"),
        ("{", "not JSON"),
        ('{"step": 0, "layer": 1, "step": 1, "top_indices": [[1]]}', "'step' is there twice"),
        ('{"layer": ' + "[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_of_a_megatron_trace_are_named(tmp_path, line, message):
    path = lines(tmp_path / "a", megatron(1, 0, [[1, 2]]), line)
    with pytest.raises(TraceError, match=message) as caught:
        read(path)
    assert caught.value.record == 2


def test_lines_of_layer_token_and_experts(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"layer": 2, "token": 0, "experts": [4, 1], "phase": "prefill"},
        {"layer": 2, "token": 1, "experts": [1, 0], "phase": "prefill"},
        {"layer": 5, "token": 1, "experts": [1, 0], "phase": "decode"},
        {"layer": 2, "experts": [3, 3]},
    )
    trace = read(path)
    assert named(trace) == [(2, [4, 1, 0]), (5, [1, 0]), (2, [3])]
    assert trace.phase.tolist() == [1, 2, 0] and trace.token.tolist() == [0, 1, -1]
    assert trace.top_k == 2 and trace.pool == 6 * 5
    assert read(lines(path, {"layer": 0, "experts": [1]}, {"layer": 0, "experts": [1, 2]})).top_k is None
    once = read(lines(path, {"layer": 0, "experts": [0, 0]}))  # as wide as no token can be
    assert once.top_k is None and once.pool == 1
    write_trace(once, tmp_path / "b")
    assert read(tmp_path / "b").requests == 1


def test_lines_are_a_batch_of_one_token_or_of_a_prefill_or_where_no_token_is_said(tmp_path):
    def batches(*rows):
        names = ("phase", "token", "experts")
        objects = [{"layer": 0} | {k: v for k, v in zip(names, row, strict=True) if v is not None} for row in rows]
        trace = read(lines(tmp_path / "a.jsonl", *objects))
        told = zip(trace.phase.tolist(), trace.token.tolist(), (experts for _, experts in named(trace)), strict=True)
        return list(told)

    decode = [("decode", token, [token % 3, 3]) for token in range(5)]
    assert batches(*decode) == [(2, token, [token % 3, 3]) for token in range(5)]
    assert batches(("decode", 0, [1]), ("decode", 0, [2]), ("decode", 1, [2])) == [(2, 0, [1, 2]), (2, 1, [2])]
    assert batches(("prefill", 0, [1]), ("prefill", 1, [2]), ("decode", 1, [2])) == [(1, 0, [1, 2]), (2, 1, [2])]
    assert batches((None, 0, [1]), (None, 1, [2]), (None, 1, [3])) == [(0, 0, [1]), (0, 1, [2, 3])]
    assert batches((None, None, [1]), (None, None, [2]), (None, 0, [3])) == [(0, -1, [1, 2]), (0, 0, [3])]
    assert batches(("decode", None, [1]), ("decode", None, [2]), (None, None, [2])) == [(2, -1, [1, 2]), (0, -1, [2])]
    assert batches(("prefill", None, [1]), ("prefill", 4, [2]), (None, 4, [1])) == [(1, -1, [1, 2]), (0, 4, [1])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"token": 1, "experts": [1]}, "no 'layer'"),
        ({"layer": 1, "token": 1}, "no 'experts'"),
        ({"layer": True, "experts": [1]}, "True is not"),
        ({"layer": 1, "experts": ["1"]}, "'1' is not"),
        ({"layer": 1, "experts": [-1]}, "-1 is not"),
        ({"layer": 1, "experts": 1}, "not {"),
        ({"layer": 1, "experts": [1], "phase": "x"}, "no 'x'"),
        ({"layer": 1, "token": 1.5, "experts": [1]}, "1.5 is not"),
        ({"layer": 2000, "experts": [1]}, "layer 2000"),
        ("nonsense", "not JSON"),
        ('{"layer": 1, "layer": 2, "experts": [1]}', "'layer' is there twice"),
        ('{"layer": 1, "experts": [1], "phase": "decode", "experts": [1]}', "'experts' is there twice"),
        ('{"layer": 1, "experts": [1], "more": {"a": 1, "a": 1}}', "'a' is there twice"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = lines(tmp_path / "a.jsonl", {"layer": 0, "token": 0, "experts": [1]}, "", line)
    with pytest.raises(TraceError, match=message) as caught:
        read(path)
    assert caught.value.record == 3 and str(path) in str(caught.value)


def test_every_format_is_known_by_its_first_bytes(tmp_path):
    path = tmp_path / "a"
    write_trace(tokens(count=1), path)
    assert detect(path) == "fastcache"
    assert detect(pairs(path, (0, 1))) == "kimi-k3"
    assert detect(lines(path, "", {"layer": 0, "experts": []})) == "jsonl"
    assert detect(lines(path, megatron(0, 0, [[1] * 5000]))) == "megatron"
    path.write_text(HEADER)
    assert detect(path) == "route-csv"
    np.save(tmp_path / "a.npy", np.zeros((1, 1, 1), int))
    assert detect(tmp_path / "a.npy") == "vllm"
    for data in (b"abc", b"\xff" * 63, b"hello world, this is no trace"):
        path.write_bytes(data)
        with pytest.raises(TraceError, match="not a trace of a known format"):
            read(path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="an empty file"):
        read(path)
    with pytest.raises(ValueError, match="no trace format 'x'"):
        read(path, "x")


def test_one_run_in_every_format_is_one_trace(tmp_path):
    trace = tokens(layers=4, experts=9, top_k=2, count=30)
    groups = [(key // 9, [k % 9 for k in group]) for group in groups_of(trace) for key in group[:1]]
    write_trace(trace, tmp_path / "fastcache")
    pairs(tmp_path / "kimi-k3", *((layer, expert) for layer, experts in groups for expert in experts))
    lines(tmp_path / "jsonl", *({"layer": layer, "experts": experts} for layer, experts in groups))
    lines(tmp_path / "megatron", *(megatron(layer, 0, [experts]) for layer, experts in groups))
    np.save(tmp_path / "vllm.npy", np.array([experts for _, experts in groups]).reshape(30, 4, 2))
    header = "# route_trace v1\n# n_layer=4 n_expert=9 n_expert_used=2\n"
    rows = [f"0,1,{i // 4},{layer},0,{e},1,0,0\n" for i, (layer, experts) in enumerate(groups) for e in experts]
    (tmp_path / "route-csv").write_text(header + "".join(rows))
    for name in FORMATS:
        path = tmp_path / (name + ".npy" * (name == "vllm"))
        assert detect(path) == name
        assert named(read(path)) == groups, name


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_command_refuses_a_trace_without_requests(tmp_path, name):
    path = tmp_path / "a.npy"
    path.write_bytes(b"")
    if name == "vllm":
        np.save(path, np.zeros((0, 4, 2), int))
    elif name == "route-csv":
        path.write_text(HEADER)
    elif name == "fastcache":
        write_trace(tokens(count=0), path)
    for command in (["replay", path], ["mrc", path], ["advise", tmp_path, "--trace", path]):
        result = CliRunner().invoke(main, [*map(str, command), "--format", name])
        assert result.exit_code == 1, result.output
        assert result.stderr == f"Error: TraceError: {path}: no request is in it: a trace that asks for nothing\n"
    assert read(path, name).requests == 0


def test_real_traces_are_what_their_readme_says():
    kimi = read(real("kimi"))
    assert (kimi.requests, len(kimi.phase), kimi.pool) == (63_824, 8 * 92, 93 * 896)
    assert (kimi.counts() > 0).sum() == 10_010
    qwen = read(real("qwen"))
    assert (qwen.requests, len(qwen.phase), qwen.pool, qwen.top_k) == (39_526, 129 * 48, 48 * 128, 6)
    assert qwen.phase.tolist() == [1] * 48 + [2] * (128 * 48)
