"""What a change must not lose: streaming at 0.85 of fio's bandwidth. The goal, 0.95, stands in the receipts.

Skips without fio and root (explicit huge pages for fio's memory), and when the machine is too busy to say anything.
"""

import argparse
import os
import shutil
from pathlib import Path

import pytest
import streaming

ROUNDS, TRIES, ENOUGH = 5, 3, 0.85


@pytest.fixture
def directory(tmp_path_factory):
    """On a real disk; its 1 GiB file goes at the end."""
    base = os.environ.get("FASTCACHE_TEST_DIR")
    path = Path(base) / "guard" if base else tmp_path_factory.mktemp("guard")
    path.mkdir(exist_ok=True)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may reserve huge pages")
def test_streaming_reaches_most_of_fio(directory, monkeypatch):
    monkeypatch.setattr(streaming, "FILE_BYTES", 1 << 30)
    monkeypatch.setattr(streaming, "SECONDS", 0.8)
    path = streaming.make_file(directory)
    options = argparse.Namespace(rounds=ROUNDS, engine="uring")
    ratios = []
    with streaming.huge_pages():
        for _ in range(TRIES):  # a busy neighbour is no regression
            found = streaming.measure(path, streaming.SIZES["4.5 MiB"], options)
            if found["rounds_kept"] >= 3:
                ratios.append(found["of_fio"])
                if ratios[-1] >= ENOUGH:
                    return
    if not ratios:
        pytest.skip("the machine was taken away for more than 5 % of every round")
    pytest.fail(f"of fio's bandwidth: {ratios}")
