"""JSON as columns: what is said of places is what a plain loop says of them, at any place and length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fastcache.formats._columns import PADDING, Columns, read_padded


def columns(text):
    return Columns(text + PADDING)


def test_quotes_and_controls_are_those_of_the_text_alone():
    found = columns(b'"a"\n\x00"\x1f ')
    assert found.quotes.tolist() == [0, 2, 5]
    assert found.controls() == 3
    assert found.text.tobytes() == b'"a"\n\x00"\x1f '


def test_bytes_behind_the_text_may_be_anything():
    raw = b'"a"' + b'"' * len(PADDING)
    assert Columns(memoryview(raw)).quotes.tolist() == [0, 2]


@given(text=some.binary(max_size=60), wanted=some.binary(max_size=24), at=some.lists(some.integers(0, 60), min_size=1))
def test_has_says_whether_a_text_stands_at_every_place(text, wanted, at):
    places = [place for place in at if place <= len(text)]
    padded = text + PADDING
    expected = all(padded[place : place + len(wanted)] == wanted for place in places)
    assert columns(text).has(wanted, np.array(places, np.int64)) == expected


@given(text=some.binary(max_size=60), length=some.integers(1, 24), at=some.lists(some.integers(0, 60), min_size=1))
def test_changes_says_where_other_bytes_stand_than_at_the_place_before(text, length, at):
    places = [min(place, len(text)) for place in at]
    padded = text + PADDING
    pieces = [padded[place : place + length] for place in places]
    expected = [True] + [now != before for now, before in zip(pieces[1:], pieces, strict=False)]
    assert columns(text).changes(np.array(places, np.int64), length).tolist() == expected


@pytest.mark.parametrize("text", ["0", "7", "10", "123456789012345678", "100"])
def test_integers_are_read_to_their_end(text):
    found = columns(f"x{text},{text}]".encode()).integers(np.array([1, 2 + len(text)]))
    assert found is not None
    values, ends = found
    assert values.tolist() == [int(text)] * 2
    assert ends.tolist() == [1 + len(text), 2 + 2 * len(text)]


@pytest.mark.parametrize("text", ["", "00", "01", "-1", "+1", " 1", "1234567890123456789", "x"])
def test_integers_of_another_form_are_for_somebody_else(text):
    assert columns(f"7,{text}".encode()).integers(np.array([0, 2])) is None


def test_a_text_of_digits_alone_ends_at_its_end():
    values, ends = columns(b"42").integers(np.array([0]))
    assert (values.tolist(), ends.tolist()) == ([42], [2])


@pytest.mark.parametrize("content", [b"", b"x", b"y" * 100_000])
def test_a_file_is_read_with_padding(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert read_padded(str(tmp_path / "x")) == content + PADDING
