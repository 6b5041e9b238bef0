"""The index in its usual form: agreed to only where parsing it would say the same."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fastcache.errors import CheckpointError
from fastcache.formats import checkpoint
from fastcache.formats._columns import PADDING
from fastcache.formats._index_json import scan_index
from fastcache.formats.header import Header

FILES = {"model-1-of-2.safetensors": ["a.b", "c"], "model-2-of-2.safetensors": ["a.c", "b", "d"]}


def scanned(text):
    return scan_index(bytearray(text.encode() + PADDING))


def weight_map(files=FILES):
    return {name: file for file, names in files.items() for name in names}


def index_of(files=FILES, indent=2, **more):
    entries = dict(sorted(weight_map(files).items()))
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": entries} | more, indent=indent)


def headers(files=FILES):
    def header(file, names):
        none = np.zeros(len(names), np.int64)
        return Header(file, 0, 0, {}, list(names), [("U8", (0,))], none.astype(np.int32), none, none)

    return [header(file, names) for file, names in sorted(files.items())]


@pytest.mark.parametrize("indent", [2, None, 0, "\t"])
def test_an_index_as_writers_make_it_is_agreed_to(indent):
    index = scanned(index_of(indent=indent))
    assert index.files == list(FILES)
    assert index.agrees(headers())


def test_an_index_of_one_tensor_is_agreed_to():
    one = {"model.safetensors": ["x"]}
    assert scanned(index_of(one)).agrees(headers(one))


def test_headers_may_have_their_names_in_any_order():
    turned = {file: names[::-1] for file, names in FILES.items()}
    assert scanned(index_of()).agrees(headers(turned))


@pytest.mark.parametrize(
    "other",
    [
        {"model-1-of-2.safetensors": ["a.b", "c"], "model-2-of-2.safetensors": ["a.c", "b"]},
        {"model-1-of-2.safetensors": ["a.b", "c"], "model-2-of-2.safetensors": ["a.c", "b", "d", "e"]},
        {"model-1-of-2.safetensors": ["a.b", "d"], "model-2-of-2.safetensors": ["a.c", "b", "c"]},
        {"model-1-of-2.safetensors": ["a.b", "c"], "model-2-of-2.safetensors": ["a.c", "b", "D"]},
        {"model-1-of-2.safetensors": ["a.b", "c"], "model-2-of-2.safetensors": ["a.c", "b", "c"]},
    ],
    ids=["one less", "one more", "exchanged", "renamed", "in two files"],
)
def test_headers_that_differ_are_not_agreed_to(other):
    assert not scanned(index_of()).agrees(headers(other))


def test_a_name_twice_in_the_index_and_in_two_files_is_not_agreed_to():
    text = '{"weight_map": {"a": "x-1-0000", "a": "x-2-0000"}}'
    assert not scanned(text).agrees(headers({"x-1-0000": ["a"], "x-2-0000": ["a"]}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "x"}, "weight_map": {"b": "x"}}',
        '{"metadata": {"weight_map": {"a": "x"}}}',
        '{"weight_map": {"a": "x"',
        '{"weight_map": {"a": "x",}}',
        '{"weight_map": {"a": {"b": "x"}}}',
        '{"weight_map": {"a": "x" "b": "y"}}',
        '{"weight_map": {"a": 1, "b": "y"}}',
        '{"weight_map": {"a": "x"}} x',
        '["weight_map", {"a": "x"}]',
        '{"weight_map": {"\\u0061": "x"}}',
        '{"weight_map": {"a\n": "x"}}',
        '{"weight_map": {"é": "x"}}',
        '{"weight_map": {"a": "x", "b": "xyz"}}',
        '{"weight_map": {"a": "x"}, "more": "fastcache: the object"}',
        '{"weight_map": "fastcache: the object", "more": {"a": "x"}}',
        '{"weight_map": 1, "more": {"a": "x"}}',
    ],
)
def test_any_other_form_is_left_to_the_parser(text):
    assert scanned(text) is None


TOKENS = (*'"{},: \n\\é1', "{}", '"a.b"', '"weight_map"', '"d": ', '"model-1-of-2.safetensors"')


@given(data=some.data())
def test_a_changed_index_is_agreed_to_only_if_it_says_what_the_headers_say(data):
    text = index_of(indent=data.draw(some.sampled_from([None, 1])))
    for _ in range(data.draw(some.integers(1, 3))):
        at, cut = data.draw(some.integers(0, len(text))), data.draw(some.integers(0, 5))
        text = text[:at] + data.draw(some.sampled_from(["", *TOKENS])) + text[at + cut :]
    index = scanned(text)
    if index is None or index.files != list(FILES) or not index.agrees(headers()):
        return
    try:
        parsed, files = checkpoint._parse_index("index", bytearray(text.encode() + PADDING))
    except CheckpointError as error:
        pytest.fail(f"agreed to what the parser refuses: {error}")
    assert files == list(FILES)
    assert {name: files[number] for name, number in parsed.items()} == weight_map()
