"""What the compiled half is held against: its rules again, in Python, without a trick."""

from collections import defaultdict

LEAST = 1e-9  # the chance of an expert that was never picked


class History:
    """What next_use says of itself, without a trick: every visit of every layer, as the set of what it picked."""

    def __init__(self, layers):
        self.n, self.open = layers, -1
        self.visits = defaultdict(list)

    def request(self, layer, key):
        if layer != self.open or key in self.visits[layer][-1]:
            self.open = layer
            self.visits[layer].append(set())
        self.visits[layer][-1].add(key)

    def chance(self, layer, key):
        """The blend of a fast and a slow average, each over the weight that it has gathered."""
        visits, p = self.visits[layer], 0.0
        for share, rate in ((0.25, 0.4), (0.75, 0.02)):
            ages = [len(visits) - 1 - i for i, visit in enumerate(visits) if key in visit]
            gathered = 1 - (1 - rate) ** len(visits)
            if ages:
                p += share * sum(rate * (1 - rate) ** age for age in ages) / gathered
        return max(p, LEAST)

    def distance(self, layer, key):
        return (layer - self.open - 1) % self.n + 1 + self.n * (1 / self.chance(layer, key) - 1)

    def picked(self, layer, key):
        return tuple(key in visit for visit in self.visits[layer])
