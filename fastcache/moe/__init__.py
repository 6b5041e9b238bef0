"""A NumPy forward for MoE models whose experts come from a store, or from memory.

`load_block(path, layer, experts=store)` streams; `experts="resident"` is the one-line change to compare with.
"""

from fastcache.moe.arrival import Experts
from fastcache.moe.block import MoEBlock, load_block
from fastcache.moe.families import Forward, Latent
from fastcache.moe.resident import ResidentExperts
from fastcache.moe.speculator import Speculator

__all__ = ["Experts", "Forward", "Latent", "MoEBlock", "ResidentExperts", "Speculator", "load_block"]
