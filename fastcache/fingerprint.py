"""What tells one checkpoint from another, for what is kept beside it: hot lists, traces.

Owns one hash over where every expert lies. Reads no file. Imports inventory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from fastcache.inventory import Inventory


def fingerprint(inventory: Inventory, file_sizes: Sequence[int]) -> str:
    """Return 32 hexadecimal digits that two checkpoints share only if their files agree in names, sizes and places.

    Notes
    -----
    The place of every tensor is what a header says, so this stands for the headers of all files; contents are not read,
    and two fine-tunes of one model, saved alike, share it. Directories do not count: a copy elsewhere is the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = [os.path.basename(path or "") for path in inventory.paths]
    for row in (*inventory.layers, *zip(names, file_sizes, strict=True)):
        digest.update(repr(row).encode())
    for column in (inventory.exists, inventory.file, inventory.offset, inventory.nbytes):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()
