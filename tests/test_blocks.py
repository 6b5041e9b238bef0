"""quant.blocks and linear on GGML's types: the gguf package's bits, and no more memory than a block takes."""

import threading
import tracemalloc

import gguf as package
import numpy as np
import pytest

import fastcache
from fastcache.errors import UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.linear import BLOCK_BYTES
from fastcache.quant.blocks import blocks_to_float32, decoder_of, is_blocks, widen_blocks

PLAIN = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
NEVER = {"Q8_1", "Q8_K", "Q1_0"}  # intermediate types, and one that the package cannot read yet
TYPES = [name for name in ggml.blocks() if name not in PLAIN | NEVER]
types = pytest.mark.parametrize("name", TYPES)


def random_blocks(name, rows, width, seed=0):
    """Random bytes as rows of blocks, whose numbers are finite: the exponents of their scales are kept low."""
    block = ggml.blocks()[name]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, width // block.elements * block.nbytes), np.uint8)
    raw &= 0xBB  # no half float is infinite then, and no exponent of eight bits
    return raw.view(ggml.carrier(name))


def whole(stored):
    name = ggml.type_of(stored.dtype)
    with np.errstate(all="ignore"):
        return package.dequantize(stored.view(np.uint8), package.GGMLQuantizationType[name])


@types
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_blocks_are_the_packages_numbers_however_many_rows_there_are(name, rows):
    stored = random_blocks(name, rows, 512)
    assert blocks_to_float32(stored).tobytes() == whole(stored).tobytes()
    assert np.isfinite(blocks_to_float32(stored)).all()


@types
@pytest.mark.parametrize("tokens", [1, 5])
def test_linear_is_the_same_matmul_over_the_packages_numbers(name, tokens):
    n_in = 2048
    step = BLOCK_BYTES // (4 * n_in)
    n_out = 2 * step + 37
    stored = random_blocks(name, n_out, n_in)
    x = np.random.default_rng(1).standard_normal((tokens, n_in), np.float32)
    weight = whole(stored)
    wanted = np.empty((tokens, n_out), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, n_out, step):
            np.matmul(x, weight[first : first + step].T, out=wanted[:, first : first + step])
        got = fastcache.linear(x, {"up.weight": stored}, "up")
    assert got.tobytes() == wanted.tobytes()
    assert fastcache.linear(x[0], {"up.weight": stored}, "up").shape == (n_out,)
    assert fastcache.linear(x, {"up.weight": stored}, "up.weight").tobytes() == got.tobytes()


@types
def test_the_memory_that_linear_takes_does_not_grow_with_the_weight(name):
    x = np.ones((1, 2048), np.float32)
    peaks = []
    for n_out in (1024, 4096):
        lease = {"up.weight": random_blocks(name, n_out, 2048)}
        fastcache.linear(x, lease, "up")  # buffers that a thread keeps
        tracemalloc.start()
        fastcache.linear(x, lease, "up")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < BLOCK_BYTES
    assert peaks[1] < peaks[0] + 64 * 1024


def test_blocks_off_any_boundary_give_the_same_bits():
    stored = random_blocks("Q4_K", 40, 512)
    raw = np.empty(stored.nbytes + 1, np.uint8)
    moved = raw[1:].reshape(stored.shape).view(stored.dtype)
    moved[...] = stored
    x = np.random.default_rng(2).standard_normal((3, 512), np.float32)
    wanted = fastcache.linear(x, {"gate.weight": stored}, "gate")
    assert fastcache.linear(x, {"gate.weight": moved}, "gate").tobytes() == wanted.tobytes()


def test_threads_do_not_share_a_buffer():
    leases = [{"up.weight": random_blocks("Q6_K", 512, 1024, seed)} for seed in range(4)]
    x = np.ones((1, 1024), np.float32)
    alone = [fastcache.linear(x, lease, "up").tobytes() for lease in leases]
    wrong = []

    def run(number):
        for _ in range(10):
            if fastcache.linear(x, leases[number], "up").tobytes() != alone[number]:
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_scale_of_the_expert_multiplies_the_product():
    stored = random_blocks("NVFP4", 8, 64)
    x = np.random.default_rng(3).standard_normal((2, 64), np.float32)
    plain = fastcache.linear(x, {"down.weight": stored}, "down")
    scaled = fastcache.linear(x, {"down.weight": stored, "down.scale": np.array(0.5, np.float32)}, "down")
    assert scaled.tobytes() == (plain * np.float32(0.5)).tobytes()


def test_garbage_blocks_give_numbers_or_none_but_no_warning():
    stored = np.full((4, 144), 0xFF, np.uint8).view(ggml.carrier("Q4_K"))
    assert np.isnan(blocks_to_float32(stored)).all()


@pytest.mark.parametrize("name", sorted(NEVER))
def test_a_type_that_the_package_cannot_dequantise_is_named(name):
    stored = random_blocks(name, 2, 256)
    with pytest.raises(UnsupportedCheckpoint, match=f"cannot dequantise {name}.*bytes are served"):
        fastcache.linear(np.ones(256), {"up.weight": stored}, "up")


def test_shapes_that_do_not_fit_are_named_in_elements():
    lease = {"up.weight": random_blocks("Q8_0", 4, 64)}
    with pytest.raises(ValueError, match=r"x has shape \(3, 32\) and 'up' has shape \(4, 64\)"):
        fastcache.linear(np.ones((3, 32)), lease, "up")
    assert fastcache.linear(np.ones((0, 64)), lease, "up").shape == (0, 4)


def test_slices_and_copies_of_an_array_of_blocks_still_say_what_they_are():
    stored = random_blocks("Q5_K", 4, 256)
    for array in (stored[1:3], stored.copy(), stored.reshape(2, 2, -1), np.array(stored)):
        assert is_blocks(array.dtype) and decoder_of(array.dtype).name == "Q5_K"
    assert stored.dtype == np.uint8 and not is_blocks(np.dtype(np.uint8))
    with pytest.raises(TypeError, match="no GGML blocks"):
        decoder_of(np.dtype(np.uint8))


def test_numbers_are_written_where_they_are_wanted():
    stored = random_blocks("Q4_0", 20, 64)
    out = np.zeros((22, 64), np.float32)
    widen_blocks(decoder_of(stored.dtype), stored, out[1:21])
    assert out[1:21].tobytes() == whole(stored).tobytes() and not out[[0, 21]].any()
