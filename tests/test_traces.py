"""The trace format: what is written is read, and what is not a trace is refused by name and number."""

import json
import struct

import numpy as np
import pytest

import fastcache.traces.format as fmt
from fastcache.errors import TraceError
from fastcache.traces import Trace, read_trace, write_trace

LAYERS = ((1, 4), (3, 6))


def pack(*records):
    return np.array([record + (0,) * (4 - len(record)) for record in records], "u1,u1,<u2,<i4").tobytes()


def record(kind, value, flags=0, aux=0):
    return kind, flags, aux, value


def write(path, *records, header=None, tail=b""):
    start = fmt.pack_header(fmt.Header("m", LAYERS, 2)) if header is None else header
    path.write_bytes(start + pack(*records) + tail)
    return path


def batch(*keys, mode=0):
    return [record(2, len(keys), mode), *(record(3, key, 255) for key in keys)]


def made(seed=0, batches=300):
    random = np.random.default_rng(seed)
    groups = [random.choice(10, random.integers(1, 7), replace=False) for _ in range(batches)]
    return Trace(
        name="made",
        layers=LAYERS,
        top_k=2,
        keys=np.concatenate(groups).astype(np.int32),
        batches=np.cumsum([0, *map(len, groups)]),
        phase=np.sort(random.integers(0, 3, batches)).astype(np.uint8),
        token=np.sort(random.integers(-1, 40, batches)),
        fingerprint="abc",
        expert_nbytes=np.array([100, 200]),
        run={"policy": "lru"},
    )


@pytest.mark.parametrize("block", [1 << 20, 48])
def test_what_is_written_is_read(tmp_path, monkeypatch, block):
    monkeypatch.setattr(fmt, "BLOCK", block)  # many blocks: batches are cut by their edges
    trace = made()
    write_trace(trace, tmp_path / "a.trace")
    again = read_trace(tmp_path / "a.trace")
    for name in ("keys", "batches", "phase", "token", "expert_nbytes"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name), err_msg=name)
    assert (again.name, again.layers, again.top_k, again.fingerprint) == ("made", LAYERS, 2, "abc")
    assert again.run == {"policy": "lru"}
    write_trace(again, tmp_path / "b.trace")
    assert (tmp_path / "a.trace").read_bytes() == (tmp_path / "b.trace").read_bytes()


def test_the_bytes_are_those_of_the_document(tmp_path):
    trace = Trace("m", LAYERS, 2, np.array([9, 0], np.int32), np.array([0, 1, 2]), np.array([1, 1]), np.array([7, 7]))
    write_trace(trace, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    length, size = struct.unpack_from("<II", data, 8)
    assert data[:8] == b"FCTRACE1" and size == 8 and length % 8 == 0
    assert json.loads(data[16 : 16 + length])["layers"] == [[1, 4], [3, 6]]
    records = [struct.unpack_from("<BBHi", data, at) for at in range(16 + length, len(data), 8)]
    assert records == [(1, 0, 1, 7), (2, 0, 0, 1), (3, 255, 0, 9), (2, 0, 0, 1), (3, 255, 0, 0)]


def test_guesses_pins_and_events_are_left_out(tmp_path):
    events = [record(16, -5), record(200, 99, 7, 7)]
    first, *rest = batch(4, 5)
    path = write(
        tmp_path / "a", *events, *batch(1, mode=1), record(1, 3, aux=2), first, *events, *rest, *batch(2, 3, mode=2),
        *batch(0), *events,
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.keys.tolist() == [4, 5, 0] and trace.batches.tolist() == [0, 2, 3]
    assert trace.phase.tolist() == [2, 2] and trace.token.tolist() == [3, 3]
    header, records = fmt.open_records(path)
    assert len(records) == 17 and header.top_k == 2


@pytest.mark.parametrize("block", [1 << 20, 7])
def test_a_single_is_read_as_the_batch_of_one_that_it_stands_for(tmp_path, monkeypatch, block):
    monkeypatch.setattr(fmt, "BLOCK", block)
    trace = made(batches=400)
    write_trace(trace, tmp_path / "batches")
    header, records = fmt.open_records(tmp_path / "batches")
    of_one = np.flatnonzero((records["kind"] == 2) & (records["value"] == 1))
    short = np.array(records)
    short["kind"][of_one + 1], short["flags"][of_one + 1] = 4, 0
    short = np.delete(short, of_one)
    assert 20 < len(of_one) == (short["kind"] == 4).sum() < 200
    (tmp_path / "singles").write_bytes(fmt.pack_header(header) + short.tobytes())
    again = read_trace(tmp_path / "singles")
    for name in ("keys", "batches", "phase", "token"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name), err_msg=name)
    write_trace(again, tmp_path / "converted")  # in batches, as what is known of them is the same
    assert (tmp_path / "converted").read_bytes() == (tmp_path / "batches").read_bytes()


@pytest.mark.parametrize("block", [1 << 20, 5, 2, 1])
def test_a_batch_is_of_the_phase_that_the_last_token_or_phase_record_before_it_says(tmp_path, monkeypatch, block):
    monkeypatch.setattr(fmt, "BLOCK", block)
    prefill, decode, none = (record(30, 0, aux=aux) for aux in (1, 2, 0))
    first, *rest = batch(4, 5, 6)
    path = write(
        tmp_path / "a", *batch(1), record(1, 7), prefill, *batch(1), *batch(2, mode=1), first, decode, *rest,
        record(4, 2), record(1, 8, aux=1), *batch(3), none, record(4, 9), decode, *batch(0, 1),
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.phase.tolist() == [0, 1, 1, 2, 1, 0, 2]
    assert trace.token.tolist() == [-1, 7, 7, 7, 8, 8, 8]
    assert trace.keys.tolist() == [1, 1, 4, 5, 6, 2, 3, 9, 0, 1]


def test_a_trace_of_no_record_is_a_trace(tmp_path):
    trace = read_trace(write(tmp_path / "a"))
    assert (trace.requests, trace.pool, trace.name) == (0, 10, "m")


@pytest.mark.parametrize(
    ("records", "number", "message"),
    [
        ([record(5, 1)], 0, "kind 5"),
        ([record(16, 1), record(0, 1)], 1, "kind 0"),
        ([*batch(1), record(3, 1)], 2, "outside a batch"),
        ([record(3, 1), *batch(1)], 0, "outside a batch"),
        ([record(1, 0), record(3, 1)], 1, "outside a batch"),
        ([record(2, 3), record(3, 1), record(1, 0)], 0, "has 3 keys, but 1 follow"),
        ([*batch(5), record(2, 2), record(3, 1)], 2, "has 2 keys, but 1 follow"),
        ([record(2, 2), record(3, 1), record(4, 2)], 0, "has 2 keys, but 1 follow"),
        ([record(4, 2), record(3, 1)], 1, "outside a batch"),
        ([record(4, 2), *batch(1), record(4, 10)], 3, "key 10 is not below 10"),
        ([record(4, -1)], 0, "key -1"),
        ([record(2, 0)], 0, "a batch of 0 keys"),
        ([record(2, 11)], 0, "a batch of 11 keys"),
        ([record(2, 1, 4), record(3, 1)], 0, "mode 4"),
        ([record(1, 0, aux=3)], 0, "phase 3"),
        ([*batch(1), record(2, 1), record(3, 1, flags=77)], 3, "flags 77 of a request"),
        ([record(2, 2), record(3, 1, flags=4), record(3, 2, flags=5)], 2, "flags 5 of a request"),
        ([record(2, 1, flags=1), record(3, 1, flags=254)], 1, "flags 254 of a request"),
        ([*batch(1), record(16, 0), record(4, 1, flags=2)], 3, "flags 2 of a single"),
        ([*batch(1), record(30, 0, aux=4)], 2, "phase 4"),
        ([*batch(1), *batch(2, 10)], 4, "key 10 is not below 10"),
        ([*batch(-1)], 1, "key -1"),
        ([*batch(1, 2, 3), *batch(4, 5, 4)], 7, "key 4 is twice"),
        ([*batch(1), *batch(4, 4, mode=1)], 4, "key 4 is twice"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 3])
def test_a_record_that_cannot_be_is_named(tmp_path, monkeypatch, block, records, number, message):
    monkeypatch.setattr(fmt, "BLOCK", block)
    path = write(tmp_path / "a", *records)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert caught.value.record == number and caught.value.filename == str(path)
    assert f"{path}, record {number}: " in str(caught.value)


def test_a_file_that_ends_inside_a_record_is_refused(tmp_path):
    path = write(tmp_path / "a", *batch(1), tail=b"abc")
    with pytest.raises(TraceError, match="record 2: the file ends after 3 of its 8 bytes"):
        read_trace(path)


def header_of(**changes):
    fields = {"model": "m", "layers": [[0, 4]], "top_k": 2} | changes
    text = json.dumps({key: value for key, value in fields.items() if value is not ...}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<8sII", b"FCTRACE1", len(text), 8) + text


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "does not start with FCTRACE1"),
        (b"FCTRACE2" + bytes(8), "does not start with"),
        (struct.pack("<8sII", b"FCTRACE1", 8, 12) + b"{}      ", "records of 12 bytes"),
        (struct.pack("<8sII", b"FCTRACE1", 7, 8) + b"{}     ", "a header of 7 bytes"),
        (struct.pack("<8sII", b"FCTRACE1", 1 << 30, 8), "a header of"),
        (struct.pack("<8sII", b"FCTRACE1", 16, 8) + b"{}", "14 bytes before its header"),
        (struct.pack("<8sII", b"FCTRACE1", 8, 8) + b"{]      ", "not usable"),
        (struct.pack("<8sII", b"FCTRACE1", 8, 8) + b"\xff{}     ", "not usable"),
        (struct.pack("<8sII", b"FCTRACE1", 8, 8) + b"[]      ", "not usable"),
        (header_of(layers=...), "layers"),
        (header_of(layers=[[1, 4], [1, 4]]), "do not ascend"),
        (header_of(layers=[[1, 0]]), "0 is not a whole number"),
        (header_of(layers=[[1, 2.5]]), "2.5 is not"),
        (header_of(layers=[[1, 2**31]]), "2147483648 experts"),
        (header_of(layers=[[1, 2**26], [2, 1]]), "67108865 experts"),
        (struct.pack("<8sII", b"FCTRACE1", 100_000, 8) + b"[" * 100_000, "not usable: RecursionError"),
        (header_of(top_k=0), "0 is not"),
        (header_of(top_k=-1), "-1 is not"),
        (header_of(top_k=5), "top_k is 5, and no layer has more than 4 experts"),
        (header_of(top_k="2"), "'2' is not"),
        (header_of(expert_nbytes=[1, 2]), "2 sizes for 1 layers of 4"),
        (header_of(expert_nbytes=-1), "-1 is not"),
        (header_of(run=3), "not usable"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, header, message):
    path = tmp_path / "a"
    path.write_bytes(header)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert caught.value.record is None


def test_sizes_may_be_one_one_per_layer_or_one_per_expert():
    parts = (np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64))
    for nbytes, sizes in [
        (5, [5] * 10),
        (np.array([5, 7]), [5] * 4 + [7] * 6),
        (np.arange(10), list(range(10))),
    ]:
        assert Trace("m", LAYERS, 2, *parts, expert_nbytes=nbytes).sizes().tolist() == sizes
    assert Trace("m", LAYERS, 2, *parts).sizes() is None
    assert Trace("m", LAYERS, 2, *parts).layer_first.tolist() == [0, 4, 10]


def test_arrays_that_do_not_fit_together_are_no_trace():
    with pytest.raises(ValueError, match="2 batch edges"):
        Trace("m", LAYERS, 2, np.zeros(1), np.array([0, 1]), np.zeros(2), np.zeros(1))
    with pytest.raises(ValueError, match="span 0 to 2"):
        Trace("m", LAYERS, 2, np.zeros(1), np.array([0, 2]), np.zeros(1), np.zeros(1))


def test_counts_add_up_over_blocks(monkeypatch):
    trace = made()
    whole = np.bincount(trace.keys, minlength=10)
    monkeypatch.setattr("fastcache.traces.trace.BLOCK", 7)
    assert trace.counts().tolist() == whole.tolist()


def test_a_token_index_beyond_the_format_is_refused(tmp_path):
    trace = Trace("m", LAYERS, 2, np.array([1], np.int32), np.array([0, 1]), np.zeros(1), np.array([2**31]))
    with pytest.raises(ValueError, match="32 bits"):
        write_trace(trace, tmp_path / "a")
