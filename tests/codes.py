"""Weights as codes with scales, made of random bits, and what they stand for by the formats' own formulas, in Python.

Nothing here uses what it tests: each number is put together from its sign, exponent and mantissa bits.
"""

import math

import ml_dtypes
import numpy as np

from fastcache.formats.scheme import Scheme, carrier


def minifloat(code, exponent_bits, mantissa_bits, *, finite):
    """The value of a small IEEE-like float; `finite` types have no infinity, and at most one NaN per sign."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if exponent == 2**exponent_bits - 1 and (not finite or (exponent_bits == 4 and mantissa == 2**mantissa_bits - 1)):
        return math.nan if finite or mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


E4M3 = np.array([minifloat(code, 4, 3, finite=True) for code in range(256)])
E5M2 = np.array([minifloat(code, 5, 2, finite=False) for code in range(256)])
E2M1 = np.array([minifloat(code, 2, 1, finite=True) for code in range(16)])


def spread(grid, shape, block):
    """One cell of a grid of scales per element of the weight, by asking each element whose it is."""
    rows = np.arange(shape[0])[:, np.newaxis] // block[0]
    columns = np.arange(shape[1])[np.newaxis] // block[1]
    return grid[rows, columns]


def product(values, scales):
    """Code times scale, both float32: rounded once."""
    with np.errstate(all="ignore"):
        return values.astype(np.float32) * scales.astype(np.float32)


def cells(shape, block):
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def random_scales(rng, shape, dtype=np.float32):
    return (rng.random(shape) * 0.02 + 0.001).astype(dtype)


def float8(rng, shape, block, kind="e4m3", scale_dtype=np.float32, suffix="weight_scale_inv"):
    """Block-scaled float8 as DeepSeek-V3 has it; the block is in the dtype, as a store's arrays have it."""
    table, dtype = (E4M3, ml_dtypes.float8_e4m3fn) if kind == "e4m3" else (E5M2, ml_dtypes.float8_e5m2)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[~np.isfinite(table)[codes]] = 1
    scale = random_scales(rng, cells(shape, block), scale_dtype)
    marked = codes.view(carrier(np.dtype(dtype), (Scheme(block),)))
    return {"up.weight": marked, f"up.{suffix}": scale}, product(table[codes], spread(scale, shape, block))


def pack_nibbles(codes):
    """Two to a byte, the first in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def mxfp4_blocks(rng, shape):
    """gpt-oss's: [out, in / 32, 16 bytes] and an exponent for each block of 32."""
    n_out, n_in = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    exponents = rng.integers(110, 135, (n_out, n_in // 32), np.uint8)
    blocks = pack_nibbles(codes).reshape(n_out, n_in // 32, 16)
    scales = spread(2.0 ** (exponents.astype(np.float64) - 127), shape, (1, 32))
    return {"up.blocks": blocks, "up.scales": exponents}, product(E2M1[codes], scales)


def mxfp4_packed(rng, shape):
    """compressed-tensors' mxfp4-pack-quantized, as Kimi K3 has it."""
    arrays, wanted = mxfp4_blocks(rng, shape)
    return {
        "up.weight_packed": arrays["up.blocks"].reshape(shape[0], -1),
        "up.weight_scale": arrays["up.scales"],
    }, wanted


def nvfp4(rng, shape):
    """compressed-tensors' nvfp4-pack-quantized: E4M3 scales of 16 elements, divided by one number."""
    codes = rng.integers(0, 16, shape, np.uint8)
    scale_codes = rng.integers(1, 0x7F, (shape[0], -(-shape[1] // 16)), np.uint8)
    divisor = np.float32(rng.random() * 500 + 1)
    scales = E4M3[scale_codes].astype(np.float32) / divisor
    arrays = {
        "up.weight_packed": pack_nibbles(codes),
        "up.weight_scale": scale_codes.view(ml_dtypes.float8_e4m3fn),
        "up.weight_global_scale": np.array([divisor]),
    }
    return arrays, product(E2M1[codes], spread(scales, shape, (1, 16)))


def nvfp4_of_modelopt(rng, shape):
    """The same codes under other names, and the scales of a tensor are multiplied by one number."""
    arrays, _ = nvfp4(rng, shape)
    codes = np.stack([arrays["up.weight_packed"] & 15, arrays["up.weight_packed"] >> 4], 2).reshape(shape)
    factor = np.float32(rng.random() * 0.01 + 0.0001)
    scales = E4M3[arrays["up.weight_scale"].view(np.uint8)].astype(np.float32) * factor
    named = {
        "up.weight": arrays["up.weight_packed"],
        "up.weight_scale": arrays["up.weight_scale"],
        "up.weight_scale_2": np.array(factor),
        "up.input_scale": np.array(0.5, np.float32),
    }
    return named, product(E2M1[codes], spread(scales, shape, (1, 16)))


def pack_words(integers, bits):
    """Rows of integers from -2**(bits - 1) as words of 32 bits, the first in the lowest bits, the last padded."""
    per_word = 32 // bits
    rows = []
    for row in integers.tolist():
        words = []
        for first in range(0, len(row), per_word):
            word = 0
            for place, value in enumerate(row[first : first + per_word]):
                word |= (value + 2 ** (bits - 1)) << (bits * place)
            words.append(word)
        rows.append(words)
    return np.array(rows, np.uint32).view(np.int32).reshape(len(integers), -1)


def packed_integers(rng, shape, group, bits=4, symmetric=True, scale_dtype=ml_dtypes.bfloat16):
    """compressed-tensors' pack-quantized, as Kimi K2 Thinking has it (4 bits, groups of 32, bfloat16 scales)."""
    low = -(2 ** (bits - 1))
    integers = rng.integers(low, -low, shape)
    scale = random_scales(rng, cells(shape, (1, group)), scale_dtype)
    scheme = Scheme((1, group), bits, asymmetric=not symmetric)
    arrays = {
        "up.weight_packed": pack_words(integers, bits).view(carrier(np.dtype(np.int32), (scheme,))),
        "up.weight_scale": scale,
        "up.weight_shape": np.array(shape, np.int64),
    }
    if symmetric:
        return arrays, product(integers, spread(scale, shape, (1, group)))
    zeros = rng.integers(low, -low, scale.shape)
    arrays["up.weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits).T)
    return arrays, product(integers - spread(zeros, shape, (1, group)), spread(scale, shape, (1, group)))


def int8(rng, shape, block):
    """compressed-tensors' int-quantized."""
    integers = rng.integers(-128, 128, shape).astype(np.int8)
    scale = random_scales(rng, cells(shape, block), np.float16)
    marked = integers.view(carrier(np.dtype(np.int8), (Scheme(block, 8),)))
    return {"up.weight": marked, "up.weight_scale": scale}, product(integers, spread(scale, shape, block))


#: name -> make(rng, n_out, n_in): any sizes, rounded up where the format asks for it
FORMS = {
    "float8 16 x 16": lambda rng, n, m: float8(rng, (n, m), (16, 16)),
    "float8 128 x 128": lambda rng, n, m: float8(rng, (n, m), (128, 128)),
    "float8 e5m2 5 x 7": lambda rng, n, m: float8(rng, (n, m), (5, 7), "e5m2"),
    "float8 by groups": lambda rng, n, m: float8(rng, (n, m), (1, 12), scale_dtype=ml_dtypes.bfloat16),
    "float8 by row": lambda rng, n, m: float8(rng, (n, m), (1, m), suffix="weight_scale"),
    "float8 one scale": lambda rng, n, m: float8(rng, (n, m), (n, m), scale_dtype=np.float16, suffix="weight_scale"),
    "MXFP4 of gpt-oss": lambda rng, n, m: mxfp4_blocks(rng, (n, -(-m // 32) * 32)),
    "MXFP4 packed": lambda rng, n, m: mxfp4_packed(rng, (n, -(-m // 32) * 32)),
    "NVFP4": lambda rng, n, m: nvfp4(rng, (n, -(-m // 2) * 2)),
    "NVFP4 of ModelOpt": lambda rng, n, m: nvfp4_of_modelopt(rng, (n, -(-m // 2) * 2)),
    "int4": lambda rng, n, m: packed_integers(rng, (n, m), 32),
    "int4 with zero points": lambda rng, n, m: packed_integers(rng, (n, m), 12, symmetric=False),
    "int8 packed": lambda rng, n, m: packed_integers(rng, (n, m), 20, 8),
    "int8 packed with zero points": lambda rng, n, m: packed_integers(rng, (n, m), 32, 8, False, np.float32),
    "int8 by row": lambda rng, n, m: int8(rng, (n, m), (1, m)),
}
