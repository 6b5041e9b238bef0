"""Measure `fastcache.linear` beside what NumPy does by itself, and print a receipt as JSON.

    OPENBLAS_NUM_THREADS=1 python bench/linear_bench.py [--shape OUT IN] [--tokens T ...] [--rounds N]

One row per dtype, layout of W and number of tokens; milliseconds of every round of every arm, arms interleaved:
linear (the shipped path), convert (astype float32 of all of W, then the product), numpy (x @ W.T as stored).
"""

import json
import time

import ml_dtypes
import numpy as np
from machine import Script, Steal, facts

from fastcache.linear import BLOCK_BYTES, linear


def layouts(w):
    fused = np.zeros((w.shape[1], 2 * w.shape[0]), w.dtype)
    fused[:, ::2] = w.T
    return {"contiguous": w, "transposed": np.ascontiguousarray(w.T).T, "interleaved": fused[:, ::2].T}


def main():
    parser = Script(__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(2880, 2880), metavar=("OUT", "IN"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    base = rng.standard_normal(args.shape, dtype=np.float32) * np.float32(0.03)
    rows = []
    with Steal() as steal:
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            for layout, w in layouts(base.astype(dtype)).items():
                for tokens in args.tokens:
                    x = rng.standard_normal((tokens, args.shape[1]), dtype=np.float32)
                    arms = {
                        "linear": lambda w=w, x=x: linear(x, {"w": w}, "w"),
                        "convert": lambda w=w, x=x: x @ w.astype(np.float32).T,
                        "numpy": lambda w=w, x=x: x @ w.T,
                    }
                    times = {name: [] for name in arms}
                    for _ in range(args.rounds):
                        for name, arm in arms.items():
                            if name == "numpy" and (dtype != np.float32 and len(times[name]) >= 2):
                                continue  # slow enough for two to tell
                            start = time.perf_counter()
                            arm()
                            times[name].append(round(1e3 * (time.perf_counter() - start), 3))
                    best = {name: min(each) for name, each in times.items()}
                    rows.append(
                        {
                            "dtype": np.dtype(dtype).name,
                            "layout": layout,
                            "tokens": tokens,
                            "best_ms": best,
                            "linear_elements_per_ns": round(base.size / best["linear"] / 1e6, 2),
                            "ms": times,
                        }
                    )
    receipt = {
        **facts(),
        "ml_dtypes": ml_dtypes.__version__,
        "block_bytes": BLOCK_BYTES,
        "shape": list(args.shape),
        "steal": round(steal.share, 3),
        "rows": rows,
    }
    print(json.dumps(receipt, indent=1))


if __name__ == "__main__":
    main()
