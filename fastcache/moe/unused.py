"""Tensors of a checkpoint that its decoder does not compute with: harmless, or a reason to refuse it.

A bias, a norm or a gate that is left out changes every token and no error tells. Owns `check_used`. Knows no family:
what was used is given. Imports errors, layout and quant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import MTP_PREFIX
from fastcache.quant.coded import stored_as

# Beside X.weight: its scales and codes, which `linear` judges; what quantises activations or a cache, which stay
# float32 here.
_SIBLINGS: Final = re.compile(
    r"weight_(?:packed|scale|scale_inv|scale_2|shape|zero_point|global_scale|g_idx)|qweight|qzeros|scales|g_idx"
    r"|(?:input|output|[qkv]|prob|activation)_(?:global_)?scale|input_zero_point"
)
# Recomputed from the config, of another kind of input, or of layers that draft tokens.
_HARMLESS: Final = re.compile(
    r"(?:.*\.)?rotary_emb\.(?:inv_freq|cos_cached|sin_cached)"
    r"|blk\.[0-9]+\.attn_rot_embd\.weight"
    r"|.*\.self_attn\.[kqv]_scale"  # of a quantised cache
    r"|model\.(?:vision|visual|image|audio|mm_|multi_modal|multimodal|projector|aligner)\w*\..*"
)
_LAYER: Final = re.compile(r"(?:model\.layers|blk)\.([0-9]+)\..*")
_MOST_SHOWN: Final = 3


def check_used(
    names: Mapping[str, str], used: Set[str], layers: int, drafts: int, *, gguf: bool, trunk: Mapping[str, NDArray[Any]]
) -> None:
    """Refuse a checkpoint with tensors of the decoder that nothing computes with.

    Parameters
    ----------
    names : mapping of str to str
        The hub's name of each tensor that is no routed expert's (those of GGUF that have none: their own) to its
        on-disk name.
    used : set of str
        Hub names.
    layers, drafts : int
        Layers of the decoder; layers behind them that only draft tokens.
    gguf : bool
        All of a GGUF file is the decoder's; a safetensors checkpoint may have others beside it, under their own roots.
    trunk : mapping of str to ndarray
        The tensors by on-disk name. A bias of zeros is harmless: some quantisers write one beside every weight.

    Raises
    ------
    UnsupportedCheckpoint
        The message names them.
    """
    more = sorted(
        disk
        for name, disk in names.items()
        if name not in used
        and not _is_harmless(name, used, layers, drafts)
        and (gguf or name.startswith(("model.", "lm_head.")))
        and not (name.endswith(".bias") and not trunk[disk].view(np.uint8).any())
    )
    if more:
        shown = ", ".join(more[:_MOST_SHOWN]) + (f" and {len(more) - _MOST_SHOWN} more" if len(more) > 3 else "")
        raise UnsupportedCheckpoint(
            f"the checkpoint has {shown}, which this family's NumPy decoder does not compute with: its tokens would be "
            f"others. The bytes are served: use fastcache.open and your own forward"
        )


def _is_harmless(name: str, used: Set[str], layers: int, drafts: int) -> bool:
    if _HARMLESS.fullmatch(name) or MTP_PREFIX.search(name):
        return True
    layer = _LAYER.fullmatch(name)
    if layer and layers <= int(layer[1]) < layers + drafts:
        return True
    stem, _, suffix = name.rpartition(".")
    return _SIBLINGS.fullmatch(suffix) is not None and any(each in used for each in stored_as(f"{stem}.weight"))
