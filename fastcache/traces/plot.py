"""A miss-ratio curve as a picture. Needs matplotlib, the extra [plot]; imports errors, outputs, traces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastcache.errors import FeatureUnavailable
from fastcache.outputs import whole_file
from fastcache.traces.mrc import Mrc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1 << 30
_HEADS: dict[str, tuple[bytes, ...]] = {
    "png": (b"\x89PNG",),
    "svg": (b"<?xml", b"<svg"),
    "pdf": (b"%PDF",),
    "ps": (b"%!PS",),
    "eps": (b"%!PS",),
    "jpg": (b"\xff\xd8\xff",),
    "jpeg": (b"\xff\xd8\xff",),
    "webp": (b"RIFF",),
    "tif": (b"II*\0", b"MM\0*"),
    "tiff": (b"II*\0", b"MM\0*"),
}


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
    suffix = _suffix(path)
    known = sorted(Figure().canvas.get_supported_filetypes())
    if suffix not in known:
        raise ValueError(f"{os.fspath(path)}: matplotlib writes no .{suffix}: end it in one of .{', .'.join(known)}")
    return Figure


def plot(curves: Mrc, path: str | os.PathLike[str]) -> None:
    """Write the picture as the path's suffix says, whole or not at all: .png, .svg, or what else matplotlib writes.

    Raises
    ------
    FeatureUnavailable, ValueError
        As `check_picture`.
    OSError
        It cannot be written.
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
    with whole_file(path) as file:
        figure.savefig(file, dpi=150, format=_suffix(path))


def is_picture(path: str | os.PathLike[str], head: bytes) -> bool:
    """Whether a file that begins so is a picture of the kind that the path's suffix says."""
    return head.startswith(_HEADS.get(_suffix(path), ()))


def _suffix(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(path)[1].removeprefix(".").lower()
