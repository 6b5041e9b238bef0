"""What the compiled half is held against: its rules again, in Python, without a trick."""

from collections import defaultdict

LEAST = 1e-9  # the chance of an expert that was never picked


class History:
    """What next_use says of itself, without a trick: every visit of every layer, as the set of what it picked."""

    rates, prior, longest = (1 / 2, 1 / 16, 1 / 128), 2048, 16384

    def __init__(self, layers):
        self.n, self.open, self.learnt = layers, -1, self.prior
        self.visits = defaultdict(list)
        self.weights = [1 / len(self.rates)] * len(self.rates)
        self.fixed = {}  # the weights when a layer's last visit began

    def request(self, layer, key):
        if layer != self.open or key in self.visits[layer][-1]:
            self.open = layer
            self.visits[layer].append(set())
            self.fixed[layer] = list(self.weights)
        self.learn(self.averages(self.visits[layer][:-1], key))
        self.visits[layer][-1].add(key)

    def averages(self, visits, key):
        """Each over the weight that it has gathered."""
        ages = [len(visits) - 1 - i for i, visit in enumerate(visits) if key in visit]
        return [
            sum(rate * (1 - rate) ** age for age in ages) / (1 - (1 - rate) ** len(visits)) if ages else 0.0
            for rate in self.rates
        ]

    def learn(self, averages):
        parts = [weight * average for weight, average in zip(self.weights, averages, strict=True)]
        if sum(parts) == 0:
            return
        self.learnt = min(self.learnt + 1, self.longest)
        for i, part in enumerate(parts):
            self.weights[i] += (part / sum(parts) - self.weights[i]) / self.learnt

    def chance(self, layer, key):
        averages = self.averages(self.visits[layer], key)
        return max(sum(w * a for w, a in zip(self.fixed.get(layer, self.weights), averages, strict=True)), LEAST)

    def distance(self, layer, key):
        return (layer - self.open - 1) % self.n + 1 + self.n * (1 / self.chance(layer, key) - 1)

    def picked(self, layer, key):
        return tuple(key in visit for visit in self.visits[layer])


class Lfu:
    """Counts of all experts, halved each time as many demands have come as there are experts."""

    def __init__(self, cls_of, slots):
        self.cls_of, self.demands, self.clock = cls_of, 0, 0
        self.count = dict.fromkeys(range(len(cls_of)), (0, 0))  # in 1024ths, and the half-life it stands in
        self.asked, self.resident = {}, set()

    def request(self, key):
        now = self.demands // len(self.cls_of)
        count, then = self.count[key]
        self.count[key] = ((count >> (now - then)) + 1024, now)
        self.demands += 1
        self.asked[key] = self.clock = self.clock + 1

    def admit(self, key):
        self.resident.add(key)
        self.asked[key] = self.clock = self.clock + 1

    def forget(self, key, evicted):
        self.resident.remove(key)

    def size(self, key):
        count, then = self.count[key]
        return count << then, self.asked[key]

    def victim(self, cls, leased, unread):
        """`unread`: what must not go besides the leased. None: nobody can."""
        keys = [key for key in self.resident - leased - unread if self.cls_of[key] == cls]
        return min(keys, key=self.size, default=None)


class Sieve:
    """One list per class, oldest first; the hand is the key that it looks at next, None: the oldest."""

    def __init__(self, cls_of, slots):
        self.cls_of, self.queues, self.hands = cls_of, [[] for _ in slots], [None] * len(slots)
        self.marked, self.missed, self.guessed, self.resident = set(), set(), set(), set()

    def request(self, key):
        if key not in self.resident:
            self.missed.add(key)
        elif key in self.guessed:
            self.guessed.remove(key)
        else:
            self.marked.add(key)

    def admit(self, key):
        self.queues[self.cls_of[key]].append(key)
        self.resident.add(key)
        if key not in self.missed:
            self.guessed.add(key)
        self.missed.discard(key)

    def newer(self, queue, key):
        return queue[queue.index(key) + 1] if key != queue[-1] else None

    def forget(self, key, evicted):
        cls = self.cls_of[key]
        if self.hands[cls] == key:
            self.hands[cls] = self.newer(self.queues[cls], key)
        self.queues[cls].remove(key)
        for names in (self.marked, self.guessed, self.resident):
            names.discard(key)

    def victim(self, cls, leased, unread):
        queue, idle, walked = self.queues[cls], 0, 0
        while idle < len(queue):
            key = self.hands[cls] if self.hands[cls] is not None else queue[0]
            if key in leased:
                idle += 1
            elif key not in self.marked and key not in unread:
                self.hands[cls] = key
                return key
            else:
                idle = 0
                if key in unread:
                    walked += 1
                else:
                    self.marked.remove(key)
            self.hands[cls] = self.newer(queue, key)
            if walked == 64:
                return None
        self.hands[cls] = None
        return None


class S3fifo:
    """Two lists per class, oldest first, and what the small one gave up."""

    def __init__(self, cls_of, slots):
        self.cls_of, self.capacity = cls_of, slots
        self.small, self.main, self.ghost = ([[] for _ in slots] for _ in range(3))
        self.freq, self.missed, self.guessed, self.resident = {}, set(), set(), set()

    def request(self, key):
        if key not in self.resident:
            self.missed.add(key)
        elif key in self.guessed:
            self.guessed.remove(key)
        else:
            self.freq[key] = min(self.freq[key] + 1, 3)

    def admit(self, key):
        cls = self.cls_of[key]
        known = key in self.ghost[cls][-(self.capacity[cls] - self.capacity[cls] // 10) :]
        self.ghost[cls] = [None if each == key else each for each in self.ghost[cls]]
        (self.main if known else self.small)[cls].append(key)
        self.freq[key] = 0
        self.resident.add(key)
        if key not in self.missed:
            self.guessed.add(key)
        self.missed.discard(key)

    def forget(self, key, evicted):
        cls = self.cls_of[key]
        if key in self.main[cls]:
            self.main[cls].remove(key)
        else:
            self.small[cls].remove(key)
            if evicted:
                self.ghost[cls].append(key)
        self.resident.remove(key)
        self.guessed.discard(key)

    def victim(self, cls, leased, unread):
        small, main = self.small[cls], self.main[cls]
        while True:
            queues = (small, main) if 10 * len(small) >= self.capacity[cls] else (main, small)
            found = ((queue, key) for queue in queues for key in queue if key not in leased and key not in unread)
            queue, key = next(found, (None, None))
            if queue is None:
                return None
            if self.freq[key] <= (queue is small):
                return key
            queue.remove(key)
            main.append(key)
            self.freq[key] = 0 if queue is small else self.freq[key] - 1


REFERENCES = {"lfu": Lfu, "sieve": Sieve, "s3fifo": S3fifo}  # the others are held to a rule, not to one victim
