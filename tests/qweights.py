"""GPTQ's and AWQ's tensors of integers that are given, one at a time, and the weight that they stand for in float64.

Nothing here uses what it tests, nor its way: each integer is put into its word by a loop over Python's own.
"""

import numpy as np

from fastcache.formats.scheme import Scheme, carrier

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each field of a word, the lowest bits first


def word_of(fields, bits):
    word = 0
    for place, field in enumerate(fields):
        assert 0 <= field < 2**bits
        word += field * 2 ** (bits * place)
    return word


def int32(rows):
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in rows]
    return np.array(signed, np.int32).reshape(len(rows), -1)


def packed_down(codes, bits):
    """[in, out] -> [in * bits / 32, out]: a word holds inputs of one output, the first in the lowest bits."""
    per = 32 // bits
    n_in, n_out = codes.shape
    return int32(
        [
            [word_of([int(codes[top + i, column]) for i in range(per)], bits) for column in range(n_out)]
            for top in range(0, n_in, per)
        ]
    )


def packed_across(codes, bits, order=None):
    """[rows, out] -> [rows, out * bits / 32]: a word holds outputs of one row, in `order`."""
    per = 32 // bits
    order = range(per) if order is None else order
    return int32(
        [[word_of([int(row[left + i]) for i in order], bits) for left in range(0, len(row), per)] for row in codes]
    )


def borrowed(zeros, bits):
    """Zero points as whole words, each less a word of ones: what GPTQModel stores."""
    ones = word_of([1] * (32 // bits), bits)
    return int32([[(int(word) - ones) % 2**32 for word in row] for row in packed_across(zeros, bits)])


def weight_of(codes, zeros, scales, groups):
    """[out, in] float64, element by element of the formula."""
    n_in, n_out = codes.shape
    weight = np.empty((n_out, n_in))
    for i in range(n_in):
        for o in range(n_out):
            weight[o, i] = (int(codes[i, o]) - int(zeros[groups[i], o])) * float(scales[groups[i], o])
    return weight


def marked(words, *scheme, **more):
    return words.view(carrier(np.dtype(np.int32), (Scheme(*scheme, **more),)))


def random_parts(rng, n_out, n_in, size, bits, dtype=np.float16, symmetric=False):
    """codes [in, out], zeros and scales [groups, out]."""
    groups = -(-n_in // size)
    codes = rng.integers(0, 2**bits, (n_in, n_out))
    zeros = rng.integers(1, 2**bits, (groups, n_out))
    if symmetric:
        zeros[...] = 2 ** (bits - 1)
    return codes, zeros, (rng.random((groups, n_out)) * 0.02 + 0.001).astype(dtype)


def gptq(rng, n_out, n_in, size=16, bits=4, packing="gptq", order="in order", **parts):
    """Return arrays "up...." and the weight; n_in and n_out multiples of 32 / bits.

    order: "in order" with a g_idx that says so, "none", "shuffled" as act-order leaves it, or "unset", all zeros.
    """
    codes, zeros, scales = random_parts(rng, n_out, n_in, size, bits, **parts)
    groups = np.array([i // size for i in range(n_in)])
    if order == "shuffled":
        groups = rng.permutation(groups)
    stored = zeros - 1 if packing == "gptq" else zeros
    arrays = {
        "up.qweight": marked(
            packed_down(codes, bits),
            (1, size),
            bits,
            packing=packing,
            ordered=order == "shuffled",
            asymmetric=not parts.get("symmetric", False),
        ),
        "up.qzeros": packed_across(stored, bits),
        "up.scales": scales,
        "up.g_idx": (groups if order != "unset" else np.zeros(n_in)).astype(np.int32),
    }
    if order == "none":
        del arrays["up.g_idx"]
    return arrays, weight_of(codes, zeros, scales, groups)


def awq(rng, n_out, n_in, size=16, **parts):
    """The same of AWQ; n_out is a multiple of 8."""
    codes, zeros, scales = random_parts(rng, n_out, n_in, size, 4, **parts)
    arrays = {
        "up.qweight": marked(packed_across(codes, 4, AWQ_ORDER), (1, size), 4, packing="awq"),
        "up.qzeros": packed_across(zeros, 4, AWQ_ORDER),
        "up.scales": scales,
    }
    return arrays, weight_of(codes, zeros, scales, [i // size for i in range(n_in)])


def up_to(n, step):
    return -(-n // step) * step


#: name -> make(rng, n_out, n_in): any sizes, rounded up to whole words
FORMS = {
    "GPTQ": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8)),
    "GPTQ of format 2": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8), 12, packing="gptq_v2"),
    "GPTQ in act-order": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8), order="shuffled"),
    "GPTQ without g_idx": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8), 20, order="none"),
    "GPTQ with an unset g_idx": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8), order="unset"),
    "GPTQ in one group": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8), up_to(m, 8)),
    "GPTQ symmetric": lambda rng, n, m: gptq(rng, up_to(n, 8), up_to(m, 8), symmetric=True),
    "GPTQ of 8 bits": lambda rng, n, m: gptq(rng, up_to(n, 4), up_to(m, 4), bits=8, dtype=np.float32),
    "GPTQ of 8 bits, format 2": lambda rng, n, m: gptq(
        rng, up_to(n, 4), up_to(m, 4), 8, 8, packing="gptq_v2", order="shuffled"
    ),
    "GPTQ of 2 bits": lambda rng, n, m: gptq(rng, up_to(n, 16), up_to(m, 16), 32, 2, symmetric=True),
    "AWQ": lambda rng, n, m: awq(rng, up_to(n, 8), m),
    "AWQ in one group": lambda rng, n, m: awq(rng, up_to(n, 8), m, m),
}
