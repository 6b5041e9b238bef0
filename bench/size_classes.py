"""Experts of two sizes in one budget: slabs that classes trade against shares for good. A receipt.

    python bench/size_classes.py

By the simulator, which runs the store's own table, policies and trades. The model: 24 layers of 128 experts, half of
the layers with down in Q6_K, half in Q4_K (as Q4_K_M has them), top_k 8. `alike`: every layer draws from its own Zipf
distribution. `skew moves`: first the layers of one size draw from few experts and those of the other from many, then
the other way round. `layers stop`: first only the layers of one size are asked, then only those of the other.
`alternating`: the same, but changing every 8 tokens. Per arm: hits in percent, of all and of the last quarter; bytes
missed per token; payload resident at the end as a share of the budget; trades, and what they evicted as a share of
misses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from machine import Script, facts, write_receipt

from fastcache.slabs import plan_slabs
from fastcache_ext.simulate import Simulator

LAYERS, EXPERTS, TOP_K, TOKENS = 24, 128, 8, 600
WEIGHTS = 2048 * 768  # of one matrix
SIZES = (WEIGHTS // 256 * (144 + 144 + 210), WEIGHTS // 256 * (144 * 3))  # bytes of an expert, larger first
PAGE = 4096
SLOTS = [(size + 2 * PAGE - 1) // PAGE * PAGE + PAGE for size in SIZES]  # with the window of direct reads
KIND = np.arange(LAYERS) % 2  # size class of each layer
BUDGETS = {"3 cycles": 3, "10 % of experts": 0.10, "25 % of experts": 0.25, "50 % of experts": 0.5}
POLICIES = ("next_use", "lru", "lfu", "s3fifo", "sieve")


def draws(rng: np.random.Generator, exponent: float) -> Any:
    """Return a function that draws top_k distinct experts, with chances of Zipf's law in an order of its own."""
    weight = np.log(1.0 / np.arange(1, EXPERTS + 1) ** exponent)[rng.permutation(EXPERTS)]
    return lambda: np.argpartition(-(weight + rng.gumbel(size=EXPERTS)), TOP_K)[:TOP_K]


def traffic(kind: str) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    """Return (keys of each batch, the token of each batch)."""
    rng = np.random.default_rng(4)
    flat, steep = ([draws(rng, exponent) for _ in range(LAYERS)] for exponent in (0.2, 1.6))
    alike = [draws(rng, 0.8) for _ in range(LAYERS)]
    batches, tokens = [], []
    for token in range(TOKENS):
        late = int(token >= TOKENS // 2)
        for layer in range(LAYERS):
            mine = KIND[layer] == late
            draw = alike[layer]
            if kind == "skew moves":
                draw = flat[layer] if mine else steep[layer]
            elif (kind == "layers stop" and not mine) or (kind == "alternating" and KIND[layer] != token // 8 % 2):
                continue
            batches.append(np.sort(draw()) + layer * EXPERTS)
            tokens.append(token)
    return batches, tokens


def arm(batches: list[Any], tokens: list[int], budget: int, policy: str, trading: bool) -> dict[str, Any]:
    """Serve the traffic with one policy and one plan."""
    cls = np.repeat(KIND, EXPERTS).astype(np.uint8)
    nbytes = np.asarray(SIZES, np.int64)[cls]
    counts = np.bincount(cls, minlength=2).tolist()
    plan = plan_slabs(budget, SLOTS, counts, TOP_K)
    first = np.arange(0, LAYERS * EXPERTS + 1, EXPERTS, dtype=np.int32)
    slots, slabs = (plan.slots, plan.plan()) if trading else (plan.begins_with, None)
    sim = Simulator(first, cls, nbytes, slots, policy, slabs)
    cut = next(i for i, token in enumerate(tokens) if token >= TOKENS * 3 // 4)
    hits = 0
    for a, b in ((0, cut), (cut, len(batches))):
        hits = sim.hits
        sim.run(np.concatenate(batches[a:b]).astype(np.int32), np.full(b - a, TOP_K, np.int64))
    assert sim.check() == 0
    held, trades, gone = sim.trading()
    asked = len(batches) * TOP_K
    return {
        "hits": round(100 * sim.hits / asked, 2),
        "hits_at_end": round(100 * (sim.hits - hits) / ((len(batches) - cut) * TOP_K), 2),
        "mib_per_token": round(sim.bytes_missed / len(set(tokens)) / (1 << 20), 1),
        "resident": round(sim.bytes_resident() / budget, 4),
        "slots": held,
        "pass_throughs": sim.pass_throughs,
        "trades": trades,
        "traded_out_per_miss": round(gone / max(sim.misses, 1), 4),
    }


def main() -> None:
    Script(__doc__).parse_args()
    whole = sum(SLOTS) * LAYERS // 2 * EXPERTS
    cycle = sum(SLOTS) * LAYERS // 2 * TOP_K
    found: dict[str, Any] = {}
    for kind in ("alike", "skew moves", "layers stop", "alternating"):
        batches, tokens = traffic(kind)
        for words, size in BUDGETS.items():
            budget = int(size * (cycle if "cycle" in words else whole))
            for policy in POLICIES:
                arms = {name: arm(batches, tokens, budget, policy, name == "trading") for name in ("shares", "trading")}
                found.setdefault(kind, {}).setdefault(words, {})[policy] = arms
                a, b = arms["shares"], arms["trading"]
                print(
                    f"{kind:12} {words:16} {policy:9} hits {a['hits']:6.2f} {b['hits']:6.2f}  at end "
                    f"{a['hits_at_end']:6.2f} {b['hits_at_end']:6.2f}  resident {a['resident']:.3f} {b['resident']:.3f}"
                    f"  trades {b['trades']:5} ({b['traded_out_per_miss']:.3f} a miss)  slots {b['slots']}"
                )
    print(write_receipt("size_classes", {"what": __doc__, **facts(), "traffic": found}))


if __name__ == "__main__":
    main()
