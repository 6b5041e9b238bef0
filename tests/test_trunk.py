"""The trunk: every tensor of no routed expert, read-only, as stored, where it lies."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from trunks import tensors_of

import fastcache
from fastcache.errors import CheckpointChanged, MissingTensor
from fastcache.formats import ggml
from fastcache.layout.build import build_layout
from fastcache.trunk import Trunk

DATA = Path(__file__).parent / "data"
SAFETENSORS = [
    ("mixtral", "f32"),
    ("mixtral", "bf16"),
    ("qwen3_moe", "bf16"),
    ("gpt_oss_mxfp4", "mxfp4"),
    ("deepseek_v3_fp8", "fp8"),
]


@pytest.mark.parametrize(("family", "stored"), SAFETENSORS)
def test_each_tensor_has_its_name_its_dtype_and_its_bytes(family, stored):
    wanted = tensors_of(DATA / family / stored) if "mxfp4" not in stored else None
    with fastcache.open(DATA / family / stored) as store:
        layout = build_layout(DATA / family / stored)
        assert set(store.trunk) == set(layout.trunk) and len(store.trunk) == len(layout.trunk)
        assert store.trunk.nbytes == sum(info.nbytes for info in layout.trunk.values())
        for name, array in store.trunk.items():
            info = layout.trunk[name]
            assert not array.flags.writeable and array.nbytes == info.nbytes
            raw = np.fromfile(layout.files[info.file], np.uint8, count=info.nbytes, offset=info.offset)
            assert array.tobytes() == raw.tobytes()
            if wanted is not None:
                assert array.dtype == wanted[name].dtype and array.shape == wanted[name].shape


def test_blocks_of_ggml_say_what_they_are():
    with fastcache.open(DATA / "gguf" / "qwen3moe-q2_k.gguf") as store:
        layout = build_layout(DATA / "gguf" / "qwen3moe-q2_k.gguf")
        kinds = {info.dtype for info in layout.trunk.values()}
        assert len(kinds) > 1
        for name, array in store.trunk.items():
            info = layout.trunk[name]
            if info.dtype not in ("F32", "F16"):
                assert array.dtype.metadata == ggml.carrier(info.dtype).metadata
                assert array.shape[:-1] == info.shape[:-1] and array.nbytes == info.nbytes


def test_arrays_outlive_the_store_and_the_trunk():
    with fastcache.open(DATA / "mixtral" / "bf16") as store:
        trunk = store.trunk
        array = trunk["lm_head.weight"]
    before = array.tobytes()
    late = trunk["model.norm.weight"]  # mapped after close
    del trunk, store
    gc.collect()
    assert array.tobytes() == before and late.size == array.shape[1]


def test_arrays_are_made_once_and_map_one_file_once():
    trunk = Trunk(build_layout(DATA / "qwen3_moe" / "bf16"))
    files = set(os.listdir("/proc/self/fd"))
    found = []
    threads = [threading.Thread(target=lambda: found.append([trunk[name] for name in trunk])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(os.listdir("/proc/self/fd")) - files) == 1
    assert all(trunk[name] is trunk[name] for name in trunk)
    assert all(np.shares_memory(a, b) for a, b in zip(found[0], found[1], strict=True))


def test_a_file_that_was_replaced_is_an_error_not_other_weights(tmp_path):
    source = DATA / "qwen3_moe" / "bf16"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    trunk = Trunk(build_layout(tmp_path))
    changed = tmp_path / "model.safetensors"
    other = tmp_path / "other"
    other.write_bytes(changed.read_bytes())
    os.replace(other, changed)
    with pytest.raises(CheckpointChanged, match="has changed since"):
        trunk["lm_head.weight"]


@pytest.mark.parametrize("name", ["qwen3_moe/bf16", "gguf/qwen3moe-q2_k.gguf"])
def test_a_file_that_was_replaced_between_its_header_and_the_store_is_not_read_by_that_header(tmp_path, name):
    given = DATA / name
    source = given.parent if given.is_file() else given
    for path in source.iterdir():
        if given.is_dir() or path == given:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    layout = build_layout(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(Path(layout.files[0]).read_bytes())
    os.replace(other, layout.files[0])
    with pytest.raises(CheckpointChanged, match="since its header was read"):
        fastcache.open(layout)
    trunk = Trunk(layout)
    with pytest.raises(CheckpointChanged, match="has changed since"):
        trunk[next(iter(trunk))]


def test_a_longer_prefix_is_found_and_two_of_them_are_not():
    trunk = Trunk(build_layout(DATA / "mixtral" / "bf16"))
    assert trunk.find("lm_head.weight") == "lm_head.weight"
    assert trunk.find("embed_tokens.weight") == "model.embed_tokens.weight"
    with pytest.raises(MissingTensor, match="no tensor 'nothing'"):
        trunk.find("nothing")
    with pytest.raises(MissingTensor, match=r"more than one tensor .*layers\.0.*layers\.1"):
        trunk.find("input_layernorm.weight")


def test_a_source_has_an_empty_trunk():
    with fastcache.open(fastcache.MemorySource({(0, 0): b"abc"})) as store:
        assert len(store.trunk) == 0 and store.trunk.nbytes == 0
        with pytest.raises(KeyError):
            store.trunk["lm_head.weight"]
