"""A miss-ratio curve as a picture. Needs matplotlib, the extra [plot]; imports errors and traces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastcache.errors import FeatureUnavailable
from fastcache.traces.mrc import Mrc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1 << 30


def check_picture(path: str | os.PathLike[str]) -> type[Figure]:
    """Return matplotlib's Figure if it is here and writes such files.

    Raises
    ------
    FeatureUnavailable
        There is no matplotlib.
    ValueError
        matplotlib does not write such files.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FeatureUnavailable(
            f"a picture needs matplotlib ({error}): pip install 'fastcache-moe[plot]', or write JSON"
        ) from error
    suffix = os.path.splitext(path)[1].removeprefix(".").lower()
    known = sorted(Figure().canvas.get_supported_filetypes())
    if suffix not in known:
        raise ValueError(f"{os.fspath(path)}: matplotlib writes no .{suffix}: end it in one of .{', .'.join(known)}")
    return Figure


def plot(curves: Mrc, path: str | os.PathLike[str]) -> None:
    """Write the picture as the path's suffix says: .png, .svg, or what else matplotlib writes.

    Raises
    ------
    FeatureUnavailable, ValueError
        As `check_picture`.
    """
    figure = check_picture(path)(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot()
    for name, curve in curves.curves.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if name.startswith("belady") else {}
        axes.plot(curve.experts, 100 * curve.miss_ratio, label=name, **style)
    axes.axhline(100 * curves.floor, color="grey", linestyle=":", label="compulsory floor")
    if curves.cycle:
        axes.axvline(curves.cycle, color="tab:brown", linestyle=":", label="token cycle")
    if curves.knee:
        axes.axvline(curves.knee, color="tab:olive", linestyle=":", label="knee")
    axes.set_xlabel(f"experts in the cache, of {curves.trace.pool}")
    axes.set_ylabel("misses, % of requests")
    axes.set_ylim(0, 102)
    axes.set_title(f"{curves.trace.name}: {curves.trace.requests} requests for {curves.distinct} experts")
    if size := curves.expert_bytes:
        above = axes.secondary_xaxis("top", functions=(lambda n: n * size / GIB, lambda g: g * GIB / size))
        above.set_xlabel("GiB")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
