"""GGUF files that were made with transformers' logits beside them: experts and blocks, streamed."""

import numpy as np
import pytest
from exact import ROLES, block, dequantised
from recorded import GGUF_FILES, RTOL, gguf_case, recorded

import fastcache
from fastcache.layout.build import build_layout
from fastcache.moe import load_block
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.floats import to_float32

files = pytest.mark.parametrize("name", GGUF_FILES)


def as_float32(lease, role):
    stored = lease[role] if role in list(lease) else lease[f"{role}.weight"]
    return blocks_to_float32(stored) if is_blocks(stored.dtype) else to_float32(stored)


@files
def test_experts_dequantise_to_the_packages_bits(name, engine):
    path = gguf_case(name)
    wanted, data = dequantised(path), recorded(path)
    with fastcache.open(path, engine=engine, budget="2 cycles") as store:
        assert store.family == {"llama": "mixtral", "qwen3moe": "qwen3_moe"}[name.partition("-")[0]]
        assert store.top_k == 2
        for layer in store.layers:
            for expert in store.experts(layer):
                lease = store[layer, expert]
                for role in ROLES:
                    ours, tensor = as_float32(lease, role), f"blk.{layer}.ffn_{role}_exps.weight"
                    assert ours.tobytes() == wanted[tensor][expert].tobytes()
                    ends = f"expert.{tensor}.ends"  # first and last row of the first and last expert
                    if ends in data and expert in (0, store.experts(layer)[-1]):
                        assert ours[[0, -1]].tobytes() == data[ends][0 if expert == 0 else 1].tobytes()


@files
def test_a_streamed_block_equals_the_dequantised_one(name):
    path = gguf_case(name)
    layout = build_layout(path)
    with fastcache.open(path, budget=0) as nothing, fastcache.open(path, budget="all") as everything:
        for layer in layout.layers:
            resident = load_block(layout, layer, experts="resident")
            x = np.random.default_rng(layer).standard_normal((12, resident.hidden), np.float32)
            chosen, wanted = block(x, dequantised(path), layer)
            got = resident(x)
            np.testing.assert_array_equal(np.sort(resident.route(x)[0]), np.sort(chosen))
            np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
            for store in (nothing, everything):
                assert load_block(layout, layer, experts=store)(x).tobytes() == got.tobytes()
