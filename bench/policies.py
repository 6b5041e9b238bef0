"""Every policy, and Belady's, on routing traces and on made traffic: a receipt.

    python bench/policies.py TRACE [TRACE ...]

Hit rates in percent of the distinct experts of each batch, at shares of the pool. Each trace is read and replayed in a
process of its own; seconds and peak memory are of that process, import and reading included. `closed` is the part of
the way from `lru` to `belady` that `next_use` goes, averaged over the sizes where there is a way. Of made traffic
(traffic.py) means of three seeds; `ahead` is `next_use` over the best of the others at that size.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FRACTIONS = ("0.03", "0.05", "0.1", "0.15", "0.2")
SEEDS = (1, 2, 3)


def one(path: str) -> dict[str, Any]:
    """Replay one trace, here."""
    start = time.perf_counter()
    from fastcache import traces
    from fastcache.traces import capacity
    from fastcache.traces.replay import BELADY, policies, replay

    trace = traces.read(path)
    rows = replay(trace, [*policies(), BELADY[0]], [capacity.of_fraction(trace, share) for share in FRACTIONS])
    percent: dict[str, dict[str, float]] = {}
    for row in rows:
        told = row.to_dict()
        percent.setdefault(told["policy"], {})[f"{told['fraction']:.0%}"] = round(100 * told["hit_rate"], 2)
    way = {size: percent["belady"][size] - percent["lru"][size] for size in percent["lru"]}
    closed = [(percent["next_use"][size] - percent["lru"][size]) / way[size] for size in way if way[size] > 0]
    others = [name for name in policies() if name != "next_use"]
    return {
        "requests": trace.requests,
        "pool": trace.pool,
        "percent": percent,
        "closed": round(sum(closed) / len(closed), 3) if closed else None,
        "next_use_is_first": all(percent["next_use"][s] >= max(percent[name][s] for name in others) for s in way),
        "seconds": round(time.perf_counter() - start, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def made() -> dict[str, Any]:
    """Replay every kind of made traffic, here."""
    from traffic import KINDS

    from fastcache.traces import capacity
    from fastcache.traces.replay import policies, replay

    found: dict[str, Any] = {}
    for kind, make in KINDS.items():
        rates: dict[str, dict[str, float]] = {name: dict.fromkeys((*FRACTIONS, "0.4"), 0.0) for name in policies()}
        for seed in SEEDS:
            trace = make(seed)
            for share in (*FRACTIONS, "0.4"):
                for row in replay(trace, policies(), [capacity.of_fraction(trace, share)]):
                    rates[row.policy][share] += 100 * row.hit_rate / len(SEEDS)
        best = {share: max(rates[name][share] for name in rates if name != "next_use") for share in rates["lru"]}
        found[kind] = {
            "percent": {name: {share: round(rate, 2) for share, rate in row.items()} for name, row in rates.items()},
            "ahead": {share: round(rates["next_use"][share] - best[share], 2) for share in best},
        }
        print(kind, found[kind]["ahead"])
    return found


def main() -> None:
    from machine import Script, facts, write_receipt

    parser = Script(__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    found = {}
    for path in parser.parse_args().traces:
        done = subprocess.run([sys.executable, __file__, "--one", path], capture_output=True, text=True, check=True)
        found[Path(path).name] = json.loads(done.stdout)
        print(Path(path).name, json.dumps(found[Path(path).name]))
    print(write_receipt("policies", {"what": __doc__, **facts(), "traces": found, "made": made()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2])))
    else:
        main()
