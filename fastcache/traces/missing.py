"""What a recording is without: records that were lost, and its end where the process died or the disk was full.

Knows END and GAP, nothing else. Imports traces (the Trace's block) and NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastcache.traces.trace import BLOCK, Array

GAP, END = 27, 29  # values of `kind`


def missing(run: Mapping[str, Any], records: Array) -> dict[str, Any]:
    """Return what to say of a recording in its `run`: {"complete": bool, "lost": records}; {} of any other trace.

    `complete` is false if records were lost or it does not end as recordings do. What says it already, because it was
    made from a recording, says it still.
    """
    if "complete" in run or not {"exact", "counters"} <= set(run):
        return {}
    if len(records) and records["kind"][-1] == END:
        lost = int(records["value"][-1])
        return {"complete": lost == 0, "lost": lost}
    lost = 0
    for start in range(0, len(records), BLOCK):
        block = records[start : start + BLOCK]
        lost += int(block["value"][block["kind"] == GAP].sum(dtype=np.int64))
    return {"complete": False, "lost": lost}
