"""A NumPy forward for MoE models whose experts come from a store, or from memory.

`load(path)` gives a model that computes logits and generates tokens, `load_block(path, layer, experts=store)` one MoE
block. Both stream; `experts="resident"` is the one-line change to compare with.
"""

from fastcache.moe.arrival import Experts
from fastcache.moe.block import MoEBlock, load_block
from fastcache.moe.cache import KVCache
from fastcache.moe.families import Forward, Latent
from fastcache.moe.loading import load
from fastcache.moe.model import Model
from fastcache.moe.resident import ResidentExperts
from fastcache.moe.speculator import Speculator

__all__ = [
    "Experts",
    "Forward",
    "KVCache",
    "Latent",
    "MoEBlock",
    "Model",
    "ResidentExperts",
    "Speculator",
    "load",
    "load_block",
]
