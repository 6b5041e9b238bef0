"""docs/traces.md keeps its word: its samples are read as one run, and what it shows of logging gives a trace."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import fastcache
from fastcache.traces import read, replay_exact
from fastcache.traces.importers import FORMATS, detect

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "traces.md"
DATA = Path(__file__).parent / "data"
RUN = [(0, [5, 1]), (1, [7, 0]), (0, [5, 2]), (1, [7, 3])]


def blocks(heading):
    """Return the fenced blocks under a heading, to the next heading."""
    if not DOCUMENT.exists():
        pytest.skip("no docs/traces.md")
    _, _, text = DOCUMENT.read_text().partition(f"\n{heading}\n")
    return re.findall(r"^```\w+\n(.*?)^```", re.split(r"^##", text, flags=re.MULTILINE)[0], re.MULTILINE | re.DOTALL)


def asked(trace):
    first = np.asarray(trace.layer_first)
    found = []
    for a, b in zip(trace.batches[:-1], trace.batches[1:], strict=True):
        layers = np.searchsorted(first, trace.keys[a:b], "right") - 1
        found.append((int(layers[0]), (trace.keys[a:b] - first[layers]).tolist()))
    return found


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_sample_of_each_format_is_the_same_two_tokens(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (sample,) = blocks("## The format" if name == "fastcache" else f"### `{name}`")
    if name in ("fastcache", "kimi-k3", "vllm"):
        exec(sample, {"numpy": np})
        (path,) = tmp_path.iterdir()
    else:
        path = tmp_path / "sample"
        path.write_text(sample)
    assert detect(path) == name
    trace = read(path)
    assert asked(trace) == RUN and trace.layers == ((0, 8), (1, 8))
    assert trace.top_k == (None if name == "kimi-k3" else 2)
    if name not in ("kimi-k3",):
        assert trace.token.tolist() == [0, 0, 1, 1]
    assert set(trace.phase.tolist()) == {2 if name in ("fastcache", "route-csv", "jsonl") else 0}
    if name == "route-csv":
        assert trace.sizes().tolist() == [3059712] * 8 + [2654208] * 8


def test_a_model_of_ones_own_is_logged_in_three_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = blocks("## Log your own model")[0]
    opening, _, rest = sample.partition("\n")
    names = {"json": json}
    exec(opening, names)
    for phase, tokens in (("prefill", [0, 1, 2]), ("decode", [3])):
        for layer in range(2):
            chosen = [[(token + layer) % 8, 7 - token] for token in tokens]
            exec(rest, names | {"layer": layer, "tokens": tokens, "phase": phase, "chosen": chosen})
    names["log"].close()
    trace = read("routing.jsonl")
    assert asked(trace) == [(0, [0, 7, 1, 6, 2, 5]), (1, [1, 7, 2, 6, 3, 5]), (0, [3, 4]), (1, [4])]
    assert trace.phase.tolist() == [1, 1, 2, 2] and trace.top_k == 2


def test_a_store_logs_what_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("## Log your own model")[1], {"fastcache": fastcache, "checkpoint": DATA / "qwen3_moe" / "bf16"})
    trace = read("run.trace")
    assert asked(trace) == [(0, [5, 1])] and trace.phase.tolist() == [2] and trace.token.tolist() == [0]
    assert replay_exact("run.trace").same
