"""The NumPy MoE block on small made-up checkpoints: shapes, dtypes, stores that misbehave, refusals."""

import dataclasses
import weakref

import ml_dtypes
import numpy as np
import pytest
from shuffled import Shuffled

from fastcache.errors import CheckpointTruncated, FastcacheError, MissingTensor, UnknownExpert, UnsupportedCheckpoint
from fastcache.layout.record import LayerExperts, Layout, Record, StoredTensor, TensorInfo, View
from fastcache.moe import ResidentExperts, load_block

# --- synthetic checkpoints: one flat file per layout


HIDDEN, INTER = 24, 10


def write(
    tmp_path,
    *,
    family="qwen3_moe",
    n_experts=4,
    top_k=2,
    dtype="F32",
    layer=0,
    router=None,
    config=None,
    prefix="model.",
    fused=False,
    trunk=None,
):
    """Write raw experts and a trunk to one file, and return the Layout over it."""
    rng = np.random.default_rng([HIDDEN, n_experts])
    numpy_dtype = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}[
        dtype
    ]
    size = numpy_dtype.itemsize
    file = bytearray(b"?" * 3)  # nothing is aligned in the file

    def append(array):
        file.extend(array.tobytes())
        return len(file) - array.nbytes

    def weight(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(numpy_dtype)

    offsets = []
    for _ in range(n_experts):
        gate, up, down = weight(INTER, HIDDEN), weight(INTER, HIDDEN), weight(HIDDEN, INTER)
        if fused:  # as gpt-oss: [hidden, 2 * inter] interleaved, [inter, hidden]
            both = np.stack([gate.T, up.T], axis=-1).reshape(HIDDEN, 2 * INTER)
            offsets.append([append(both), append(np.ascontiguousarray(down.T))])
        else:
            offsets.append([append(gate), append(up), append(down)])
    if fused:
        tensors = (
            StoredTensor("gate_up_proj", dtype, (HIDDEN, 2 * INTER), size * 2 * HIDDEN * INTER, size),
            StoredTensor("down_proj", dtype, (INTER, HIDDEN), size * HIDDEN * INTER, size),
        )
        strides = (2 * size, 2 * INTER * size)
        views = (
            View("gate", 0, 0, numpy_dtype, (INTER, HIDDEN), strides),
            View("up", 0, size, numpy_dtype, (INTER, HIDDEN), strides),
            View("down", 1, 0, numpy_dtype, (HIDDEN, INTER), (size, HIDDEN * size)),
        )
    else:
        shapes = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
        tensors = tuple(StoredTensor(n, dtype, s, size * HIDDEN * INTER, size) for n, s in shapes.items())
        views = tuple(View(n, i, 0, numpy_dtype, s, (s[1] * size, size)) for i, (n, s) in enumerate(shapes.items()))
    router = rng.standard_normal((n_experts, HIDDEN), dtype=np.float32) if router is None else router
    infos = {}
    for name, array in {"mlp.gate.weight": router, **(trunk or {})}.items():
        full = f"{prefix}layers.{layer}.{name}"
        infos[full] = TensorInfo(full, "F32", array.shape, 0, append(array), array.nbytes)
    path = tmp_path / "weights.bin"
    path.write_bytes(file)
    located = LayerExperts(
        layer,
        (Record(tensors, views),),
        np.zeros(n_experts, np.uint16),
        np.zeros((n_experts, len(tensors)), np.int32),
        np.array(offsets, np.int64),
    )
    return Layout(family, top_k, (str(path),), {layer: located}, infos, config or {})


def tokens(t, seed=3):
    return np.random.default_rng(seed).standard_normal((t, HIDDEN), dtype=np.float32)


def reference(layout, x, *, renormalise):
    """The textbook in float64, one token and one expert at a time."""
    block = load_block(layout, next(iter(layout.layers)), experts="resident")
    experts = block.experts
    logits = block.router_logits(x).astype(np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y = np.zeros(x.shape)
    for t in range(len(x)):
        chosen = sorted(range(block.n_experts), key=lambda e: (-scores[t, e], e))[: block.top_k]
        total = sum(scores[t, e] for e in chosen) if renormalise else 1.0
        for e in chosen:
            arrays = experts.acquire(block.layer, e)
            gate, up, down = (arrays[name].astype(np.float64) for name in ("gate", "up", "down"))
            inner = gate @ x[t]
            y[t] += scores[t, e] / total * (down @ (inner / (1 + np.exp(-inner)) * (up @ x[t])))
    return y


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("fused", [True, False], ids=["interleaved", "plain"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("t", "k"), [(0, 2), (1, 2), (9, 2), (9, 4), (1, 1)])
def test_the_textbook_for_every_dtype_layout_and_shape(tmp_path, dtype, fused, t, k, renormalise):
    layout = write(tmp_path, dtype=dtype, fused=fused, top_k=k, config={"norm_topk_prob": renormalise})
    x = tokens(t)
    y = load_block(layout, 0, experts="resident")(x)
    assert y.shape == x.shape
    np.testing.assert_allclose(y, reference(layout, x, renormalise=renormalise), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_an_interleaved_expert_equals_the_plain_one_of_the_same_weights(tmp_path, dtype):
    ys = []
    for fused in (True, False):
        folder = tmp_path / str(fused)
        folder.mkdir()
        ys.append(load_block(write(folder, dtype=dtype, fused=fused), 0, experts="resident")(tokens(6)))
    np.testing.assert_allclose(ys[0], ys[1], rtol=0, atol=1e-6)


def test_no_tokens_ask_nothing_of_the_store(tmp_path):
    layout = write(tmp_path)
    store = Shuffled(layout, 0)
    assert load_block(layout, 0, experts=store)(tokens(0)).shape == (0, HIDDEN)
    assert store.asked == []


def test_tied_experts_are_chosen_by_index(tmp_path):
    layout = write(tmp_path, router=np.zeros((4, HIDDEN), np.float32))
    experts, weights = load_block(layout, 0, experts="resident").route(tokens(3))
    assert experts.tolist() == [[0, 1]] * 3
    assert weights.tolist() == [[0.25, 0.25]] * 3


def test_the_same_block_takes_another_store_by_one_attribute(tmp_path):
    layout = write(tmp_path)
    block = load_block(layout, 0, experts="resident")
    wanted = block(tokens(5)).tobytes()
    block.experts = Shuffled(layout, 0)
    assert block(tokens(5)).tobytes() == wanted
    assert len(block.experts.asked) == 1


def test_a_store_s_error_passes_through_and_its_iterator_is_closed(tmp_path):
    layout = write(tmp_path)
    closed = []

    class Failing(Shuffled):
        def as_ready(self, layer, experts):
            try:
                yield from list(super().as_ready(layer, experts))[:1]
                raise FastcacheError("the disk is gone")
            finally:
                closed.append(True)

    with pytest.raises(FastcacheError, match="the disk is gone"):
        load_block(layout, 0, experts=Failing(layout, 0))(tokens(4))
    assert closed == [True]


def test_a_failing_expert_drops_what_was_not_yielded(tmp_path):
    layout = write(tmp_path)
    closed = []

    class Endless(Shuffled):
        def as_ready(self, layer, experts):
            try:
                for expert in experts:
                    yield expert, {}
            finally:
                closed.append(True)

    with pytest.raises(KeyError, match="gate") as caught:  # which keeps the frames, and so the iterator, alive
        load_block(layout, 0, experts=Endless(layout, 0))(tokens(4))
    assert closed == [True]
    assert caught.traceback


def test_an_expert_is_let_go_before_the_next_is_waited_for(tmp_path):
    layout = write(tmp_path)
    alive = []

    class Lease(dict):
        pass

    class Watching(Shuffled):
        def as_ready(self, layer, experts):
            for expert in experts:
                lease = Lease(self.resident.acquire(layer, expert))
                seen = weakref.ref(lease)
                yield expert, lease
                del lease
                alive.append(seen() is not None)

    load_block(layout, 0, experts=Watching(layout, 0))(tokens(8))
    assert alive == [False] * 4


def test_a_store_that_forgets_an_expert_is_found_out(tmp_path):
    layout = write(tmp_path)

    class Forgetful(Shuffled):
        def as_ready(self, layer, experts):
            return iter(list(super().as_ready(layer, experts))[1:])

    with pytest.raises(RuntimeError, match="ended without experts"):
        load_block(layout, 0, experts=Forgetful(layout, 0))(tokens(4))


def test_a_longer_prefix_is_found(tmp_path):
    layout = write(tmp_path, prefix="language_model.model.")
    assert load_block(layout, 0, experts="resident").n_experts == 4


def test_deepseek_without_a_shared_expert_has_none(tmp_path):
    config = {"n_shared_experts": 0, "n_group": 1, "topk_group": 1}
    bias = {"mlp.gate.e_score_correction_bias": np.zeros(4, np.float32)}
    layout = write(tmp_path, family="deepseek_v3", config=config, trunk=bias)
    assert load_block(layout, 0, experts="resident")(tokens(2)).shape == (2, HIDDEN)
    with pytest.raises(MissingTensor, match=r"mlp.shared_experts.gate_proj.weight"):
        load_block(dataclasses.replace(layout, config={**config, "n_shared_experts": 1}), 0, experts="resident")


# --- refusals


def test_an_unknown_family_is_refused_and_told_what_works(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=r"the family 'mellum'.*mixtral.*bytes are served"):
        load_block(write(tmp_path, family="mellum"), 0, experts="resident")


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"n_group": 3}, "3 equal groups"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 1}, "fewer than the top 2"),
    ],
)
def test_a_setting_that_the_forward_does_not_compute_is_refused(tmp_path, family, config, said):
    trunk = {"mlp.gate.e_score_correction_bias": np.zeros(4, np.float32)}
    layout = write(tmp_path, family=family, config={"n_shared_experts": None, **config}, trunk=trunk)
    with pytest.raises(UnsupportedCheckpoint, match=said):
        load_block(layout, 0, experts="resident")


@pytest.mark.parametrize("top_k", [None, 0, 5])
def test_a_top_k_that_cannot_be_is_refused(tmp_path, top_k):
    with pytest.raises(UnsupportedCheckpoint, match="top-k is"):
        load_block(write(tmp_path, top_k=top_k), 0, experts="resident")


def test_a_router_of_another_size_is_refused(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match=r"router has shape \(5, 24\)"):
        load_block(write(tmp_path, router=np.zeros((5, HIDDEN), np.float32)), 0, experts="resident")


def test_a_missing_router_and_an_encoded_one_are_refused(tmp_path):
    layout = write(tmp_path)
    with pytest.raises(MissingTensor, match=r"model.layers.0.mlp.gate.weight"):
        load_block(dataclasses.replace(layout, trunk={}), 0, experts="resident")
    (name, info), *_ = layout.trunk.items()
    encoded = {name: dataclasses.replace(info, dtype="F8_E4M3", nbytes=info.nbytes // 4)}
    with pytest.raises(UnsupportedCheckpoint, match="stored as F8_E4M3"):
        load_block(dataclasses.replace(layout, trunk=encoded), 0, experts="resident")


def test_a_file_that_ends_early_is_refused(tmp_path):
    layout = write(tmp_path)
    with open(layout.files[0], "r+b") as file:
        file.truncate(int(layout.layers[0].offset[3, 2]) + 8)
    with pytest.raises(CheckpointTruncated, match=r"expert \(0, 3\).*'down'"):
        ResidentExperts(layout, 0)
    with pytest.raises(CheckpointTruncated, match="mlp.gate.weight"):
        load_block(layout, 0, experts=object())


def test_experts_is_a_store_or_the_word_resident(tmp_path):
    with pytest.raises(ValueError, match="'residnet'"):
        load_block(write(tmp_path), 0, experts="residnet")


@pytest.mark.parametrize("shape", [(HIDDEN,), (2, HIDDEN + 1), (1, 2, HIDDEN)])
def test_x_of_another_shape_is_a_value_error_that_says_both(tmp_path, shape):
    block = load_block(write(tmp_path), 0, experts="resident")
    with pytest.raises(ValueError, match=r"\[T, 24\]"):
        block(np.zeros(shape, np.float32))


def test_resident_experts_know_their_layer_only(tmp_path):
    resident = ResidentExperts(write(tmp_path), 0)
    for key in ((1, 0), (0, 4), (0, -1)):
        with pytest.raises(UnknownExpert):
            resident.acquire(*key)
    assert [expert for expert, _ in resident.as_ready(0, [2, 1, 2, 3])] == [2, 1, 3]
