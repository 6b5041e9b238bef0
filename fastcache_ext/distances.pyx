"""Stack distances: how many other experts were asked for since the last time. One pass gives the hits of lru at every size.

Owns Distances. A batch counts as the store serves it: distances are taken when it begins, and then its members move to the front in
order. So a member hits in a cache of C experts, which no batch exceeds, exactly if its distance is below C: after a batch the cache
holds its members and the most recent others. Memory is bounded by the pool: positions are renumbered when they run out.
May import libc.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

cdef enum:
    MOST_KEYS = 1 << 28         # positions are int32, four of them per key


cdef class Distances:
    """Distances of the requests served so far; `n_keys` experts. Not for two threads at once."""
    cdef int32_t n_keys
    cdef int32_t room           # positions: 1 .. room
    cdef int32_t top            # the last one given
    cdef int32_t *where         # [n_keys] position of the last request; 0: none
    cdef int32_t *key_at        # [room + 1] key whose last request that is; -1: none
    cdef int32_t *tree          # [room + 1] Fenwick: which positions are some key's last
    cdef int64_t *counts        # [n_keys] requests at each distance
    cdef int32_t live           # keys asked for so far
    cdef readonly int64_t cold  # first requests: no distance
    cdef readonly int32_t largest   # keys of the largest batch

    def __cinit__(self, int32_t n_keys):
        cdef int32_t p
        if not 0 <= n_keys <= MOST_KEYS:
            raise ValueError(f"{n_keys} experts; at most {MOST_KEYS}")
        self.n_keys = n_keys
        self.room = 4 * n_keys + 1024
        self.where = <int32_t *>calloc(n_keys + 1, sizeof(int32_t))
        self.counts = <int64_t *>calloc(n_keys + 1, sizeof(int64_t))
        self.key_at = <int32_t *>calloc(self.room + 1, sizeof(int32_t))
        self.tree = <int32_t *>calloc(self.room + 1, sizeof(int32_t))
        if self.where == NULL or self.counts == NULL or self.key_at == NULL or self.tree == NULL:
            raise MemoryError
        for p in range(self.room + 1):
            self.key_at[p] = -1

    def __dealloc__(self):
        free(self.where)
        free(self.counts)
        free(self.key_at)
        free(self.tree)

    def run(self, keys, sizes):
        """Count the distances of batches of demands; the arguments of Simulator.run.

        Raises
        ------
        ValueError
            The sizes do not add up to the keys, or a key is none of the model's. Nothing was counted then.
        """
        cdef Py_buffer k, s
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(sizes, &s, PyBUF_SIMPLE)
            try:
                self.count_all(<const int32_t *>k.buf, k.len // 4, <const int64_t *>s.buf, s.len // 8)
            finally:
                PyBuffer_Release(&s)
        finally:
            PyBuffer_Release(&k)

    def counts_by_distance(self):
        """Return the requests at distance 0, 1, ...: int64 [n_keys], as bytes."""
        return (<char *>self.counts)[:self.n_keys * sizeof(int64_t)]

    cdef int count_all(self, const int32_t *keys, int64_t n_keys, const int64_t *sizes, int64_t n) except -1:
        cdef int64_t i, at = 0
        cdef bint known = True
        for i in range(n):
            known &= 0 <= sizes[i] <= self.n_keys
            at += sizes[i]
        for i in range(n_keys):
            known &= 0 <= keys[i] < self.n_keys
        if not known or at != n_keys:
            raise ValueError("batches do not add up to the keys, or a key is none of the model's")
        at = 0
        with nogil:
            for i in range(n):
                self.count(keys + at, <int32_t>sizes[i])
                at += sizes[i]
        return 0

    cdef void count(self, const int32_t *keys, int32_t n) noexcept nogil:
        cdef int32_t i, key
        if n > self.largest:
            self.largest = n
        if self.top + n > self.room:
            self.renumber()
        for i in range(n):
            if self.where[keys[i]] == 0:
                self.cold += 1
            else:
                self.counts[self.live - self.up_to(self.where[keys[i]])] += 1
        for i in range(n):
            key = keys[i]
            if self.where[key] == 0:
                self.live += 1
            else:
                self.add(self.where[key], -1)
                self.key_at[self.where[key]] = -1
            self.top += 1
            self.where[key] = self.top
            self.key_at[self.top] = key
            self.add(self.top, 1)

    cdef int32_t up_to(self, int32_t p) noexcept nogil:
        cdef int32_t total = 0
        while p > 0:
            total += self.tree[p]
            p -= p & -p
        return total

    cdef void add(self, int32_t p, int32_t value) noexcept nogil:
        while p <= self.room:
            self.tree[p] += value
            p += p & -p

    cdef void renumber(self) noexcept nogil:
        """Close the gaps that moved keys left. At least three positions in four are gaps."""
        cdef int32_t p, key, packed = 0
        for p in range(1, self.top + 1):
            key = self.key_at[p]
            if key >= 0:
                packed += 1
                self.key_at[p] = -1
                self.key_at[packed] = key
                self.where[key] = packed
        self.top = packed
        memset(self.tree, 0, (self.room + 1) * sizeof(int32_t))
        for p in range(1, packed + 1):
            self.add(p, 1)
