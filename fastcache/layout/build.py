"""A checkpoint's headers -> its Layout: every routed expert of every layer, and where its bytes lie.

Owns the decision which tensors are experts, and the checks that no expert is incomplete. Works on columns, because a
large checkpoint has half a million tensors. Imports numpy, formats and the other modules of layout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.formats.checkpoint import Checkpoint, open_checkpoint
from fastcache.formats.dtypes import DTYPES
from fastcache.layout.families import (
    FAMILIES,
    MTP_PREFIX,
    UNKNOWN,
    Family,
    Fused,
    config_count,
    family_of_config,
    family_of_names,
)
from fastcache.layout.gguf import config_of_metadata, family_of_metadata, find_gguf_rows
from fastcache.layout.labels import Part, make_record, role_of
from fastcache.layout.names import FUSED, Kind, Rows, find_rows
from fastcache.layout.quantization import Quantization
from fastcache.layout.record import LayerExperts, Layout, Record, TensorInfo
from fastcache.layout.siblings import check_layers

PAD_PREFIX = "fastcache.pad."  # tensors of padding, which `fastcache pack` writes between experts
MAX_EXPERTS = 999_999  # of a layer; what tensors per expert can be numbered to
Spec = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(slots=True)
class _Tables:
    """Of all files together, per row of `rows`: what and where. And the records made so far, shared by layers."""

    path: str
    family: Family
    expected: int | None  # experts of a layer, as the config says
    rows: Rows
    specs: list[Spec]
    spec: np.ndarray  # int32 [n], index into specs
    offset: np.ndarray  # int64 [n]
    nbytes: np.ndarray  # int64 [n]
    blocks: Mapping[str, ggml.Block]  # of GGML's types; empty for other formats
    quantization: Quantization
    records: dict[tuple[tuple[int, int, int], ...], Record]  # by (kind, spec, nbytes) of each tensor


def build_layout(path: str | os.PathLike[str]) -> Layout:
    """Read the headers of the checkpoint at `path` and return where its routed experts are.

    Parameters
    ----------
    path : path-like
        A directory, a safetensors or a GGUF file, see `fastcache.formats.checkpoint.open_checkpoint`, whose errors this
        raises.

    Returns
    -------
    Layout
        `layers` has the decoder's MoE layers, numbered as the checkpoint does. Everything else is in `trunk`: dense
        layers, shared experts, and multi-token-prediction layers, which are those under an `mtp.` prefix or numbered
        from the config's `num_hidden_layers` on. A file that holds nothing but such layers is served as it is.

    Raises
    ------
    MissingTensor
        An expert lacks a tensor that its siblings have, or an expert is not there.
    UnsupportedCheckpoint
        There are no routed experts, or they are stored in a way that no row of the family table describes.
    CheckpointError
        Experts contradict each other, the config, or the family's row.
    """
    return layout_of(open_checkpoint(path))


def layout_of(checkpoint: Checkpoint) -> Layout:
    """Return the layout of an opened checkpoint; see `build_layout`."""
    if checkpoint.format == "gguf":
        family = family_of_metadata(checkpoint.config)
        checkpoint = replace(checkpoint, config=config_of_metadata(checkpoint.config, family))
        rows = find_gguf_rows(checkpoint.headers)
    else:
        known = family_of_config(checkpoint.config)
        rows = find_rows(checkpoint.headers, FAMILIES if known in (None, UNKNOWN) else (known,))
        family = known or family_of_names({(kind.block, kind.stored) for kind in rows.kinds})
    rows = rows.where(_served(rows, config_count(checkpoint.config, ("num_hidden_layers",))))
    expected = config_count(checkpoint.config, family.n_experts)
    tables = _tables(checkpoint, family, rows, expected)
    layers: dict[int, LayerExperts] = {}
    used: list[np.ndarray] = []
    order = np.argsort(rows.layer, kind="stable")
    starts = np.flatnonzero(np.diff(rows.layer[order], prepend=-1))
    for group in np.split(order, starts[1:]) if len(order) else ():
        layer = int(rows.layer[group[0]])
        found = _layer(tables, layer, group)
        if found is not None:
            layers[layer], its_rows = found
            _check_count(checkpoint, family, layer, len(layers[layer]), expected)
            used.append(its_rows)
    if not layers:
        raise UnsupportedCheckpoint(f"{checkpoint.path}: {_no_experts_text(checkpoint)}")
    gguf = checkpoint.format == "gguf"
    check_layers(checkpoint.path, family, layers, gguf=gguf, needs=tables.quantization.needs)
    return Layout(
        family=family.name,
        top_k=config_count(checkpoint.config, family.top_k),
        files=checkpoint.files,
        layers=layers,
        trunk=_trunk(checkpoint, rows, np.concatenate(used)),
        config=checkpoint.config,
        not_indexed=checkpoint.not_indexed,
        format=checkpoint.format,
        identities=tuple(header.identity for header in checkpoint.headers),
    )


def _served(rows: Rows, n_layers: int | None) -> np.ndarray:
    """Mask of the rows of decoder layers; of all rows, if there are none but multi-token-prediction ones."""
    drafts = np.array([MTP_PREFIX.search(kind.prefix) is not None for kind in rows.kinds], bool)
    served: np.ndarray = ~drafts[rows.kind] if len(drafts) else np.zeros(0, bool)
    if n_layers is not None:
        served &= rows.layer < n_layers
    return served if served.any() else np.ones(len(rows.kind), bool)


def _tables(checkpoint: Checkpoint, family: Family, rows: Rows, expected: int | None) -> _Tables:
    number: dict[Spec, int] = {}
    spec = np.empty(len(rows.row), np.int32)
    offset = np.empty(len(rows.row), np.int64)
    nbytes = np.empty(len(rows.row), np.int64)
    ends = np.searchsorted(rows.file, np.arange(len(checkpoint.headers) + 1))
    for file, header in enumerate(checkpoint.headers):
        mine = slice(ends[file], ends[file + 1])
        at = rows.row[mine]
        to_global = np.array([number.setdefault(each, len(number)) for each in header.specs], np.int32)
        if len(at):
            spec[mine], offset[mine], nbytes[mine] = to_global[header.spec[at]], header.offset[at], header.nbytes[at]
    blocks = ggml.blocks() if checkpoint.format == "gguf" else {}
    quantization = Quantization(checkpoint.config)
    places = (checkpoint.path, family, expected, rows)
    return _Tables(*places, list(number), spec, offset, nbytes, blocks, quantization, {})


def _layer(tables: _Tables, layer: int, group: np.ndarray) -> tuple[LayerExperts, np.ndarray] | None:
    """Return the experts of one layer and the rows that they use; None if nothing in it turns out to be an expert."""
    rows, family = tables.rows, tables.family
    if family.trunk:
        group = group[[rows.kinds[kind].block not in family.trunk for kind in rows.kind[group]]]
    if family.identity and tables.expected is not None:
        group = group[rows.expert[group] < tables.expected]
    fused = rows.expert[group] == FUSED
    group = np.concatenate([group[~fused], _fused_rows(tables, group[fused])])
    if not len(group):
        return None
    kinds = [rows.kinds[kind] for kind in np.unique(rows.kind[group])]
    places = sorted({f"{kind.prefix}.layers.{layer}.{kind.block}".lstrip(".") for kind in kinds})
    if len(places) > 1:
        raise UnsupportedCheckpoint(f"{tables.path}: layer {layer} has experts in more than one place: {places}")
    if len({kind.fused for kind in kinds}) > 1:
        raise UnsupportedCheckpoint(
            f"{tables.path}: layer {layer} mixes fused tensors and tensors per expert under {places[0]}"
        )
    split = _fused_layer if kinds[0].fused else _split_layer
    return split(tables, layer, group), group


def _fused_rows(tables: _Tables, group: np.ndarray) -> np.ndarray:
    """Those of the fused-looking rows that are experts: in the family's row, or [E, ...] like a 3-D one beside it."""
    rows, family = tables.rows, tables.family
    kinds = [rows.kinds[kind] for kind in rows.kind[group]]
    shapes = [tables.specs[spec][1] for spec in tables.spec[group]]
    in_row = [
        _how(family, kind) is not None or (_in_block(family, kind) and kind.stored.partition(".")[0] in family.stacked)
        for kind in kinds
    ]
    stacked = {shape[0] for shape, known in zip(shapes, in_row, strict=True) if shape and (known or len(shape) >= 3)}
    keep = [known or (len(shape) >= 2 and shape[0] in stacked) for shape, known in zip(shapes, in_row, strict=True)]
    kept: np.ndarray = group[np.array(keep, bool)]
    return kept


def _how(family: Family, kind: Kind) -> Fused | None:
    """How to read a fused tensor; of an unknown family, how another one does that has it in the same place."""
    if family is not UNKNOWN:
        return family.fused.get(kind.stored) if _in_block(family, kind) else None
    return next(
        (each.fused[kind.stored] for each in FAMILIES if each.block == kind.block and kind.stored in each.fused), None
    )


def _fused_layer(tables: _Tables, layer: int, group: np.ndarray) -> LayerExperts:
    """Tensors [E, ...]: expert e is the e-th equal piece of each."""
    rows = tables.rows
    group = group[np.lexsort((tables.nbytes[group], tables.offset[group], rows.file[group]))]
    where = f"{tables.path}: layer {layer}"
    shapes = [tables.specs[spec][1] for spec in tables.spec[group]]
    names = [rows.kinds[kind].stored for kind in rows.kind[group]]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{where}: the same tensor under two names, among {names}")
    flat = [
        how is not None and how.flat for how in (_how(tables.family, rows.kinds[kind]) for kind in rows.kind[group])
    ]
    counts = {shape[0] if shape else 0 for shape, cut in zip(shapes, flat, strict=True) if not cut}
    if any(flat):
        if tables.expected is None:
            raise CheckpointError(f"{where}: {names[0]} holds all experts, and config.json does not say how many")
        counts.add(tables.expected)
        if any(not shape or shape[0] % tables.expected for shape, cut in zip(shapes, flat, strict=True) if cut):
            stored = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            raise CheckpointError(f"{where}: rows of {stored} are no multiple of {tables.expected} experts")
    if len(counts) > 1 or 0 in counts:
        stored = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
        raise CheckpointError(f"{where}: fused tensors disagree on the number of experts: {stored}")
    (count,) = counts
    if count > MAX_EXPERTS:  # tensors without a byte may have any number of rows
        raise CheckpointError(f"{where}: {names[0]} {list(shapes[0])} would be {count} experts, above {MAX_EXPERTS}")
    step = tables.nbytes[group] // count
    for name, spec in zip(names, tables.spec[group], strict=True):
        dtype, shape = tables.specs[spec]
        bits = DTYPES[dtype].bits if dtype in DTYPES else 8  # rows of blocks end on a byte
        if int(np.prod(shape, dtype=object)) // count * bits % 8:
            raise UnsupportedCheckpoint(f"{where}: experts of {name} {dtype} {list(shape)} do not end on a byte")
    record = _record(tables, group, step, where, pieces=True)
    experts = np.arange(count, dtype=np.int64)
    file = np.broadcast_to(rows.file[group].astype(np.int32), (count, len(group)))
    offset = tables.offset[group] + experts[:, None] * step
    return LayerExperts(layer, (record,), np.zeros(count, np.uint16), np.ascontiguousarray(file), offset)


def _split_layer(tables: _Tables, layer: int, group: np.ndarray) -> LayerExperts:
    """Tensors per expert."""
    rows = tables.rows
    kinds = np.unique(rows.kind[group])
    column = np.searchsorted(kinds, rows.kind[group])
    expert = rows.expert[group]
    present = np.unique(expert)
    count = int(present[-1]) + 1
    if len(present) < count:
        gone = np.flatnonzero(np.diff(present, prepend=-1) > 1)[0]
        raise MissingTensor(
            f"{tables.path}: layer {layer} expert {int(present[gone - 1]) + 1 if gone else 0}: missing all tensors, "
            f"present for {len(present)} of {count} siblings"
        )
    if count * len(kinds) > 64 * len(group) + 4096:  # a hostile header could ask for a table of any size
        raise CheckpointError(f"{tables.path}: layer {layer}: hardly any two of its {count} experts are stored alike")
    table = np.full((count, len(kinds)), -1, np.int64)  # row of each expert's tensor of each kind
    table[expert, column] = group
    if int((table >= 0).sum()) < len(group):
        seen, times = np.unique(np.stack([expert, column]), axis=1, return_counts=True)
        twice, kind = seen[:, times > 1][:, 0]
        stored = rows.kinds[kinds[kind]].stored
        raise CheckpointError(f"{tables.path}: layer {layer} expert {twice}: {stored} appears under two names")
    spec = np.where(table >= 0, tables.spec[table], -1)
    if (spec == spec[0]).all():
        looks, record_of = spec[:1], np.zeros(count, np.int64)
    else:
        looks, record_of = np.unique(spec, axis=0, return_inverse=True)
        record_of = record_of.reshape(-1)
    if (spec < 0).any():
        _check_siblings(tables, layer, [rows.kinds[kind] for kind in kinds], spec)
    widest = int((looks >= 0).sum(axis=1).max())
    file = np.full((count, widest), -1, np.int32)
    offset = np.full((count, widest), -1, np.int64)
    records = []
    for number in range(len(looks)):
        members = np.flatnonzero(record_of == number)
        first = table[members[0]]
        mine = np.flatnonzero(first >= 0)
        at = first[mine]
        mine = mine[np.lexsort((tables.nbytes[at], tables.offset[at], rows.file[at]))]
        at = first[mine]
        where = f"{tables.path}: layer {layer} expert {members[0]}"
        records.append(_record(tables, at, tables.nbytes[at], where, pieces=False))
        picked = table[np.ix_(members, mine)]
        file[members, : len(mine)] = rows.file[picked]
        offset[members, : len(mine)] = tables.offset[picked]
    return LayerExperts(layer, tuple(records), record_of.astype(np.uint16), file, offset)


def _record(tables: _Tables, at: np.ndarray, nbytes: np.ndarray, where: str, *, pieces: bool) -> Record:
    """The record of the tensors in rows `at`, in that order, of which one expert has `nbytes` each."""
    kinds = tables.rows.kind[at]
    key = tuple(zip(kinds.tolist(), tables.spec[at].tolist(), nbytes.tolist(), strict=True))
    if key not in tables.records:
        parts = []
        for kind, spec, size in key:
            dtype, shape = tables.specs[spec]
            stored = tables.rows.kinds[kind].stored
            fused = pieces and stored.partition(".")[0] not in tables.family.stacked
            block = None if dtype in DTYPES else tables.blocks.get(dtype)
            if pieces:
                how = _how(tables.family, tables.rows.kinds[kind])
                cut = how is not None and how.flat and tables.expected
                shape = (shape[0] // cut, *shape[1:]) if cut else shape[1:]
            parts.append(Part(stored, fused, dtype, shape, size, block))
        in_block = _in_block(tables.family, tables.rows.kinds[kinds[0]])
        tables.records[key] = make_record(tables.family, in_block, parts, where, tables.quantization)
    return tables.records[key]


def _in_block(family: Family, kind: Kind) -> bool:
    return family is UNKNOWN or kind.block == family.block or kind.block in family.also


def _check_siblings(tables: _Tables, layer: int, kinds: Sequence[Kind], spec: np.ndarray) -> None:
    """Raise if an expert lacks a tensor that a sibling has which is otherwise stored alike.

    Experts stored differently (one in bf16 between float8 ones with scales) may have different tensors; but an expert
    that has nothing at all of a module, or the same of it as a sibling but for one tensor, has lost something.
    """
    count = len(spec)
    modules = [kind.stored.partition(".")[0] for kind in kinds]
    roles = [role_of(tables.family, _in_block(tables.family, kind), kind.stored)[0] or "" for kind in kinds]
    for module, role in dict.fromkeys(zip(modules, roles, strict=True)):
        mine = [at for at, each in enumerate(modules) if each == module or (role and roles[at] == role)]
        part = spec[:, mine]
        for expert in np.unique(np.nonzero(part < 0)[0]).tolist():
            has = part[expert] >= 0
            alike = (part[:, has] == part[expert, has]).all(axis=1)  # all experts, if it has nothing
            lost = np.flatnonzero((part[alike] >= 0).any(axis=0) & ~has)
            if len(lost):
                names = ", ".join(kinds[mine[at]].stored for at in lost)
                others = int((part[:, lost] >= 0).all(axis=1).sum())
                raise MissingTensor(
                    f"{tables.path}: layer {layer} expert {expert}: missing {names}, "
                    f"present for {others} of {count} siblings"
                )


def _check_count(checkpoint: Checkpoint, family: Family, layer: int, count: int, expected: int | None) -> None:
    if expected is None or count == expected or family is UNKNOWN:
        return
    key = next(key for key in family.n_experts if config_count(checkpoint.config, (key,)) is not None)
    says = "its metadata says expert_count" if checkpoint.format == "gguf" else f"config.json says {key}"
    text = f"{checkpoint.path}: layer {layer} has {count} experts, but {says} {expected}"
    if count < expected:
        hint = "; it is one file of several, open its directory" if os.path.isfile(checkpoint.path) else ""
        raise MissingTensor(text + hint)
    raise CheckpointError(text)


def _no_experts_text(checkpoint: Checkpoint) -> str:
    total = sum(len(header) for header in checkpoint.headers)
    sample = ", ".join(name for header in checkpoint.headers for name in header.names[:2])[:200]
    model_type = checkpoint.config.get("model_type")
    about = f" of model_type {model_type!r}" if model_type else ""
    return (
        f"no routed experts among its {total} tensors{about} ({sample}, ...): a dense model, or a layout not known here"
    )


def _trunk(checkpoint: Checkpoint, rows: Rows, used: np.ndarray) -> dict[str, TensorInfo]:
    trunk: dict[str, TensorInfo] = {}
    used = np.sort(used)  # and so by file
    ends = np.searchsorted(rows.file[used], np.arange(len(checkpoint.headers) + 1))
    for file, header in enumerate(checkpoint.headers):
        left = np.ones(len(header), bool)
        left[rows.row[used[ends[file] : ends[file + 1]]]] = False
        for row in np.flatnonzero(left).tolist():
            if header.names[row].startswith(PAD_PREFIX):
                continue
            tensor = header.at(row)
            trunk[header.names[row]] = TensorInfo(
                header.names[row], tensor.dtype, tensor.shape, file, tensor.offset, tensor.nbytes
            )
    return trunk
