"""Options that the commands on traces share: what is repeated adds up, and what names nothing is refused."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from fastcache.cli import main


def call(command, *arguments):
    return CliRunner().invoke(main, [command, *map(str, arguments)])


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "small.bin"
    np.array([[0, 0], [0, 1], [1, 3], [0, 1], [0, 2], [1, 3]], "<i4").tofile(path)
    return path


def test_capacities_and_policies_may_be_given_one_by_one(pairs):
    one_by_one = ["--slots", "2", "--fractions", "0.25", "--slots", "3,4", "--fractions", "0.5,1"]
    rows = json.loads(call("replay", pairs, "--json", "--policy", "lru", *one_by_one).stdout)["rows"]
    assert [row["capacity"] for row in rows] == [2, 4, 8, 2, 3, 4]
    two = ["--policy", "lru", "--policy", "lfu,sieve"]
    rows = json.loads(call("replay", pairs, "--json", "--slots", "2", *two).stdout)["rows"]
    assert [row["policy"] for row in rows] == ["lru", "lfu", "sieve"]
    assert list(json.loads(call("mrc", pairs, *two).stdout)["curves"]) == ["lru", "lfu", "sieve"]


@pytest.mark.parametrize(("option", "value"), [("--slots", "1"), ("--fractions", "1"), ("--policy", "lru")])
def test_an_option_that_names_nothing_is_refused_beside_one_that_does(pairs, option, value):
    result = call("replay", pairs, option, value, option, ",")
    assert result.exit_code == 2 and f"{option} ',' names nothing" in result.output
