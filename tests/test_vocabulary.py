"""Ids that a vocabulary does not have are named, and so is its size, in a call and on the command line."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fastcache import moe
from fastcache.cli import main

PATH = Path(__file__).parent / "data" / "qwen3_moe" / "bf16"  # a vocabulary of 128


@pytest.fixture(scope="module")
def model():
    with moe.load(PATH, budget="all") as model:
        yield model


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 128], "128"),
        ([-1, 5], "-1"),
        ([999999, 1, 999999], "999999"),
        ([10**30], str(10**30)),
        (np.array([2**63 + 5], np.uint64), str(2**63 + 5)),
        ([200, 201, 202, 203, 204, 205], "200, 201, 202, 203 and 2 others"),
    ],
)
def test_an_id_outside_the_vocabulary_is_named_with_its_size(model, ids, said):
    said = f"must be from 0 to 127, in a vocabulary of 128; got {said}$"
    with pytest.raises(ValueError, match=f"^ids {said}"):
        model.generate(ids, 1)
    with pytest.raises(ValueError, match=f"^tokens of stop {said}"):
        model.generate([1], 1, stop=ids)


def test_the_first_and_the_last_id_are_in_it(model):
    assert model.forward([0, 127]).shape == (2, 128)


@pytest.mark.parametrize(("ids", "said"), [("999999", "999999"), ("1,2,128,3", "128"), ("9" * 30, "9" * 30)])
def test_the_command_names_an_id_that_is_outside(ids, said):
    result = CliRunner().invoke(main, ["generate", str(PATH), "--ids", ids, "--max-tokens", "1"])
    assert result.exit_code == 1 and not result.stdout
    assert result.stderr == f"Error: ids must be from 0 to 127, in a vocabulary of 128; got {said}\n"
