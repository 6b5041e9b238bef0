"""A stand-in for a store: experts in memory that arrive in a random order."""

import random

from fastcache.moe import ResidentExperts


class Shuffled:
    """A store in memory whose experts arrive in a random order, and which notes what was asked of it."""

    def __init__(self, layout, layer, seed=0):
        self.resident, self.random, self.asked = ResidentExperts(layout, layer), random.Random(seed), []

    def as_ready(self, layer, experts):
        self.asked.append((layer, list(experts)))
        order = list(experts)
        self.random.shuffle(order)
        return self.resident.as_ready(layer, order)
