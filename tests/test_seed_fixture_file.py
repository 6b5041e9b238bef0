"""fixture: the seed's shard to the byte, and demo checkpoints that the reference reader takes."""

import errno
import hashlib
import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from fastcache import fixture
from fastcache.fixture import DemoShape, demo_shape, write_demo_checkpoint, write_seed_shard

TINY = DemoShape(layers=3, experts=5, hidden=64, intermediate=16, top_k=2)
EXPERTS = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


def test_the_seed_shard_is_the_seeds_to_the_byte(tmp_path):
    path = write_seed_shard(tmp_path / "new")
    data = path.read_bytes()
    assert path.name == "model-00001-of-00001.safetensors"
    assert len(data) == 59_776
    assert hashlib.sha256(data).hexdigest() == "5f2a99cabe69e53459822c4703b525575fa826cfcf9ba3b543494d19ae00f50a"
    start = fixture.SEED_DATA_START + 20 * fixture.SEED_EXPERT_NBYTES
    assert start == 53_248
    assert data[start : start + fixture.SEED_EXPERT_NBYTES] == fixture.seed_expert(20)


def test_the_reference_reader_reads_the_seed_shard(tmp_path):
    with safe_open(write_seed_shard(tmp_path), "np") as file:
        name = "language_model.model.layers.0.block_sparse_moe.experts.7.w3.weight_scale"
        assert np.array_equal(file.get_tensor(name), fixture.seed_tensor(7, 2, packed=False))
        assert len(file.keys()) == 24 * 6


def test_the_reference_reader_reads_a_demo_checkpoint(tmp_path):
    seen = []
    assert write_demo_checkpoint(tmp_path, shape=TINY, progress=lambda *at: seen.append(at)) == TINY
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 4
    blocks = set()
    stored = 0
    for path in files:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                assert index["weight_map"].pop(name) == path.name
                tensor = file.get_tensor(name).astype(np.float32)
                stored += tensor.size * 2
                blocks.add(tensor.tobytes())
                assert file.get_tensor(name).dtype == ml_dtypes.bfloat16
                assert np.isfinite(tensor).all()
                assert 0.3 < tensor.std() * TINY.hidden**0.5 < 3
                shape = {"gate": (5, 64), "gate_proj": (16, 64), "up_proj": (16, 64), "down_proj": (64, 16)}
                assert tensor.shape == shape[name.split(".")[-2]]
    assert not index["weight_map"]
    assert len(blocks) == TINY.layers * (TINY.experts * 3 + 1), "all tensors differ"
    assert stored == TINY.nbytes == index["metadata"]["total_size"]
    assert seen == sorted(seen)
    assert seen[-1] == (TINY.nbytes, TINY.nbytes)


def test_an_expert_of_a_demo_checkpoint_is_one_run_of_bytes(tmp_path):
    write_demo_checkpoint(tmp_path, shape=TINY, shards=2)
    for path in tmp_path.glob("*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for layer in range(TINY.layers):
            for expert in range(TINY.experts):
                names = [EXPERTS.format(layer, expert, role) for role in ("gate", "up", "down")]
                at = [header[name]["data_offsets"] for name in names if name in header]
                assert len(at) in (0, 3)
                assert all(left[1] == right[0] for left, right in itertools.pairwise(at))


def test_the_same_arguments_write_the_same_bytes_and_another_seed_does_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_demo_checkpoint(tmp_path / name, shape=TINY, shards=1, seed=seed)
    a, b, c = (next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("size", ["80M", "256M", "1G", "10G", "200G"])
def test_a_demo_shape_is_about_the_size_asked_for(size):
    wanted = int(size[:-1]) << {"M": 20, "G": 30}[size[-1]]
    shape = demo_shape(wanted)
    assert abs(shape.nbytes - wanted) <= max(0.1 * wanted, shape.layers * shape.expert_nbytes)
    assert shape.top_k <= shape.experts <= 128
    assert shape.expert_nbytes == 9 << 20


def test_a_size_below_one_layer_is_refused_with_the_least(tmp_path):
    with pytest.raises(ValueError, match="at least 73 MiB"):
        write_demo_checkpoint(tmp_path, 10 << 20)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match="do not fit") as caught:
        write_demo_checkpoint(tmp_path / "d", 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert not [*(tmp_path / "d").iterdir()]
