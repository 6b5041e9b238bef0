"""formats.safetensors: the reference reader and ours accept and refuse the same files, and say why."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import pattern, st
from headers import BROKEN, DIFFERENT, FINE, ONE, entry, header
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.numpy import save_file

from fastcache.errors import CheckpointError, CheckpointHeaderError, CheckpointTruncated, UnsupportedCheckpoint
from fastcache.formats import _header_json
from fastcache.formats.dtypes import DTYPES, carrier, carrier_shape
from fastcache.formats.safetensors import MAX_HEADER_BYTES, read_header


def reference_accepts(path):
    """Ask the safetensors package, by both of its ways in."""
    verdicts = set()
    for read in (lambda: safetensors.deserialize(path.read_bytes()), lambda: safetensors.safe_open(path, "np")):
        try:
            read()
            verdicts.add(True)
        except (safetensors.SafetensorError, ValueError):  # an empty file cannot be mapped
            verdicts.add(False)
    (verdict,) = verdicts
    return verdict


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_reference_refuses_is_refused_with_a_reason(name, tmp_path):
    raw, nbytes, text = BROKEN[name]
    path = st(tmp_path / "x.safetensors", [], raw_header=raw, tail=b"\0" * nbytes)
    assert not reference_accepts(path)
    with pytest.raises(CheckpointError, match=text) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", FINE)
def test_what_the_reference_accepts_is_accepted(name, tmp_path):
    raw, nbytes, names = FINE[name]
    path = st(tmp_path / "x.safetensors", [], raw_header=raw, tail=pattern(nbytes, name))
    reference = dict(safetensors.deserialize(path.read_bytes()))
    found = read_header(path)
    assert list(found) == list(names)
    assert found.keys() == reference.keys()
    for key, tensor in found.items():
        assert (tensor.dtype, list(tensor.shape)) == (reference[key]["dtype"], reference[key]["shape"])
        assert path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == bytes(reference[key]["data"])


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_the_reference_accepts_and_no_writer_makes_is_refused(name, tmp_path):
    raw, nbytes, text = DIFFERENT[name]
    path = st(tmp_path / "x.safetensors", [], raw_header=raw, tail=b"\0" * nbytes)
    assert reference_accepts(path)
    with pytest.raises(CheckpointHeaderError, match=text):
        read_header(path)


def test_a_key_twice_with_two_meanings_is_called_a_duplicate_key(tmp_path):
    raw = ONE[:-1] + b"," + header(a=entry(offsets=[8, 16]))[1:]
    path = st(tmp_path / "x.safetensors", [], raw_header=raw, tail=b"\0" * 16)
    assert not reference_accepts(path)
    with pytest.raises(CheckpointHeaderError, match="duplicate key: 'a'"):
        read_header(path)


def test_an_unknown_dtype_is_listed_and_refused_only_in_use(tmp_path):
    path = st(tmp_path / "x.safetensors", [("a", "F3_X", [5], b"abc"), ("b", "U8", [1], b"d")])
    assert not reference_accepts(path)
    found = read_header(path)
    assert found["a"] == ("F3_X", (5,), found.data_start, 3)
    assert found["b"].offset == found.data_start + 3
    with pytest.raises(UnsupportedCheckpoint, match="F3_X"):
        carrier(found["a"].dtype)


def test_the_table_has_the_dtypes_of_the_reference_and_their_sizes(tmp_path):
    for dtype, (bits, numpy_dtype) in DTYPES.items():
        path = st(tmp_path / "x.safetensors", [("a", dtype, [8, 2], bytes(2 * bits))])
        assert reference_accepts(path), dtype
        assert read_header(path)["a"].nbytes == 2 * bits
        assert numpy_dtype.itemsize * 8 == bits or numpy_dtype == np.uint8
    with pytest.raises(safetensors.SafetensorError) as caught:
        st(path, [("a", "F3_X", [1], b"a")])
        safetensors.deserialize(path.read_bytes())
    assert all(f"`{dtype}`" in str(caught.value) for dtype in DTYPES)
    assert str(caught.value).count("`") == 2 * (len(DTYPES) + 1)


def test_carriers_are_the_types_that_numpy_lacks_and_bytes_where_elements_share_them():
    assert carrier("BF16") == ml_dtypes.bfloat16
    assert carrier("F8_E4M3") == ml_dtypes.float8_e4m3fn
    assert carrier("F8_E8M0") == ml_dtypes.float8_e8m0fnu
    assert carrier("F4") == np.uint8
    assert carrier_shape("F32", (2, 3), 24) == (2, 3)
    assert carrier_shape("F4", (2, 8), 8) == (2, 4)
    assert carrier_shape("F4", (2, 3), 3) == (3,)
    assert carrier_shape("F6_E2M3", (5, 4), 15) == (5, 3)


@pytest.mark.parametrize("pad", [1, 3, 5])
@pytest.mark.parametrize("spaced", [True, False])
def test_data_that_starts_on_an_odd_byte_is_found(pad, spaced, tmp_path):
    values = np.arange(6, dtype="<f4")
    path = st(tmp_path / "x.safetensors", [("a", "F32", [2, 3], values.tobytes())], pad=pad, spaced=spaced)
    found = read_header(path)["a"]
    assert path.read_bytes()[found.offset :] == values.tobytes()


@pytest.mark.parametrize("length", range(99_992, 100_009))
def test_no_probe_size_is_special(length, tmp_path):
    path = st(tmp_path / "x.safetensors", [], raw_header=ONE + b" " * (length - len(ONE)), tail=b"12345678")
    assert read_header(path).data_start == length + 8
    assert reference_accepts(path)


@pytest.mark.parametrize("keep", [-1, -8, -4096, "header", 7, 1, 0])
def test_a_cut_file_is_truncated_whichever_way_it_is_cut(keep, tmp_path):
    path = st(tmp_path / "x.safetensors", [("a", "U8", [9000], pattern(9000, 1)), ("b", "U8", [8], b"12345678")])
    found = read_header(path)
    size = found.data_start if keep == "header" else keep if keep >= 0 else found.file_size + keep
    os.truncate(path, size)
    assert not reference_accepts(path)
    with pytest.raises(CheckpointTruncated, match=str(size)) as caught:
        read_header(path)
    if keep == -1:
        assert f"{found.file_size} bytes needed, {size} present" in str(caught.value)
        assert "'b'" in str(caught.value)


def test_a_header_that_is_cut_says_how_much_is_missing(tmp_path):
    path = st(tmp_path / "x.safetensors", [], raw_header=ONE, length=1000)
    with pytest.raises(CheckpointTruncated, match=f"1000 bytes of header needed, {8 + len(ONE)} present"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "Git-LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"<html>" + b" " * 70, "web page"),
        (b'{"error":"Repository not found"}', "JSON without the 8-byte length"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"x" * 700_000, "gzip"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00" + b"x" * 100, "zip archive"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00aq" + b"x" * 100, "pickle"),
        (b"GGUF\x03\x00\x00\x00" + b"\0" * 100, "a GGUF file under another name"),
    ],
)
def test_a_file_that_is_something_else_is_called_by_its_name(content, text, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert not reference_accepts(path)
    with pytest.raises((CheckpointHeaderError, UnsupportedCheckpoint), match=text):
        read_header(path)


def test_a_header_above_the_limit_is_refused_with_the_limit(tmp_path):
    path = st(tmp_path / "x.safetensors", [], raw_header=ONE, length=MAX_HEADER_BYTES + 1)
    os.truncate(path, MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointHeaderError, match="100000001 bytes.*100000000"):
        read_header(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**64 - 8, MAX_HEADER_BYTES])
def test_a_length_that_the_file_does_not_have_allocates_nothing(length, tmp_path):
    path = st(tmp_path / "x.safetensors", [], raw_header=ONE, length=length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=str(length)):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_large_shard_is_read_by_its_header_alone(tmp_path):
    size = 40 * 2**30
    path = tmp_path / "x.safetensors"
    raw = header(a=entry("U8", [size], [0, size]))
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + size)
    code = f"""
import resource
from fastcache.formats.safetensors import read_header
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
print(read_header({str(path)!r})["a"].nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == size


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_header(path)
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "none.safetensors")


def test_the_header_is_a_mapping_in_header_order_with_its_metadata(tmp_path):
    path = st(
        tmp_path / "x.safetensors", [("b", "F32", [2], b"12345678"), ("a", "U8", [1], b"9")], meta={"format": "pt"}
    )
    found = read_header(path)
    assert found.metadata == {"format": "pt"}
    assert (list(found), len(found), "a" in found, "c" in found) == (["b", "a"], 2, True, False)
    assert found["a"] == ("U8", (1,), found.data_start + 8, 1)
    assert found.file_size == path.stat().st_size
    assert "2 tensors" in repr(found)


def test_headers_as_writers_make_them_take_the_fast_way(tmp_path):
    entries = [(f"t{number}", "F32", [number, 2], bytes(8 * number)) for number in range(5)]
    for meta in (None, {}, {"format": "pt", "a": "}"}):
        for spaced in (True, False):
            path = st(tmp_path / "x.safetensors", entries, pad=3, meta=meta, spaced=spaced)
            length = read_header(path).data_start
            assert _header_json._fast(path.read_bytes()[8:length].decode()) is not None
    save_file({"b": np.zeros(3, np.float32), "a": np.zeros((2, 2), np.int64)}, path, {"format": "np"})
    length = read_header(path).data_start
    assert _header_json._fast(path.read_bytes()[8:length].decode()) is not None


TOKENS = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b" ", b"\\", b"0", b"1", b"-", b".", b"e", b"8", b"9", b"00", b"\xff"),
    *(b"true", b"null", b"NaN", b'"F32"', b'"F4"', b'"a"', b'"b"', b"[0,8]", b"[]", b'"__metadata__":{},', b"\\ud800"),
    *(
        b'"dtype":"U8",',
        b'"shape":[8],',
        b'"data_offsets":[0,8]',
        b',"x":1',
        b"18446744073709551615",
        b"\x00",
        b"\xc3\xa9",
    ),
)
SEEDS = (
    ONE,
    header(a=entry(), b=entry("U8", [2], [8, 10]), c=entry("BF16", [1, 3], [10, 16])),
    json.dumps({"__metadata__": {"format": "pt"}, "a": entry(), "z": entry(shape=[0], offsets=[8, 8])}).encode(),
    json.dumps({"a": entry(), "b": entry("F4", [4, 4], [8, 16])}, separators=(",", ":")).encode(),
)


def differs_on_purpose(raw):
    """Say whether a header has one of the forms of which the module's docstring says that the verdicts differ."""

    def pairs_of(value):
        return value if type(value) is tuple else ()

    top = pairs_of(json.loads(raw, object_pairs_hook=tuple))
    if len({name for name, _ in top}) < len(top):
        return True
    for name, fields in top:
        if name != "__metadata__" and type(fields) is list:
            return True
        dtype = dict(pairs_of(fields)).get("dtype")
        if type(dtype) is tuple or (type(dtype) is str and dtype not in DTYPES):
            return True
    return False


@settings(max_examples=500)
@given(data=some.data())
def test_a_mutated_header_gets_the_verdict_of_the_reference(data, tmp_path_factory):
    raw = bytearray(data.draw(some.sampled_from(SEEDS)))
    for _ in range(data.draw(some.integers(1, 4))):
        at = data.draw(some.integers(0, len(raw)))
        cut = data.draw(some.integers(0, 6))
        raw[at : at + cut] = data.draw(some.sampled_from([b"", b"", *TOKENS]))
    nbytes = data.draw(some.sampled_from([8, 16, 10, 0, 9]))
    path = st(tmp_path_factory.getbasetemp() / "mutated.safetensors", [], raw_header=bytes(raw), tail=bytes(nbytes))
    theirs = reference_accepts(path)
    try:
        read_header(path)
        ours = True
    except CheckpointError:
        ours = False
    assert ours == theirs or differs_on_purpose(bytes(raw))
    if ours and (fast := _header_json._fast(raw.decode())) is not None:
        slow = _header_json._slow(raw.decode())
        assert fast.names == slow.names and fast.specs == slow.specs and fast.metadata == slow.metadata
        assert all(np.array_equal(getattr(fast, each), getattr(slow, each)) for each in ("spec", "begin", "end"))
