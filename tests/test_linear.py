"""`fastcache.linear`: right for every plain dtype and stride, bounded, and typed when it cannot be."""

import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcache.errors import FastcacheError, UnsupportedCheckpoint
from fastcache.linear import BLOCK_BYTES, linear
from fastcache.quant.floats import aligned_empty, to_float32, widen

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def contiguous(w):
    return np.ascontiguousarray(w)


def transposed(w):
    return np.ascontiguousarray(w.T).T


def interleaved(w):
    """As gpt-oss stores gate and up: [in, 2 * out], this matrix in the even columns."""
    fused = np.zeros((w.shape[1], 2 * w.shape[0]), w.dtype)
    fused[:, ::2] = w.T
    return fused[:, ::2].T


def half_of_fused(w):
    fused = np.zeros((w.shape[1], 2 * w.shape[0]), w.dtype)
    fused[:, w.shape[0] :] = w.T
    return fused[:, w.shape[0] :].T


def padded_rows(w):
    wide = np.zeros((w.shape[0], w.shape[1] + 3), w.dtype)
    wide[:, :-3] = w
    return wide[:, :-3]


def reversed_both(w):
    return np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1]


def misaligned(w):
    raw = np.empty(w.nbytes + 1, np.uint8)
    out = raw[1:].view(w.dtype).reshape(w.shape)
    out[...] = w
    return out


LAYOUTS = (contiguous, transposed, interleaved, half_of_fused, padded_rows, reversed_both, misaligned)
layouts = pytest.mark.parametrize("lay", LAYOUTS, ids=lambda f: f.__name__)


def example(t, n_out, n_in, dtype, seed=0):
    rng = np.random.default_rng([seed, t, n_out, n_in])
    x = rng.standard_normal((t, n_in), dtype=np.float32)
    w = (rng.standard_normal((n_out, n_in)) / max(1, n_in) ** 0.5).astype(dtype)
    return x, w


@dtypes
@layouts
@pytest.mark.parametrize(("t", "n_out", "n_in"), [(1, 1, 1), (1, 5, 3), (3, 7, 129), (2, 300, 2049), (17, 33, 64)])
def test_equals_float64_and_a_plain_conversion(dtype, lay, t, n_out, n_in):
    x, w = example(t, n_out, n_in, dtype)
    y = linear(x, {"gate": lay(w)}, "gate")
    assert y.dtype == np.float32 and y.shape == (t, n_out)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64).T, rtol=0, atol=2e-5)
    np.testing.assert_allclose(y, x @ w.astype(np.float32).T, rtol=0, atol=2e-5)


@dtypes
@pytest.mark.parametrize("lay", (contiguous, transposed, interleaved), ids=lambda f: f.__name__)
def test_several_blocks_meet_without_a_seam(dtype, lay):
    n_in, n_out = 1701, 1103
    assert min(n_in, n_out) > 2 * BLOCK_BYTES // (4 * min(n_in, n_out))
    x, w = example(2, n_out, n_in, dtype)
    y = linear(x, {"up": lay(w)}, "up")
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64).T, rtol=0, atol=2e-5)


def test_a_row_longer_than_a_block_is_a_block():
    x, w = example(1, 3, BLOCK_BYTES // 4 + 5, np.float16)
    y = linear(x, {"up": w}, "up")
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64).T, rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.sampled_from(LAYOUTS),
    st.integers(0, 4),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_any_shape_even_an_empty_one(dtype, lay, t, n_out, n_in):
    x, w = example(t, n_out, n_in, dtype)
    y = linear(x, {"w": lay(w)}, "w")
    assert y.shape == (t, n_out)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64).T, rtol=0, atol=2e-5)


@dtypes
def test_one_vector_gives_one_vector_with_the_same_bits(dtype):
    x, w = example(1, 33, 65, dtype)
    y = linear(x[0], {"w": w}, "w")
    assert y.shape == (33,)
    assert y.tobytes() == linear(x, {"w": w}, "w").tobytes()


@pytest.mark.parametrize("lay", (contiguous, transposed, half_of_fused), ids=lambda f: f.__name__)
def test_float32_is_the_plain_product_and_makes_no_copy(lay):
    x, w = example(4, 700, 900, np.float32)
    w = lay(w)
    linear(x, {"w": w}, "w")
    tracemalloc.start()
    y = linear(x, {"w": w}, "w")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert y.tobytes() == (x @ w.T).tobytes()
    assert peak < y.nbytes + 20_000


@dtypes
@pytest.mark.parametrize("lay", (contiguous, transposed, interleaved), ids=lambda f: f.__name__)
def test_memory_beyond_the_result_is_bounded(dtype, lay):
    """A cold thread allocates its buffers: one block of float32 and half as much to gather 16-bit elements."""
    x, w = example(3, 3000, 2500, dtype)  # 30 MB as float32
    lease = {"w": lay(w)}
    peak, result = [], []

    def cold():
        tracemalloc.start()
        result.append(linear(x, lease, "w"))
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    thread = threading.Thread(target=cold)
    thread.start()
    thread.join()
    assert peak[0] < 2 * result[0].nbytes + BLOCK_BYTES * 3 // 2 + 50_000


@dtypes
@layouts
def test_bits_depend_neither_on_where_the_weight_lies_nor_on_threads(dtype, lay):
    x, w = example(5, 600, 1500, dtype)
    wanted = linear(x, {"w": lay(w)}, "w").tobytes()
    copies = [lay(w) for _ in range(4)]
    results = [b""] * 4

    def work(i):
        results[i] = linear(x, {"w": copies[i]}, "w").tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [wanted] * 4


def test_a_bias_label_is_not_added():
    x, w = example(2, 4, 8, np.float32)
    with_bias = linear(x, {"gate": w, "gate.bias": np.full(4, 9, np.float32)}, "gate")
    assert with_bias.tobytes() == linear(x, {"gate": w}, "gate").tobytes()


def test_a_read_only_weight_is_enough():
    x, w = example(2, 4, 8, np.float16)
    w.flags.writeable = False
    linear(x, {"gate": w}, "gate")


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (ml_dtypes.float8_e4m3fn, "8-bit floats"),
        (np.uint8, "packed codes"),
        (np.int32, "packed codes"),
        (np.float64, "not a float of 16 or 32 bits"),
        (np.dtype(">f4"), "not a float"),
    ],
)
def test_an_encoded_weight_is_a_typed_error_that_names_its_dtype(dtype, said):
    lease = {"gate": np.zeros((2, 3), dtype)}
    with pytest.raises(UnsupportedCheckpoint, match=f"{np.dtype(dtype).name}.*{said}"):
        linear(np.zeros((1, 3), np.float32), lease, "gate")


def test_a_role_that_stands_under_encoded_labels_without_their_scale_is_a_typed_error_that_names_them():
    lease = {
        "gate.weight": np.zeros((2, 3), ml_dtypes.float8_e4m3fn),
        "gate.input_scale": np.zeros((), np.float32),
    }
    with pytest.raises(FastcacheError, match=r"'gate'.*'gate.weight' float8_e4m3fn"):
        linear(np.zeros((1, 3), np.float32), lease, "gate")


def test_an_unknown_label_is_the_lease_s_own_key_error():
    for lease in ({"gate": np.zeros((2, 3), np.float32)}, {"gate.weight": np.zeros((2, 3), np.uint8)}):
        with pytest.raises(KeyError, match="gat"):
            linear(np.zeros((1, 3), np.float32), lease, "gat")


@pytest.mark.parametrize(
    ("x", "w"),
    [((2, 4), (5, 3)), ((4,), (5, 3)), ((), (5, 3)), ((1, 2, 3), (5, 3)), ((2, 3), (3,)), ((2, 3), (1, 5, 3))],
)
def test_shapes_that_do_not_fit_are_a_value_error_with_both(x, w):
    with pytest.raises(ValueError) as caught:
        linear(np.zeros(x, np.float32), {"up": np.zeros(w, np.float16)}, "up")
    assert str(x) in str(caught.value) and str(w) in str(caught.value)


# --- the conversion itself


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_every_bit_pattern_widens_exactly(dtype, step):
    source = np.arange(65536, dtype=np.uint16).view(dtype)[::step]
    out = np.full(source.shape, 7, np.float32)
    widen(source, out)
    with np.errstate(invalid="ignore"):
        wanted = source.astype(np.float32)
    number = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(out), ~number)
    assert np.array_equal(out[number].view(np.uint32), wanted[number].view(np.uint32))


def test_finite_float16_takes_the_fast_path_exactly():
    """Without infinities and NaNs, and small enough not to look suspicious: subnormals and both zeros included."""
    bits = np.arange(65536, dtype=np.uint16)
    source = bits[(bits & 0x7FFF) < 0x5000].view(np.float16)
    out = np.empty(source.shape, np.float32)
    widen(source, out)
    assert float(np.dot(out, out)) < 2.0**32
    assert np.array_equal(out.view(np.uint32), source.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_infinity_or_nan_among_float16_weights_survives(value):
    source = np.full((3, 50), 0.01, np.float16)
    source[1, 17] = value
    np.testing.assert_array_equal(to_float32(source), source.astype(np.float32))


def test_to_float32_returns_a_float32_array_itself_and_refuses_codes():
    array = np.ones((2, 3), np.float32)
    assert to_float32(array) is array
    assert to_float32(array.T).flags.c_contiguous
    assert to_float32(np.float16(1.5).reshape(())).shape == ()
    with pytest.raises(TypeError, match="uint8"):
        to_float32(np.zeros(3, np.uint8))


def test_aligned_memory_is_aligned():
    for nbytes in (1, 63, 64, 1000):
        memory = aligned_empty(nbytes)
        assert memory.nbytes == nbytes and memory.ctypes.data % 64 == 0
