"""Checkpoints with what transformers computed of them beside: the few in tests/data, the others in ../shared/oracle."""

import functools
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "oracle"
RTOL = 1e-5  # of the largest magnitude: what independent float32 implementations differ by, times ten
GGUF_KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4", "q4_k_m", "q5_k", "q2_k", "iq4")
GGUF_FILES = tuple(f"{architecture}-{kind}" for architecture in ("llama", "qwen3moe") for kind in GGUF_KINDS)


def case(family, what="full"):
    """The directory of a family that has what.npz: "full" has ids, logits and greedy tokens, "block" each MoE block."""
    for root in (DATA, SHARED / "cases"):
        if (root / family / f"{what}.npz").exists():
            return root / family
    return pytest.skip(f"no recorded {what} of {family} in tests/data or ../shared/oracle/cases")


def gguf_case(name):
    """A GGUF file; what was recorded lies beside it."""
    for root in (DATA / "gguf", SHARED / "gguf"):
        if (root / f"{name}.gguf").exists():
            return root / f"{name}.gguf"
    return pytest.skip(f"no {name} in tests/data/gguf or ../shared/oracle/gguf")


@functools.cache
def recorded(path, what="full"):
    """The arrays of what.npz in a case's directory, or of the .npz beside a file."""
    with np.load(path / f"{what}.npz" if path.is_dir() else path.with_suffix(".npz")) as file:
        return dict(file)


def assert_close(got, wanted, rtol=RTOL):
    assert got.dtype == np.float32 and got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=rtol * np.abs(wanted).max())
