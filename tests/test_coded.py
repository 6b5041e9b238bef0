"""quant.coded and linear on codes with scales: the formats' own numbers, in bounded memory, or a typed error."""

import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from codes import (
    E4M3,
    E5M2,
    FORMS,
    float8,
    mxfp4_blocks,
    nvfp4,
    nvfp4_of_modelopt,
    pack_words,
    packed_integers,
    product,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcache
from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.formats.scheme import Scheme, carrier, schemes_of
from fastcache.linear import BLOCK_BYTES
from fastcache.quant.coded import coded_weight
from fastcache.quant.codes import widen_float8
from fastcache.quant.decodable import check_decodable, hollow

forms = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


def dense(arrays, name="up"):
    return coded_weight(arrays, name).dense()


def unmarked(arrays):
    return {label: array.view(array.dtype.type) for label, array in arrays.items()}


@forms
@settings(deadline=None, max_examples=25)
@given(n_out=st.integers(1, 45), n_in=st.integers(1, 150), tokens=st.integers(0, 3), seed=st.integers(0, 99))
def test_any_shape_is_what_the_formula_says_bit_for_bit_and_linear_multiplies_by_it(make, n_out, n_in, tokens, seed):
    rng = np.random.default_rng(seed)
    arrays, wanted = make(rng, n_out, n_in)
    assert dense(arrays).tobytes() == wanted.tobytes()
    x = rng.standard_normal((tokens, wanted.shape[1]), np.float32)
    y = fastcache.linear(x, arrays, "up")
    assert y.dtype == np.float32 and y.shape == (tokens, n_out)
    exact = x.astype(np.float64) @ wanted.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(wanted).T.astype(np.float64)
    assert (np.abs(y - exact) <= 1e-6 * size).all()


@forms
def test_blocks_of_rows_meet_without_a_seam_and_give_the_bits_of_one_matmul_each(make):
    rng = np.random.default_rng(1)
    n_in = 2048 + 32
    step = BLOCK_BYTES // (4 * n_in)
    arrays, wanted = make(rng, 2 * step + 37, n_in)
    x = rng.standard_normal((2, n_in), np.float32)
    y = np.empty((2, len(wanted)), np.float32)
    for first in range(0, len(wanted), step):
        np.matmul(x, wanted[first : first + step].T, out=y[:, first : first + step])
    assert fastcache.linear(x, arrays, "up").tobytes() == y.tobytes()
    assert fastcache.linear(x[0], arrays, "up").shape == (len(wanted),)
    copies = {label: array.copy() for label, array in arrays.items()}
    assert fastcache.linear(x, copies, "up").tobytes() == y.tobytes()
    named = {f"model.layers.3.self_attn.q_proj.{label.removeprefix('up.')}": array for label, array in arrays.items()}
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj"):
        assert fastcache.linear(x, named, name).tobytes() == y.tobytes()


@forms
def test_memory_beyond_the_result_is_bounded_and_does_not_grow_with_the_weight(make):
    """A cold thread allocates its block of float32 too."""
    x = np.ones((1, 1024), np.float32)
    peaks = []

    def cold(arrays):
        tracemalloc.start()
        fastcache.linear(x, arrays, "up")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    for n_out in (1024, 4096):  # 4 and 16 MiB of float32
        arrays, _ = make(np.random.default_rng(0), n_out, 1024)
        fastcache.linear(x, arrays, "up")  # tables
        thread = threading.Thread(target=cold, args=(arrays,))
        thread.start()
        thread.join()
    assert max(peaks) < BLOCK_BYTES + (1 << 20)
    assert peaks[1] < peaks[0] + 64 * 1024


@pytest.mark.parametrize(("dtype", "table"), [(ml_dtypes.float8_e4m3fn, E4M3), (ml_dtypes.float8_e5m2, E5M2)])
def test_every_float8_code_is_its_value_alone_and_among_others(dtype, table):
    codes = np.arange(256, dtype=np.uint8)
    for each in (codes, codes[np.isfinite(table)], codes[::-3], codes.reshape(16, 16)[:, ::2]):
        out = np.empty(each.shape, np.float32)
        widen_float8(each.view(dtype), out)
        np.testing.assert_array_equal(out, table[each].astype(np.float32))
        assert (np.signbit(out) == (each >= 128))[~np.isnan(out)].all()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz])
def test_the_float8_types_without_a_negative_zero_are_what_ml_dtypes_makes_of_them(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype).reshape(8, 32)
    got = dense({"up.weight": codes, "up.weight_scale": np.float32(0.25)})
    np.testing.assert_array_equal(got, codes.astype(np.float32) * np.float32(0.25))


def test_the_rows_of_a_fused_tensor_need_no_copy():
    rng = np.random.default_rng(3)
    arrays, wanted = mxfp4_blocks(rng, (30, 96))
    gate = {"gate.blocks": arrays["up.blocks"][::2], "gate.scales": arrays["up.scales"][::2]}
    assert dense(gate, "gate").tobytes() == wanted[::2].tobytes()
    assert np.shares_memory(coded_weight(gate, "gate").codes, arrays["up.blocks"])


def test_the_largest_exponent_is_no_number_and_the_smallest_is_subnormal():
    arrays, _ = mxfp4_blocks(np.random.default_rng(0), (1, 64))
    arrays["up.scales"] = np.array([[255, 0]], np.uint8)
    got = dense(arrays)
    assert np.isnan(got[0, :32]).all()
    assert set(np.abs(got[0, 32:]).tolist()) <= {value * 2.0**-127 for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)}


def test_a_bfloat16_weight_with_a_scale_beside_it_is_multiplied_by_it():
    weight = np.random.default_rng(0).standard_normal((5, 7)).astype(ml_dtypes.bfloat16)
    scale = np.arange(1, 6, dtype=np.float32)  # one axis: of the rows
    got = dense({"a.weight": weight, "a.weight_scale": scale}, "a.weight")
    np.testing.assert_array_equal(got, weight.astype(np.float32) * scale[:, np.newaxis])
    x = np.ones((1, 7), np.float32)
    both = fastcache.linear(x, {"a.weight": weight, "a.weight_scale": scale}, "a.weight")
    np.testing.assert_allclose(both, x @ got.T, rtol=1e-6)
    alone = fastcache.linear(x, {"a.weight": weight}, "a.weight")
    np.testing.assert_allclose(alone, x @ weight.astype(np.float32).T, rtol=1e-6)


def test_a_weight_whose_zero_points_are_one_to_an_element_is_decoded():
    integers = np.random.default_rng(0).integers(-128, 128, (6, 8)).astype(np.int8)
    scale, zeros = np.arange(1, 7, dtype=np.float32)[:, np.newaxis], np.arange(-3, 3, dtype=np.int8)[:, np.newaxis]
    got = dense({"up.weight": integers, "up.weight_scale": scale, "up.weight_zero_point": zeros})
    np.testing.assert_array_equal(got, (integers.astype(np.float32) - zeros) * scale)


@pytest.mark.parametrize(("n_out", "shape"), [(4, (1, 1)), (8, (2, 1)), (8, (8, 1)), (4, (1,))])
def test_packed_zero_points_of_codes_that_are_not_packed_are_refused(n_out, shape):
    arrays = {
        "up.weight": np.ones((n_out, 8), np.int8),
        "up.weight_scale": np.ones((n_out, 1), np.float32),
        "up.weight_zero_point": np.full(shape, 0x01020304, np.int32),
    }
    with pytest.raises(UnsupportedCheckpoint, match=r"up\.weight_zero_point.*int32"):
        fastcache.linear(np.ones(8, np.float32), arrays, "up")


def test_views_slices_and_copies_keep_the_schemes_and_equal_any_other_array_of_the_type():
    dtype = carrier(np.dtype(ml_dtypes.float8_e4m3fn), (Scheme((128, 128)),))
    array = np.zeros((4, 6), dtype)
    assert array.dtype == ml_dtypes.float8_e4m3fn and carrier(np.dtype(np.uint8), ()) == np.uint8
    for each in (array[1:, ::2], array.copy(), np.array(array), np.ascontiguousarray(array.T), array.reshape(-1)):
        assert schemes_of(each.dtype) == (Scheme((128, 128)),)
    assert schemes_of(np.dtype(np.uint8)) == ()


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((2048, 7168), (16, 56)),  # 128, 129 and 130 columns all give 56 cells
        ((384, 384), (2, 2)),  # 192 to 383
        ((5, 3), (2, 1)),  # 3 or 4 rows
        ((4, 4), (5, 1)),
        ((4, 4), (1, 0)),
    ],
)
def test_a_grid_that_several_blocks_could_give_is_refused_without_the_config(shape, grid):
    arrays = {"up.weight": np.zeros(shape, ml_dtypes.float8_e4m3fn), "up.weight_scale_inv": np.ones(grid, np.float32)}
    with pytest.raises(UnsupportedCheckpoint, match=r"several sizes.*weight_block_size"):
        fastcache.linear(np.zeros((1, shape[1]), np.float32), arrays, "up")


@pytest.mark.parametrize("grid", [(), (1,), (1, 1), (6, 1), (6,), (1, 9), (6, 9), (3, 1), (3, 9)])
def test_a_grid_that_only_one_block_could_give_says_so_itself(grid):
    rng = np.random.default_rng(0)
    arrays, _ = float8(rng, (6, 9), (6, 9))
    scale = rng.random(grid).astype(np.float32)
    codes = arrays["up.weight"].view(ml_dtypes.float8_e4m3fn)
    cells = scale.reshape(scale.shape if scale.ndim == 2 else (-1, 1))
    wide = np.repeat(np.repeat(cells, 6 // cells.shape[0], 0), 9 // cells.shape[1], 1)
    got = dense({"up.weight": codes, "up.weight_scale": scale})
    assert got.tobytes() == product(E4M3[codes.view(np.uint8)], wide).tobytes()


def test_a_grid_that_is_not_that_of_the_config_is_refused_not_read_another_way():
    arrays, _ = float8(np.random.default_rng(0), (256, 256), (128, 128))
    for grid in ((1, 1), (2, 3), (256, 1)):
        wrong = {**arrays, "up.weight_scale_inv": np.ones(grid, np.float32)}
        with pytest.raises(CheckpointError, match=r"do not cover it in blocks of 128 x 128"):
            fastcache.linear(np.zeros((1, 256), np.float32), wrong, "up")


def test_of_several_schemes_the_one_that_fits_is_taken_and_two_that_fit_are_refused():
    arrays, wanted = float8(np.random.default_rng(0), (48, 64), (16, 16))
    codes = arrays["up.weight"]
    several = carrier(np.dtype(ml_dtypes.float8_e4m3fn), (Scheme((1, 0)), Scheme((16, 16)), Scheme((16, 16), 8)))
    assert dense({**arrays, "up.weight": codes.view(several)}).tobytes() == wanted.tobytes()
    alike = carrier(np.dtype(ml_dtypes.float8_e4m3fn), (Scheme((17, 16)), Scheme((16, 16))))
    with pytest.raises(UnsupportedCheckpoint, match=r"fit blocks of 16 x 16 or 17 x 16"):
        dense({**arrays, "up.weight": codes.view(alike)})


def without(arrays, *labels):
    return {label: array for label, array in arrays.items() if label not in labels}


INT4, _ = packed_integers(np.random.default_rng(0), (16, 64), 32, symmetric=False)
NVFP4, _ = nvfp4(np.random.default_rng(0), (16, 64))
MODELOPT, _ = nvfp4_of_modelopt(np.random.default_rng(0), (16, 64))
FP8, _ = float8(np.random.default_rng(0), (16, 64), (16, 16))
REFUSED = carrier(np.dtype(np.int32), (Scheme(problem="quantization_config.quant_method is 'gptq'"),))


@pytest.mark.parametrize(
    ("arrays", "error", "said"),
    [
        (without(INT4, "up.weight_zero_point"), MissingTensor, "not symmetric"),
        (without(INT4, "up.weight_shape"), MissingTensor, "weight_shape"),
        (without(INT4, "up.weight_scale"), UnsupportedCheckpoint, "no scale"),
        ({**INT4, "up.weight_shape": np.array([16, 65])}, UnsupportedCheckpoint, "8 words"),
        ({**INT4, "up.weight_shape": np.array([17, 64])}, UnsupportedCheckpoint, "8 words"),
        ({**INT4, "up.weight_zero_point": np.zeros((1, 2), np.int32)}, CheckpointError, "zero points"),
        ({**INT4, "up.weight_zero_point": np.zeros((1, 2), np.int8)}, CheckpointError, "int8"),
        ({**INT4, "up.weight_g_idx": np.zeros(64, np.int32)}, UnsupportedCheckpoint, "actorder"),
        ({**INT4, "up.weight_packed": np.zeros((16, 8), REFUSED)}, UnsupportedCheckpoint, "quant_method is 'gptq'"),
        ({**INT4, "up.weight_packed": np.zeros((16, 8), np.int64)}, UnsupportedCheckpoint, "int64"),
        ({**INT4, "up.weight_global_scale": np.ones(1, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**FP8, "up.weight_scale_2": np.ones(1, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**FP8, "up.weight_global_scale": np.ones(1, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**FP8, "up.pre_quant_scale": np.ones(64, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**NVFP4, "up.pre_quant_scale": np.ones(64, np.float32)}, UnsupportedCheckpoint, "a factor"),
        (without(NVFP4, "up.weight_global_scale"), MissingTensor, "weight_global_scale"),
        (without(MODELOPT, "up.weight_scale_2"), MissingTensor, "weight_scale_2"),
        ({**MODELOPT, "up.weight_scale_2": np.ones(2, np.float32)}, CheckpointError, "one number"),
        ({**MODELOPT, "up.weight_global_scale": np.ones(1, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**MODELOPT, "up.pre_quant_scale": np.ones(64, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**NVFP4, "up.weight_scale_2": np.ones(1, np.float32)}, UnsupportedCheckpoint, "a factor"),
        ({**NVFP4, "up.weight_global_scale": np.ones(2, np.float32)}, CheckpointError, "one number"),
        ({**NVFP4, "up.weight_scale": np.ones((16, 4), np.float32)}, UnsupportedCheckpoint, "float32"),
        ({**FP8, "up.weight_scale": np.ones((1, 4), np.float32)}, UnsupportedCheckpoint, "one is wanted"),
        ({**FP8, "up.weight_scale_inv": np.ones((1, 4, 1), np.float32)}, UnsupportedCheckpoint, "two axes"),
        ({**FP8, "up.weight_scale_inv": np.ones((1, 4), np.int32)}, UnsupportedCheckpoint, "int32"),
        (
            {"up.weight": np.zeros((16, 32), np.int8), "up.scale": np.zeros((16, 2), ml_dtypes.float8_e8m0fnu)},
            UnsupportedCheckpoint,
            "int8",
        ),
        (
            {"up.blocks": np.zeros((4, 2, 15), np.uint8), "up.scales": np.zeros((4, 2), np.uint8)},
            CheckpointError,
            "not MXFP4",
        ),
    ],
)
def test_what_does_not_fit_or_is_not_there_is_a_typed_error(arrays, error, said):
    with pytest.raises(error, match=said):
        fastcache.linear(np.zeros((1, 64), np.float32), arrays, "up")


@forms
def test_types_and_shapes_alone_tell_whether_a_weight_can_be_decoded(make):
    arrays, _ = make(np.random.default_rng(0), 40, 100)
    empty = hollow((label, array.dtype, array.shape) for label, array in arrays.items())
    check_decodable(empty, "up")
    with pytest.raises(UnsupportedCheckpoint, match="no arithmetic here for 'down'"):
        check_decodable(empty, "down")


def test_words_are_packed_as_this_example_says():
    """compressed-tensors' own documentation of the order: the first of eight integers lies in the lowest four bits."""
    assert pack_words(np.array([[1, 2, 3, 4, 5, 6, 7, -8]]), 4).view(np.uint32).tolist() == [[0x0FEDCBA9]]


def test_x_of_the_wrong_width_is_named_by_the_weight_s_own_shape():
    with pytest.raises(ValueError, match=r"\(16, 64\)"):
        fastcache.linear(np.zeros((1, 63), np.float32), INT4, "up")
