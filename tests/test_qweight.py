"""quant.qweight and linear on GPTQ's and AWQ's tensors: the formats' own numbers, bounded memory, or a typed error."""

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qweights import AWQ_ORDER, FORMS, awq, borrowed, gptq, marked, packed_across, packed_down, weight_of, word_of

import fastcache
from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.linear import BLOCK_BYTES
from fastcache.quant.coded import coded_weight
from fastcache.quant.decodable import check_decodable, hollow

forms = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


def dense(arrays, name="up"):
    return coded_weight(arrays, name).dense()


@forms
@settings(deadline=None, max_examples=15)
@given(n_out=st.integers(1, 45), n_in=st.integers(1, 90), tokens=st.integers(0, 3), seed=st.integers(0, 99))
def test_any_shape_is_what_the_formula_says_bit_for_bit_and_linear_multiplies_by_it(make, n_out, n_in, tokens, seed):
    rng = np.random.default_rng(seed)
    arrays, wanted = make(rng, n_out, n_in)
    assert dense(arrays).tobytes() == wanted.astype(np.float32).tobytes()
    x = rng.standard_normal((tokens, wanted.shape[1]), np.float32)
    y = fastcache.linear(x, arrays, "up")
    assert y.dtype == np.float32 and y.shape == (tokens, len(wanted))
    size = np.abs(x).astype(np.float64) @ np.abs(wanted).T
    assert (np.abs(y - x.astype(np.float64) @ wanted.T) <= 1e-6 * size).all()


@forms
def test_blocks_of_columns_meet_without_a_seam(make):
    """One row of codes again and again, so that the weight is large and what it stands for is made quickly."""
    rng = np.random.default_rng(1)
    arrays, wanted = make(rng, 64, 96)
    times = 2 * BLOCK_BYTES // (4 * wanted.size) + 3
    wide = {label: np.tile(array, (1, times)) if array.ndim == 2 else array for label, array in arrays.items()}
    wide["up.qweight"] = wide["up.qweight"].view(arrays["up.qweight"].dtype)
    weight = np.tile(wanted, (times, 1)).astype(np.float32)
    assert weight.nbytes > 2 * BLOCK_BYTES
    assert dense(wide).tobytes() == weight.tobytes()
    eye = np.eye(wanted.shape[1], dtype=np.float32)[:3]  # picks columns, so that the product is exact
    assert fastcache.linear(eye, wide, "up").tobytes() == np.ascontiguousarray(weight.T[:3]).tobytes()
    assert fastcache.linear(eye[0], wide, "up").shape == (len(weight),)
    named = {f"model.layers.3.self_attn.q_proj.{label.removeprefix('up.')}": array for label, array in wide.items()}
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj"):
        assert fastcache.linear(eye[1], named, name).tobytes() == weight.T[1].tobytes()


@pytest.mark.parametrize("size", [24, 40, 2600])
@pytest.mark.parametrize("packing", ["gptq", "gptq in act-order", "awq"])
def test_tiles_of_a_large_weight_meet_without_a_seam_whatever_the_groups(packing, size):
    rng, n_out, n_in = np.random.default_rng(size), 1208, 2600
    arrays = large(rng, packing, n_out, n_in, size)
    coded = coded_weight(arrays, "up")
    whole = np.empty((n_in, n_out), np.float32)
    coded.fill(0, 0, whole)
    tops, lefts = ({tile[axis] for tile in coded.tiles(BLOCK_BYTES)} for axis in (0, 1))
    assert len(tops) > 1 and len(lefts) > 1
    assert all(4 * n_in * n_out <= BLOCK_BYTES for _, _, n_in, n_out in coded.tiles(BLOCK_BYTES))
    assert coded.dense().tobytes() == whole.T.tobytes()
    picked = sorted({0, n_in - 1, *(top + step for top in tops for step in (-1, 0, 1) if 0 < top + step < n_in)})
    np.testing.assert_array_equal(fastcache.linear(np.eye(n_in, dtype=np.float32)[picked], arrays, "up"), whole[picked])
    x = rng.standard_normal((3, n_in), np.float32)
    exact = x.astype(np.float64) @ whole
    size_of = np.abs(x).astype(np.float64) @ np.abs(whole)
    assert (np.abs(fastcache.linear(x, arrays, "up") - exact) <= 1e-6 * size_of).all()


def large(rng, packing, n_out, n_in, size):
    """Random words: what they stand for, the tests of small weights tell."""
    groups = -(-n_in // size)
    words = (n_in, n_out // 8) if packing == "awq" else (n_in // 8, n_out)
    arrays = {
        "up.qweight": marked(
            rng.integers(-(2**31), 2**31, words).astype(np.int32), (1, size), 4, packing=packing.partition(" ")[0]
        ),
        "up.qzeros": np.full((groups, n_out // 8), 0x76543210, np.int32),
        "up.scales": (rng.random((groups, n_out)) + 0.1).astype(np.float16),
    }
    if packing == "gptq in act-order":
        arrays["up.g_idx"] = rng.permutation(np.arange(n_in, dtype=np.int32) // size)
    return arrays


@pytest.mark.parametrize("packing", ["gptq", "gptq in act-order", "awq"])
def test_memory_beyond_the_result_is_bounded_and_does_not_grow_with_the_weight(packing):
    rng, n_in, size = np.random.default_rng(0), 1024, 128
    x = np.ones((1, n_in), np.float32)
    peaks = []

    def cold(arrays):
        tracemalloc.start()
        fastcache.linear(x, arrays, "up")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    for n_out in (1024, 4096):  # 4 and 16 MiB of float32
        arrays = large(rng, packing, n_out, n_in, size)
        fastcache.linear(x, arrays, "up")  # tables
        thread = threading.Thread(target=cold, args=(arrays,))
        thread.start()
        thread.join()
    assert max(peaks) < BLOCK_BYTES + (1 << 20)
    assert peaks[1] < peaks[0] + 64 * 1024


def test_words_are_packed_as_these_examples_say():
    assert word_of(range(8), 4) == 0x76543210
    assert word_of(AWQ_ORDER, 4) == 0x75316420
    down = {
        "up.qweight": marked(np.full((1, 8), 0x76543210, np.int32), (1, 8), 4, packing="gptq_v2"),
        "up.qzeros": np.full((1, 1), 0x76543210, np.int32),
        "up.scales": np.ones((1, 8), np.float16),
    }
    assert dense(down).tolist() == [[i - o for i in range(8)] for o in range(8)]
    across = {
        "up.qweight": marked(np.full((2, 1), 0x75316420, np.int32), (1, 2), 4, packing="awq"),
        "up.qzeros": np.zeros((1, 1), np.int32),
        "up.scales": np.ones((1, 8), np.float16),
    }
    assert dense(across).tolist() == [[o, o] for o in range(8)]


@pytest.mark.parametrize(("bits", "stored"), [(4, 0x77777777), (8, 0x7F7F7F7F), (2, 0x55555555)])
def test_symmetric_is_the_same_whether_its_zero_points_are_stored_less_one_or_not(bits, stored):
    """Files that say "gptq" and hold zero points as they are exist; in one of the two readings they are symmetric."""
    rng = np.random.default_rng(0)
    arrays, wanted = gptq(rng, 16, 32, 16, bits, symmetric=True)
    assert (arrays["up.qzeros"] == stored).all()
    mislabelled = {**arrays, "up.qzeros": packed_across(np.full((2, 16), 2 ** (bits - 1)), bits)}
    for each in (arrays, mislabelled):
        assert dense(each).tobytes() == wanted.astype(np.float32).tobytes()
    words = arrays["up.qweight"].view(np.int32)
    asymmetric = marked(words, (1, 16), bits, asymmetric=True, packing="gptq")
    shifted = wanted - np.repeat(arrays["up.scales"].astype(np.float64), 16, 0).T
    assert dense({**mislabelled, "up.qweight": asymmetric}).tobytes() == shifted.astype(np.float32).tobytes()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_0_stored_less_one_is_read_if_whole_words_were_made_less_and_else_refused(bits):
    rng = np.random.default_rng(bits)
    n_out, n_in, size = 48, 32, 16
    codes = rng.integers(0, 2**bits, (n_in, n_out))
    zeros = rng.integers(0, 2, (2, n_out)) * rng.integers(0, 2**bits, (2, n_out))  # many are 0
    scales = (rng.random((2, n_out)) + 0.1).astype(np.float16)
    arrays, _ = gptq(rng, n_out, n_in, size, bits)
    words = packed_down(codes, bits)
    arrays |= {"up.qzeros": borrowed(zeros, bits), "up.scales": scales}
    carried = marked(words, (1, size), bits, asymmetric=True, packing="gptq", carries=True)
    wanted = weight_of(codes, zeros, scales, [i // size for i in range(n_in)])
    assert dense({**arrays, "up.qweight": carried}).tobytes() == wanted.astype(np.float32).tobytes()
    other = marked(words, (1, size), bits, asymmetric=True, packing="gptq")
    with pytest.raises(UnsupportedCheckpoint, match=r"up\.qzeros.*gptq_v2"):
        dense({**arrays, "up.qweight": other})
    second = marked(words, (1, size), bits, asymmetric=True, packing="gptq_v2")
    as_they_are = {**arrays, "up.qweight": second, "up.qzeros": packed_across(zeros, bits)}
    assert dense(as_they_are).tobytes() == wanted.astype(np.float32).tobytes()


def test_g_idx_wins_over_the_config_and_over_the_groups_size():
    """As with modules that `dynamic` gives other groups, or none of the config's."""
    rng = np.random.default_rng(0)
    for order in ("in order", "shuffled"):
        arrays, wanted = gptq(rng, 8, 48, 12, packing="gptq_v2", order=order)
        for block in ((1, 16), (1, 0), None):
            words = marked(arrays["up.qweight"].view(np.int32), block, 0, packing="gptq_v2")
            assert dense({**arrays, "up.qweight": words}).tobytes() == wanted.astype(np.float32).tobytes()
    with pytest.raises(UnsupportedCheckpoint, match="which of 48 inputs is of which of 4 groups"):
        dense({**without(arrays, "up.g_idx"), "up.qweight": words})


def without(arrays, *labels):
    return {label: array for label, array in arrays.items() if label not in labels}


GPTQ, _ = gptq(np.random.default_rng(0), 16, 64, order="shuffled")
AWQ, _ = awq(np.random.default_rng(0), 16, 64)
WORDS = GPTQ["up.qweight"].view(np.int32)


@pytest.mark.parametrize(
    ("arrays", "error", "said"),
    [
        (without(GPTQ, "up.scales"), MissingTensor, r"up\.scales"),
        (without(GPTQ, "up.qzeros"), MissingTensor, r"up\.qzeros"),
        (without(GPTQ, "up.g_idx"), MissingTensor, r"up\.g_idx"),
        (without(AWQ, "up.scales"), MissingTensor, r"up\.scales"),
        (without(AWQ, "up.qzeros"), MissingTensor, r"up\.qzeros"),
        ({**GPTQ, "up.qweight": WORDS.copy()}, UnsupportedCheckpoint, "quant_method"),
        ({**GPTQ, "up.qweight": marked(WORDS, problem="a.key is 7")}, UnsupportedCheckpoint, "a.key is 7"),
        ({**GPTQ, "up.qweight": marked(WORDS, (1, 16), 4)}, UnsupportedCheckpoint, "quant_method"),
        ({**GPTQ, "up.qweight": marked(WORDS, (1, 16), 8, packing="gptq")}, CheckpointError, "4 bits.*says 8"),
        ({**GPTQ, "up.qweight": marked(WORDS, (1, 16), 4, packing="awq")}, CheckpointError, "as AWQ packs"),
        ({**GPTQ, "up.qweight": GPTQ["up.qweight"][:, :8]}, CheckpointError, "as GPTQ packs"),
        ({**GPTQ, "up.qweight": GPTQ["up.qweight"][:7]}, CheckpointError, "g_idx"),
        ({**GPTQ, "up.qweight": GPTQ["up.qweight"].reshape(-1)}, CheckpointError, "do not fit"),
        ({**GPTQ, "up.qzeros": GPTQ["up.qzeros"][:3]}, CheckpointError, "do not fit"),
        ({**GPTQ, "up.qzeros": np.zeros((4, 3), np.int32)}, CheckpointError, "2, 4 or 8 bits"),
        ({**GPTQ, "up.qzeros": np.zeros((4, 0), np.int32)}, CheckpointError, "2, 4 or 8 bits"),
        ({**GPTQ, "up.qzeros": np.zeros((4, 2), np.float32)}, UnsupportedCheckpoint, "float32"),
        ({**GPTQ, "up.scales": np.zeros((4, 16), np.int16)}, UnsupportedCheckpoint, "int16"),
        ({**GPTQ, "up.scales": np.zeros((4, 0), np.float16)}, CheckpointError, "do not fit|are wanted"),
        ({**GPTQ, "up.g_idx": np.full(64, 4, np.int32)}, CheckpointError, "groups from 4 to 4; there are 4"),
        ({**GPTQ, "up.g_idx": np.full(64, -1, np.int32)}, CheckpointError, "groups from -1"),
        ({**GPTQ, "up.g_idx": np.zeros(63, np.int32)}, CheckpointError, "g_idx"),
        ({**GPTQ, "up.g_idx": np.zeros(64, np.float32)}, CheckpointError, "g_idx"),
        ({**AWQ, "up.scales": AWQ["up.scales"][:2], "up.qzeros": AWQ["up.qzeros"][:2]}, CheckpointError, "2 groups"),
        ({**AWQ, "up.qweight": AWQ["up.qweight"][:, :1]}, CheckpointError, "as AWQ packs"),
        (
            {**AWQ, "up.qweight": marked(AWQ["up.qweight"].view(np.int32), (1, 15), 4, packing="awq")},
            CheckpointError,
            "15",
        ),
        (
            {
                "up.qweight": marked(np.zeros((1, 8), np.int32), (1, 1), 4, packing="gptq"),
                "up.qzeros": np.zeros((9, 1), np.int32),
                "up.scales": np.zeros((9, 8), np.float16),
            },
            CheckpointError,
            "9 groups of 8 inputs",
        ),
    ],
)
def test_what_does_not_fit_or_is_not_there_is_a_typed_error(arrays, error, said):
    with pytest.raises(error, match=said):
        fastcache.linear(np.zeros((1, 64), np.float32), arrays, "up")
    if "there are 4" not in said and "groups from" not in said:  # what numbers alone tell
        with pytest.raises(error, match=said):
            check_decodable(hollow((label, array.dtype, array.shape) for label, array in arrays.items()), "up")


@forms
def test_types_and_shapes_alone_tell_whether_a_weight_can_be_decoded(make):
    arrays, _ = make(np.random.default_rng(0), 40, 100)
    empty = hollow((label, array.dtype, array.shape) for label, array in arrays.items())
    check_decodable(empty, "up")
    with pytest.raises(UnsupportedCheckpoint, match="no arithmetic here for 'down'"):
        check_decodable(empty, "down")


def test_x_of_the_wrong_width_is_named_by_the_weight_s_own_shape():
    with pytest.raises(ValueError, match=r"\(16, 64\)"):
        fastcache.linear(np.zeros((1, 63), np.float32), GPTQ, "up")


def test_no_token_and_no_input_give_zeros():
    assert fastcache.linear(np.zeros((0, 64), np.float32), GPTQ, "up").shape == (0, 16)
    empty = {
        "up.qweight": marked(np.zeros((0, 16), np.int32), (1, 16), 4, packing="gptq"),
        "up.qzeros": np.zeros((0, 2), np.int32),
        "up.scales": np.zeros((0, 16), np.float16),
    }
    assert (fastcache.linear(np.zeros((2, 0), np.float32), empty, "up") == np.zeros((2, 16))).all()
