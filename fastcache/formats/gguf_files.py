"""A path -> the GGUF files of one model: a file, or the parts of a split, found and held to each other.

A split is what its metadata says: split.no, split.count, split.tensors.count. Names (`x-00001-of-00003.gguf`) only tell
where to look first. Imports formats.gguf, formats.header and errors.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence

from fastcache.errors import CheckpointError, CheckpointIndexError, MissingShard, MissingTensor, UnsupportedCheckpoint
from fastcache.formats.gguf import read_header
from fastcache.formats.header import Header

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
# Files beside a model that are none: its eyes and ears, adapters, importance matrices.
_NO_MODEL = frozenset({"mmproj", "adapter", "imatrix", "controlvector", "vocab"})


def gguf_names(root: str) -> list[str]:
    """Return the paths of the GGUF files in a directory, sorted, without hidden ones."""
    names = sorted(name for name in os.listdir(root) if name.endswith(".gguf") and not name.startswith("."))
    return [path for path in (os.path.join(root, name) for name in names) if os.path.isfile(path)]


def open_gguf(path: str) -> tuple[Header, ...]:
    """Return the headers behind the file `path`: its own, or those of all parts of its split, in order.

    Raises
    ------
    MissingShard
        A part is not there; the message names it.
    MissingTensor
        The parts hold fewer tensors than split.tensors.count says.
    CheckpointIndexError
        Parts that contradict each other, or more than one that could be meant.
    CheckpointError
        See `formats.gguf.read_header`.
    """
    header = read_header(path)
    count = _split(header, "split.count", 1)
    return (header,) if count <= 1 else _checked(_parts(header, count), count)


def open_gguf_directory(root: str, paths: Sequence[str]) -> tuple[tuple[Header, ...], tuple[str, ...]]:
    """Return the headers of the one model among the GGUF files of a directory, and the files that are not of it."""
    headers = [read_header(path) for path in paths]
    models: dict[tuple[str, int], list[Header]] = defaultdict(list)
    for header in headers:
        if header.metadata.get("general.type") in _NO_MODEL or header.metadata.get("general.architecture") == "clip":
            continue
        count = _split(header, "split.count", 1)
        match = _PART.fullmatch(os.path.basename(header.path))
        stem = "" if count > 1 else header.path
        models[match[1] if match and count > 1 else stem, count].append(header)
    if not models:
        raise UnsupportedCheckpoint(f"{root}: no GGUF file in this directory is a model: {_some(paths)}")
    if len(models) > 1:
        first = [min(each, key=lambda header: header.path).path for each in models.values()]
        raise CheckpointError(f"{root}: {len(models)} models in this directory, open one by its path: {_some(first)}")
    ((_, count), found) = next(iter(models.items()))
    parts = found if count <= 1 else list(_checked(_by_number(root, found, count), count))
    used = {header.path for header in parts}
    return tuple(parts), tuple(path for path in paths if path not in used)


def _parts(header: Header, count: int) -> list[Header]:
    """Find the parts of a split of which `header` is one: by their names, or else among all files beside it."""
    root, base = os.path.split(header.path)
    match = _PART.fullmatch(base)
    if match is not None and int(match[3]) == count:
        paths = [os.path.join(root, f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
        missing = [path for path in paths if not os.path.isfile(path)]
        if missing:
            raise MissingShard(
                f"{header.path}: {len(missing)} of its {count} parts are missing: {_some(missing)}; download the rest"
            )
        return [header if path == header.path else read_header(path) for path in paths]
    beside = [header if path == header.path else read_header(path) for path in gguf_names(root)]
    return _by_number(root, [each for each in beside if _split(each, "split.count", 1) == count], count)


def _by_number(root: str, headers: Sequence[Header], count: int) -> list[Header]:
    found: dict[int, Header] = {}
    for header in headers:
        other = found.setdefault(_split(header, "split.no", 0), header)
        if other is not header:
            raise CheckpointIndexError(
                f"{root}: {os.path.basename(other.path)} and {os.path.basename(header.path)} both say that they are "
                f"part {_split(header, 'split.no', 0) + 1} of {count}; open one split by its path, named as "
                f"x-00001-of-{count:05d}.gguf"
            )
    missing = [str(number + 1) for number in range(count) if number not in found]
    if missing:
        raise MissingShard(
            f"{root}: part {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''} of the {count} parts of "
            f"{os.path.basename(headers[0].path)} is missing; download the rest"
        )
    return [found[number] for number in sorted(found)]  # a part too many is found out by whoever checks them


def _checked(parts: Sequence[Header], count: int) -> tuple[Header, ...]:
    """Hold the parts to their own metadata."""
    for number, header in enumerate(parts):
        own = (_split(header, "split.no", 0), _split(header, "split.count", 1))
        if own != (number, count) or len(parts) != count:
            raise CheckpointIndexError(
                f"{header.path}: its metadata says part {own[0] + 1} of {own[1]}, and it stands for part {number + 1} "
                f"of {count}"
            )
    total = sum(len(header) for header in parts)
    wanted = _split(parts[0], "split.tensors.count", total)
    if total != wanted:
        raise (MissingTensor if total < wanted else CheckpointIndexError)(
            f"{parts[0].path}: split.tensors.count is {wanted}, and its {count} parts hold {total}; download them again"
        )
    return tuple(parts)


def _split(header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointIndexError(f"{header.path}: {key} is {value!r}, not a number")
    return value


def _some(paths: Sequence[str]) -> str:
    names = [os.path.basename(path) for path in paths]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
