"""What the compiled half is held against: its rules again, in Python, without a trick."""

from collections import defaultdict

LEAST = 1e-9  # the chance of an expert that was never picked


class Blend:
    """How likely visits of a layer are to pick each of its experts; every average of every expert kept up to date."""

    def __init__(self, experts):
        self.experts, self.visits, self.base = experts, [], 0
        self.sums = defaultdict(lambda: [0.0] * 4)  # of an expert's picks, fading
        self.gathered, self.weights = [0.0] * 4, [0.25] * 4
        self.picks = self.counted = 0.0
        self.rates = self.spread(128)

    def spread(self, widest):
        return [1 / (2 * (widest / 2) ** (i / 3)) for i in range(4)]

    def fit(self):
        """Every 32 visits, and after the first: the slowest average is over twelve picks per expert."""
        widest = max(12 * self.experts * self.counted / max(self.picks, 0.1 * self.counted), 128)
        self.base = len(self.visits)
        if abs(widest * self.rates[3] - 1) <= 0.1:
            return
        self.rates = self.spread(widest)
        before, self.gathered = self.gathered, [1 - (1 - rate) ** len(self.visits) for rate in self.rates]
        for sums in self.sums.values():
            sums[:] = [x * now / was for x, now, was in zip(sums, self.gathered, before, strict=True)]

    def averages(self, key):
        return [x / gathered for x, gathered in zip(self.sums[key], self.gathered, strict=True)]

    def visit(self):
        if len(self.visits) == 1 or len(self.visits) - self.base >= 32:
            self.fit()
        if self.visits:
            self.step = 1 / (12 + 2 * self.picks / self.counted)
        self.before = {key: self.averages(key) for key in list(self.sums)}
        self.picks *= 31 / 32
        self.counted = self.counted * 31 / 32 + 1
        for sums in self.sums.values():
            sums[:] = [x * (1 - rate) for x, rate in zip(sums, self.rates, strict=True)]
        self.gathered = [x + (1 - x) * rate for x, rate in zip(self.gathered, self.rates, strict=True)]
        self.fixed = list(self.weights)
        self.visits.append(set())

    def pick(self, key, usual):
        self.visits[-1].add(key)
        self.picks += 1
        parts = [weight * x for weight, x in zip(self.weights, self.before.get(key, [0.0] * 4), strict=True)]
        total = sum(parts)
        if total >= 1e-12:
            step = self.step * (total / (total + usual)) ** 0.5
            for i, part in enumerate(parts):
                self.weights[i] = max(self.weights[i] + (part / total - self.weights[i]) * step, 1e-3)
        for i, rate in enumerate(self.rates):
            self.sums[key][i] += rate

    def chance(self, key):
        return sum(w * x for w, x in zip(self.fixed, self.averages(key), strict=True)) if key in self.sums else 0.0


class Rounds:
    """When layers come round; visits are numbered from 0, and `now` is the next."""

    def __init__(self, layers):
        self.n, self.now, self.look_at, self.gaps = layers, 0, max(layers, 32), []
        self.counted, self.last = 0, [layer - layers for layer in range(layers)]
        self.visits, self.mean, self.gap = [0] * layers, [layers] * layers, [layers] * layers
        self.back, self.left, self.seen = list(range(layers)), None, []

    def visit(self, layer):
        gap = self.now - self.last[layer]
        self.visits[layer] += 1
        if self.visits[layer] > 1:
            self.mean[layer] += (gap - self.mean[layer]) / min(self.visits[layer] + 1, 128)
            self.gaps.append((gap, 1.0))
            self.counted += 1
            if self.counted >= 64 * self.n:
                self.counted //= 2
                self.gaps = [(each, weight / 2) for each, weight in self.gaps]
        self.last[layer] = self.now
        self.gap[layer], self.back[layer] = self.mean[layer], self.now + self.mean[layer]
        self.now += 1
        if self.left not in (None, layer):
            self.expect(self.left)
        self.left = layer
        if self.now >= self.look_at:
            self.look_at = self.now + max(self.n, 32)
            self.seen = list(self.gaps)
            for other in range(self.n):
                if other != layer:
                    self.expect(other)

    def expect(self, layer):
        """As long as the gaps that were longer, by the last look; those of the same class are, where they were now."""
        since = self.now - self.last[layer]
        alike = [each for each in self.gaps if self.octave(each[0]) == self.octave(since)]
        too = sum(gap * weight for gap, weight in alike) >= since * sum(weight for _, weight in alike)
        longer = [
            each for each in self.seen
            if self.octave(each[0]) > self.octave(since) or (too and self.octave(each[0]) == self.octave(since))
        ]  # fmt: skip
        count = 1 + sum(weight for _, weight in longer)
        whole = max((2 * since + sum(gap * weight for gap, weight in longer)) / count, self.mean[layer])
        self.back[layer] = self.last[layer] + whole
        share = min(16 / min(self.visits[layer] + 1, 128), 1) / count
        self.gap[layer] = self.mean[layer] + (whole - self.mean[layer]) * share

    def octave(self, gap):
        """Classes of gaps, four to an octave."""
        return (gap.bit_length(), gap >> (gap.bit_length() - 3) if gap >= 4 else gap)


class History:
    """What next_use says of itself, without a trick."""

    def __init__(self, sizes):
        self.sizes, self.open, self.usual = sizes, -1, 0.1
        self.rounds, self.blends = Rounds(len(sizes)), [Blend(size) for size in sizes]

    def request(self, layer, key):
        blend = self.blends[layer]
        if layer != self.open or key in blend.visits[-1]:
            self.open = layer
            self.rounds.visit(layer)
            blend.visit()
        blend.pick(key, self.usual)

    def forget(self, layer, key):
        """It left the cache: what is usual there is the chance of those that go."""
        self.usual += (self.blends[layer].chance(key) - self.usual) / 256

    def distance(self, layer, key):
        chance = max(self.blends[layer].chance(key), LEAST)
        return self.rounds.back[layer] + self.rounds.gap[layer] * (1 / chance - 1)

    def picked(self, layer, key):
        return tuple(key in visit for visit in self.blends[layer].visits)


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
