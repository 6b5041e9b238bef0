"""The ghosts, for Python: what those of a store found out, and a set of them without a store.

May import core, auto, ghosts and what is below.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from fastcache_ext.policy import NAMES as POLICIES

from fastcache_ext.auto cimport core_switch, ghosts_work
from fastcache_ext.core cimport Core
from fastcache_ext.ghosts cimport (
    GHOSTS_PIECE, MAX_GHOSTS, fc_ghosts, ghosts_check, ghosts_digest, ghosts_free, ghosts_hear, ghosts_new, ghosts_take,
    ghosts_used, ghosts_waiting,
)
from fastcache_ext.threads cimport (
    fc_cond_init, pthread_cond_destroy, pthread_cond_t, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)

cdef dict KINDS = {kind: name for name, kind in POLICIES.items()}


cdef object told(fc_ghosts *g, pthread_mutex_t *mutex, bint curve):
    """What the ghosts say. Copied first: the making of Python objects may run anything, another report included."""
    cdef int32_t i
    cdef int64_t sum = 0
    cdef fc_ghosts *s = <fc_ghosts *>malloc(sizeof(fc_ghosts) + (g.stack.n_keys + 1) * sizeof(uint32_t))
    cdef uint32_t *hist = <uint32_t *>(s + 1)
    if s == NULL:
        raise MemoryError
    try:
        with nogil:
            pthread_mutex_lock(&g.busy)
            if mutex != NULL:
                pthread_mutex_lock(mutex)
            memcpy(s, g, sizeof(fc_ghosts))
            if mutex != NULL:
                pthread_mutex_unlock(mutex)
            memcpy(hist, g.stack.hist, (g.stack.n_keys + 1) * sizeof(uint32_t))
            pthread_mutex_unlock(&g.busy)
        rates = {}
        for i in range(s.n_ghosts):
            if s.windows > 0:
                rates[KINDS[s.kinds[i]]] = s.rates[i]
            elif s.sampled > 0:
                rates[KINDS[s.kinds[i]]] = s.hits[i] / <double>s.sampled
        found = {
            "requests": s.heard, "sampled": s.sampled, "lost": s.lost, "waiting": ghosts_waiting(s), "every": s.every,
            "pool": s.pool, "tracked": s.tracked, "slots": s.slots, "ghost_slots": s.shape.n_slots, "windows": s.windows,
            "window": s.window, "switches": s.switches, "used": KINDS[s.kinds[s.used]], "rates": rates,
            "hits": {KINDS[s.kinds[i]]: s.hits[i] for i in range(s.n_ghosts)},
        }
        if curve:
            points = []
            for i in range(1, s.tracked + 1):
                sum += hist[i]
                points.append(sum / <double>s.stack.requests if s.stack.requests > 0 else 0.0)
            found["curve"] = points
        return found
    finally:
        free(s)


def report(Core core not None, bint curve=False):
    """What the ghosts of a store found: None where it has none. With `curve`, all traffic so far is served first.

    "curve" is the hit rate of LRU with 1, 2, ... sampled experts resident, of `tracked` ones that stand for a `pool`.
    "rates" are the policies' hit rates lately (half of the last window, half of what was before), "hits" those of all
    `sampled` requests.
    """
    core._same_process()
    if core.c == NULL or core.c.ghosts == NULL:
        return None
    if curve:
        with nogil:
            ghosts_work(core.c, True)
    return told(core.c.ghosts, &core.c.mutex, curve)


def switch(Core core not None, str policy):
    """Change the policy of a running store, whatever its ghosts say."""
    cdef int rc, kind = POLICIES[policy]
    core.check()
    with nogil:
        if core.c.ghosts != NULL:
            pthread_mutex_lock(&core.c.ghosts.busy)
        rc = core_switch(core.c, kind)
        if core.c.ghosts != NULL:
            if rc == 0:
                core.c.ghosts.switches += 1
                ghosts_used(core.c.ghosts, kind)
            pthread_mutex_unlock(&core.c.ghosts.busy)
    if rc != 0:
        raise core._error(-rc, None, None, None, 0, 0, 0)


def check(Core core not None):
    """0, or what does not hold of a store's ghosts. For tests."""
    cdef int rc = 0
    if core.c != NULL and core.c.ghosts != NULL:
        with nogil:
            pthread_mutex_lock(&core.c.ghosts.busy)
        rc = ghosts_check(core.c.ghosts)
        pthread_mutex_unlock(&core.c.ghosts.busy)
    return rc


cdef class Watch:
    """Ghosts without a store: for simulations. Keys are dense; layer l has `layer_sizes[l]` of them.

    `every`: one expert in so many is sampled; 0: as a store of that pool would. `choosing`: follow the ghosts' choice.
    """
    cdef fc_ghosts *g
    cdef pthread_cond_t wake
    cdef int32_t *layer_of
    cdef readonly list switches     # [(requests heard, policy)]

    def __cinit__(self, layer_sizes, cls_of, class_slots, int32_t every=0, bint choosing=False, policies=tuple(POLICIES)):
        cdef int32_t first[1025]
        cdef int32_t slots[16]
        cdef int32_t kinds[MAX_GHOSTS]
        cdef bytes classes = bytes(cls_of)
        cdef int32_t l, k, n_layers = len(layer_sizes), n_classes = len(class_slots), n_kinds = len(policies)
        if n_layers > 1024 or n_classes > 16 or n_kinds > MAX_GHOSTS:
            raise ValueError("too many layers, classes or policies")
        first[0] = 0
        for l in range(n_layers):
            first[l + 1] = first[l] + <int32_t>layer_sizes[l]
        if len(classes) != first[n_layers]:
            raise ValueError("one class per expert")
        for k in range(n_classes):
            slots[k] = class_slots[k]
        for k in range(n_kinds):
            kinds[k] = POLICIES[policies[k]]
        fc_cond_init(&self.wake)
        self.switches = []
        self.layer_of = <int32_t *>calloc(first[n_layers] + 1, sizeof(int32_t))
        self.g = ghosts_new(n_layers, first, <const uint8_t *><const char *>classes, NULL, n_classes, slots, kinds, n_kinds, every)
        if self.layer_of == NULL or self.g == NULL:
            raise MemoryError
        for l in range(n_layers):
            for k in range(first[l], first[l + 1]):
                self.layer_of[k] = l
        self.g.wake = &self.wake
        self.g.choosing = choosing
        ghosts_used(self.g, POLICIES["next_use"] if "next_use" in policies else kinds[0])

    def __dealloc__(self):
        ghosts_free(self.g)
        free(self.layer_of)
        pthread_cond_destroy(&self.wake)

    def hear(self, keys, bint digest=True):
        """Demands for `keys` (int32), in order. Without `digest` they wait in the ring, or are lost."""
        cdef bytes copy = memoryview(keys).cast("B").tobytes()
        cdef const int32_t *asked = <const int32_t *><const char *>copy
        cdef Py_ssize_t i, n = len(copy) // <Py_ssize_t>sizeof(int32_t)
        for i in range(n):
            if digest and self.g.head - self.g.tail >= self.g.room // 2:
                self.digest()
            ghosts_hear(self.g, asked[i], self.layer_of[asked[i]])
        if digest:
            self.digest()

    cdef int digest(self) except -1:
        cdef uint16_t entries[GHOSTS_PIECE]
        cdef int n = GHOSTS_PIECE, wanted
        while n == GHOSTS_PIECE:
            n = ghosts_take(self.g, entries, GHOSTS_PIECE)
            wanted = ghosts_digest(self.g, entries, n)
            if wanted >= 0:
                self.switches.append((self.g.heard, KINDS[wanted]))
                self.g.switches += 1
                ghosts_used(self.g, wanted)
        return 0

    def report(self, bint curve=False):
        """As `report` of a store."""
        return told(self.g, NULL, curve)

    def check(self):
        """0, or what does not hold."""
        return ghosts_check(self.g)
