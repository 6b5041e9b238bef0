"""A path -> the files of a checkpoint behind it, their headers, and what they say of the model. Cost: headers only.

Owns finding files and holding an index to its shards. Knows no expert. Imports the readers of formats, and errors.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastcache.errors import (
    CheckpointError,
    CheckpointIndexError,
    CheckpointNotFound,
    MissingShard,
    MissingTensor,
    UnsupportedCheckpoint,
    WrongShard,
)
from fastcache.formats._columns import PADDING, read_padded
from fastcache.formats._index_json import scan_index
from fastcache.formats.gguf_files import gguf_names, open_gguf, open_gguf_directory
from fastcache.formats.header import Header
from fastcache.formats.safetensors import read_header

INDEX_NAME = "model.safetensors.index.json"
# What AutoGPTQ and AutoAWQ wrote before config.json had it: file -> quant_method.
_QUANTIZE_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_MODELOPT_CONFIG = "hf_quant_config.json"  # of ModelOpt: older exports have it alone

_OTHER_FORMATS = {
    ".bin": "PyTorch pickles, which are never read; convert them to safetensors",
    ".pth": "PyTorch pickles, which are never read; convert them to safetensors",
    ".pt": "PyTorch pickles, which are never read; convert them to safetensors",
}

_log = logging.getLogger("fastcache")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a checkpoint, each tensor in exactly one of them."""

    path: str  # absolute: a directory, or one file
    files: tuple[str, ...]  # absolute paths
    headers: tuple[Header, ...]  # one per file
    config: Mapping[str, Any]  # config.json (or {}) and a file of the quantiser; of GGUF, the (first) file's metadata
    not_indexed: tuple[str, ...]  # absolute paths of files of tensors in the directory that are not of the checkpoint
    format: Literal["safetensors", "gguf"] = "safetensors"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Find the files behind `path`, read their headers, and check them against each other.

    Parameters
    ----------
    path : path-like
        A directory, with `model.safetensors.index.json` (then only the files that it names count) or without one (then
        all of its `*.safetensors` files count); the index itself; or one safetensors file, which stands alone. Or a
        GGUF file; any part of a split one, for the whole of it; or a directory with one GGUF model and no safetensors.

    Raises
    ------
    CheckpointNotFound
        There is nothing at `path`.
    MissingShard
        The index names a file that is not there, or a part of a split GGUF is not there.
    WrongShard
        The index sends a tensor to a file that lacks it, and another file has it.
    MissingTensor
        The index names a tensor that no file has.
    CheckpointIndexError
        The index is not what the format allows, names a file outside the directory, or a tensor is in two files.
    UnsupportedCheckpoint
        The files are of another format.
    CheckpointError
        A header is broken (see `read_header`), config.json is no JSON, or there is no file of tensors.

    Notes
    -----
    A tensor that an indexed file holds and the index does not name is used, as other loaders do, with one warning in
    the log.
    """
    if not os.fspath(path):  # an unset variable, more likely than the working directory
        raise CheckpointNotFound("the path of the checkpoint is empty")
    path = os.path.abspath(os.fsdecode(path))
    if path.endswith(".safetensors.index.json") and os.path.isfile(path):
        return _open_directory(os.path.dirname(path), path)
    if os.path.isdir(path):
        index = os.path.join(path, INDEX_NAME)
        return _open_directory(path, index if os.path.lexists(index) else None)
    if not os.path.lexists(path):
        raise CheckpointNotFound(f"{path}: no such file or directory")
    if not os.path.exists(path):
        raise CheckpointNotFound(f"{path}: a symbolic link to {os.readlink(path)}, which is not there")
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gguf":
        return _of_gguf(path, open_gguf(path), ())
    if suffix in _OTHER_FORMATS:
        raise UnsupportedCheckpoint(f"{path}: {_OTHER_FORMATS[suffix]}")
    return Checkpoint(path, (path,), (read_header(path),), _read_config(os.path.dirname(path)), ())


def _open_directory(root: str, index: str | None) -> Checkpoint:
    present = _present(root)
    if index is not None:
        if os.path.isdir(index):
            raise CheckpointIndexError(f"{index}: a directory, not a JSON file")
        raw = read_padded(index)
        scanned = scan_index(raw)
        names = _parse_index(index, raw)[1] if scanned is None else scanned.files
        for name in names:
            _check_name(index, name)
        files = tuple(os.path.join(root, name) for name in names)
        _check_present(index, files)
        headers = tuple(read_header(file) for file in files)
        if scanned is None or not scanned.agrees(headers):
            _check_index(index, _parse_index(index, raw)[0], headers)
        named = {os.path.normpath(file) for file in files}
        not_indexed = tuple(file for file in present if file not in named)
        return Checkpoint(root, files, headers, _read_config(root), (*not_indexed, *gguf_names(root)))
    if not present and (paths := gguf_names(root)):
        return _of_gguf(root, *open_gguf_directory(root, paths))
    if not present:
        others = sorted({os.path.splitext(name)[1].lower() for name in os.listdir(root)} & _OTHER_FORMATS.keys())
        if others:
            raise UnsupportedCheckpoint(
                f"{root}: no .safetensors or .gguf file; its {others[0]} files are {_OTHER_FORMATS[others[0]]}"
            )
        raise CheckpointError(f"{root}: no .safetensors or .gguf file in this directory")
    headers = tuple(read_header(file) for file in present)
    _check_unique(root, headers)
    return Checkpoint(root, present, headers, _read_config(root), tuple(gguf_names(root)))


def _of_gguf(path: str, headers: tuple[Header, ...], not_indexed: tuple[str, ...]) -> Checkpoint:
    if len(headers) > 1:
        _check_unique(os.path.dirname(headers[0].path), headers)
    files = tuple(header.path for header in headers)
    return Checkpoint(path, files, headers, headers[0].metadata, not_indexed, "gguf")


def _present(root: str) -> tuple[str, ...]:
    """The safetensors files of a directory. Hidden ones are no shards: macOS leaves `._model.safetensors` behind."""
    names = (n for n in os.listdir(root) if n.endswith(".safetensors") and not n.startswith("."))
    paths = (os.path.join(root, name) for name in sorted(names))
    return tuple(path for path in paths if os.path.isfile(path))


def _parse_index(index: str, raw: bytearray) -> tuple[dict[str, int], list[str]]:
    """Return tensor name -> file number, and the files' names in order."""
    top = _parse_json(index, bytes(raw[: -len(PADDING)]), CheckpointIndexError, object_pairs_hook=tuple)
    maps = [value for key, value in top if key == "weight_map"] if type(top) is tuple else []
    if len(maps) != 1 or type(maps[0]) is not tuple:
        raise CheckpointIndexError(f'{index}: not a JSON object with one "weight_map" object')
    pairs = maps[0]
    files = [file for _, file in pairs]
    if set(map(type, files)) - {str}:
        name, file = next((name, file) for name, file in pairs if type(file) is not str)
        raise CheckpointIndexError(f"{index}: weight_map[{name!r}] is {file!r}, not the name of a file")
    numbers = {file: number for number, file in enumerate(sorted(set(files)))}
    weight_map = dict(zip((name for name, _ in pairs), map(numbers.__getitem__, files), strict=True))
    if len(weight_map) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointIndexError(f"{index}: duplicate key: {twice!r} appears more than once in weight_map")
    if not numbers:
        raise CheckpointIndexError(f"{index}: weight_map is empty")
    return weight_map, list(numbers)


def _check_name(index: str, file: str) -> None:
    """Refuse a name that could leave the directory. By its text alone: a symlink out of it is how hub caches look."""
    try:
        os.fsencode(file)
    except UnicodeEncodeError:
        problem = "is no file name"
    else:
        if not file:
            problem = "is empty"
        elif "\0" in file:
            problem = "contains a NUL"
        elif os.path.isabs(file):
            problem = "is an absolute path"
        elif ".." in file.split("/"):
            problem = "contains '..'"
        elif file.endswith("/"):
            problem = "is a directory"
        else:
            return
    raise CheckpointIndexError(f"{index}: weight_map names the file {file!r}, which {problem}; nothing was opened")


def _check_present(index: str, files: tuple[str, ...]) -> None:
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        dangling = " (a symbolic link to nothing)" if os.path.islink(missing[0]) else ""
        raise MissingShard(
            f"{index}: {len(missing)} of {len(files)} files are missing: "
            f"{_some(map(os.path.basename, missing), len(missing))}{dangling}; download the rest"
        )


def _check_index(index: str, weight_map: dict[str, int], headers: tuple[Header, ...]) -> None:
    """Hold the index and the headers to each other. Consumes weight_map: at the end it holds what no file has."""
    wrong: list[tuple[str, int, int]] = []
    extra: list[tuple[str, int]] = []
    for number, header in enumerate(headers):
        for name in header.names:
            expected = weight_map.pop(name, -1)
            if expected < 0:
                extra.append((name, number))
            elif expected != number:
                wrong.append((name, expected, number))
    base = [os.path.basename(header.path) for header in headers]
    if extra:
        _check_unique(os.path.dirname(index), headers)
    for name, expected, number in wrong:
        if name in headers[expected]:
            _check_unique(os.path.dirname(index), headers)
        raise WrongShard(
            f"{index}: it says that {name!r} is in {base[expected]}, which does not hold it; found in {base[number]}"
            + (f" ({len(wrong)} tensors are misplaced)" if len(wrong) > 1 else "")
        )
    if weight_map:
        name, expected = next(iter(weight_map.items()))
        raise MissingTensor(
            f"{index}: {len(weight_map)} tensors that it names are in none of its {len(headers)} files: "
            f"{_some(weight_map, len(weight_map))}; {base[expected]} should hold {name!r}"
        )
    if extra:
        name, number = extra[0]
        _log.warning(
            "%s: %d tensors in its files are not in the index, and are used: %s in %s%s",
            *(index, len(extra), name, base[number], ", ..." if len(extra) > 1 else ""),
        )


def _check_unique(root: str, headers: tuple[Header, ...]) -> None:
    owner: dict[str, Header] = {}
    for header in headers:
        for name in header.names:
            first = owner.setdefault(name, header)
            if first is not header:
                raise CheckpointIndexError(
                    f"{root}: tensor {name!r} is in both {os.path.basename(first.path)} and "
                    f"{os.path.basename(header.path)}; open one file by its path, or move one away"
                )


def _read_config(root: str) -> Mapping[str, Any]:
    config = _read_object(os.path.join(root, "config.json")) or {}
    text = config.get("text_config")
    if not any("quantization_config" in each for each in (config, text) if isinstance(each, dict)):
        for name, method in _QUANTIZE_CONFIGS.items():
            apart = _read_object(os.path.join(root, name))
            if apart is not None:
                return {**config, "quantization_config": {"quant_method": method, **apart}}
        path = os.path.join(root, _MODELOPT_CONFIG)
        apart = _read_object(path)
        if apart is not None:
            return {**config, "quantization_config": _of_modelopt(path, apart)}
    return config


def _of_modelopt(path: str, apart: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ModelOpt's own file says, in the words that config.json has for it."""
    said, producer = apart.get("quantization"), apart.get("producer", {})
    if not isinstance(said, dict) or not isinstance(producer, dict):
        raise CheckpointError(f"{path}: 'quantization' and 'producer' are to be JSON objects")
    return {**said, "quant_method": producer.get("name", "modelopt")}


def _read_object(path: str) -> dict[str, Any] | None:
    if os.path.isdir(path):
        raise CheckpointError(f"{path}: a directory, not a JSON file")
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        found = _parse_json(path, file.read(), CheckpointError)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def _parse_json(path: str, raw: bytes, error: type[CheckpointError], **options: Any) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"), **options)
    except (ValueError, RecursionError) as problem:
        hint = "; it is a Git-LFS pointer: run `git lfs pull`" if raw.startswith(b"version https://git-lfs") else ""
        raise error(f"{path}: not JSON ({problem}){hint}") from None


def _some(names: Iterable[str], count: int) -> str:
    shown = [name for name, _ in zip(names, range(3), strict=False)]
    return ", ".join(shown) + (f" and {count - 3} more" if count > 3 else "")
