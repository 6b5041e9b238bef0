"""Measure how fast weights of every stored form are decoded, and multiplied by; write a receipt.

    OPENBLAS_NUM_THREADS=1 python bench/decoding.py [--shape OUT IN] [--rounds N] [--write NAME]

One row per form, on random bits: million weights per second of every round of two arms, forms interleaved:
decode (all of the weight into one block of 2 MiB after another), linear (fastcache.linear, one token).
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from machine import Script, Steal, facts, write_receipt

from fastcache.errors import UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.formats.scheme import Scheme, carrier
from fastcache.linear import BLOCK_BYTES, linear
from fastcache.quant.blocks import decoder_of, widen_blocks
from fastcache.quant.coded import coded_weight
from fastcache.quant.floats import widen


def ggml_types():
    """Names of the types of blocks that are decoded."""
    for name, block in ggml.blocks().items():
        with contextlib.suppress(UnsupportedCheckpoint):
            if block.elements > 1 and decoder_of(ggml.carrier(name)):
                yield name


def marked(codes, dtype, *scheme, **more):
    return codes.view(carrier(np.dtype(dtype), (Scheme(*scheme, **more),)))


def forms(n_out, n_in):
    """name -> arrays of a weight "up"."""
    rng = np.random.default_rng(0)

    def scales(*shape, dtype=np.float32):
        return (rng.random(shape) * 0.01 + 0.001).astype(dtype)

    def bits(*shape):
        return rng.integers(0, 256, shape, np.uint8)

    normal = rng.standard_normal((n_out, n_in), np.float32)
    wide = np.clip(normal * 100, -448, 448)
    e4m3, e5m2 = wide.astype(ml_dtypes.float8_e4m3fn), wide.astype(ml_dtypes.float8_e5m2)
    tiles = (-(-n_out // 128), -(-n_in // 128))
    nibbles, exponents = bits(n_out, n_in // 2), rng.integers(110, 130, (n_out, n_in // 32), np.uint8)
    words, shape = nibbles.view(np.int32), np.array([n_out, n_in])
    groups = scales(n_out, n_in // 32, dtype=ml_dtypes.bfloat16)
    zeros = bits(-(-n_out // 8), 4 * (n_in // 32)).view(np.int32)
    int4 = {"up.weight_scale": groups, "up.weight_shape": shape}
    found = {
        "bfloat16": {"up": normal.astype(ml_dtypes.bfloat16)},
        "float16": {"up": normal.astype(np.float16)},
        "E4M3, 128 x 128": {
            "up.weight": marked(e4m3, e4m3.dtype, (128, 128)),
            "up.weight_scale_inv": scales(*tiles),
        },
        "E4M3, by row": {"up.weight": e4m3, "up.weight_scale": scales(n_out, 1)},
        "E5M2, 128 x 128": {
            "up.weight": marked(e5m2, e5m2.dtype, (128, 128)),
            "up.weight_scale_inv": scales(*tiles),
        },
        "int8, by row": {"up.weight": bits(n_out, n_in).view(np.int8), "up.weight_scale": scales(n_out, 1)},
        "MXFP4, gpt-oss": {"up.blocks": nibbles.reshape(n_out, -1, 16), "up.scales": exponents},
        "MXFP4, packed": {"up.weight_packed": nibbles, "up.weight_scale": exponents},
        "NVFP4": {
            "up.weight_packed": nibbles,
            "up.weight_scale": scales(n_out, n_in // 16).astype(ml_dtypes.float8_e4m3fn),
            "up.weight_global_scale": np.ones(1, np.float32),
        },
        "int4, groups of 32": {"up.weight_packed": marked(words, np.int32, (1, 32), 4), **int4},
        "int4, groups of 32, zero points": {
            "up.weight_packed": marked(words, np.int32, (1, 32), 4, True),
            "up.weight_zero_point": zeros,
            **int4,
        },
        "int8 in words, groups of 32": {
            "up.weight_packed": marked(bits(n_out, n_in).view(np.int32), np.int32, (1, 32), 8),
            **int4,
        },
    }
    turned, grouped = bits(n_in // 8, 4 * n_out).view(np.int32), np.arange(n_in, dtype=np.int32) // 128
    qweight = {
        "up.qzeros": np.full((n_in // 128, n_out // 8), 0x77777777, np.int32),
        "up.scales": scales(n_in // 128, n_out, dtype=np.float16),
    }
    gptq = {"up.qweight": marked(turned, np.int32, (1, 128), 4, packing="gptq"), **qweight}
    found["GPTQ, groups of 128"] = {**gptq, "up.g_idx": grouped}
    found["GPTQ, groups of 128, act-order"] = {**gptq, "up.g_idx": rng.permutation(grouped)}
    awq = bits(n_in, n_out // 2).view(np.int32)
    found["AWQ, groups of 128"] = {"up.qweight": marked(awq, np.int32, (1, 128), 4, packing="awq"), **qweight}
    for name in ggml_types():
        block = ggml.blocks()[name]
        raw = bits(n_out, n_in // block.elements * block.nbytes) & 0xBB
        found[f"GGML {name}"] = {"up.weight": raw.view(ggml.carrier(name))}
    return found


def decoder(arrays):
    """Return what writes rows of the weight, as linear does."""
    if "up" in arrays:
        return lambda first, out: widen(arrays["up"][first : first + len(out)], out)
    if ggml.type_of(next(iter(arrays.values())).dtype):
        stored = arrays["up.weight"]
        how = decoder_of(stored.dtype)
        return lambda first, out: widen_blocks(how, stored[first : first + len(out)], out)
    return coded_weight(arrays, "up").fill


def main():
    parser = Script(__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(2048, 7168), metavar=("OUT", "IN"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", metavar="NAME", help="write bench/receipts/NAME.json; else print")
    args = parser.parse_args()
    n_out, n_in = args.shape
    step = max(1, BLOCK_BYTES // (4 * n_in))
    block = np.empty(max(step * n_in, BLOCK_BYTES // 4), np.float32)
    x = np.random.default_rng(1).standard_normal((1, n_in), np.float32)
    arms = {}
    for name, arrays in forms(n_out, n_in).items():
        fill = decoder(arrays)

        def decode(fill=fill):
            for first in range(0, n_out, step):
                n = min(step, n_out - first)
                fill(first, block[: n * n_in].reshape(n, n_in))

        def decode_tiles(arrays=arrays):
            turned = coded_weight(arrays, "up")
            for top, left, height, width in turned.tiles(BLOCK_BYTES):
                turned.fill(top, left, block[: height * width].reshape(height, width))

        if "up.qweight" in arrays:
            decode = decode_tiles
        arms[name] = {"decode": decode, "linear": lambda arrays=arrays: linear(x, arrays, "up")}
    rates = {name: {arm: [] for arm in each} for name, each in arms.items()}
    with Steal() as steal, np.errstate(all="ignore"):
        for _ in range(args.rounds):
            for name, each in arms.items():
                for arm, call in each.items():
                    start = time.perf_counter()
                    call()
                    rates[name][arm].append(round(n_out * n_in / (time.perf_counter() - start) / 1e6))
    receipt = {
        **facts(),
        "command": " ".join(["python", *sys.argv]),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "shape": list(args.shape),
        "steal": round(steal.share, 3),
        "median_million_weights_per_second": {
            name: {arm: int(np.median(values)) for arm, values in each.items()} for name, each in rates.items()
        },
        "million_weights_per_second": rates,
    }
    if args.write:
        write_receipt(Path(args.write).stem, receipt)
    else:
        print(json.dumps(receipt["median_million_weights_per_second"], indent=1))


if __name__ == "__main__":
    main()
