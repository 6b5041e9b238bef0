"""What no policy can beat: evict the expert whose next use is farthest, known from the trace's own future.

Owns the backward pass that finds next uses, and Belady, the cache that knows them. Times are numbers of batches. The batch being
served is never a victim, as in the store. Knows no policy and no table. May import libc.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

cdef enum:
    FC_MAX_CLASSES = 16
    NEVER = 2147483647          # no next use
    ABSENT = -1                 # not in the cache
    SERVED = -2                 # in the cache, out of the heap: a member of the batch being served


cdef class NextUses:
    """The backward pass: feed it a trace's pieces, last piece first."""
    cdef int32_t *seen          # [n_keys] batch of the next use, going backwards
    cdef int32_t n_keys

    def __cinit__(self, int32_t n_keys):
        cdef int32_t k
        self.n_keys = n_keys
        self.seen = <int32_t *>calloc(n_keys + 1, sizeof(int32_t))
        if self.seen == NULL:
            raise MemoryError
        for k in range(n_keys):
            self.seen[k] = NEVER

    def __dealloc__(self):
        free(self.seen)

    def fill(self, keys, sizes, int64_t first_batch, out):
        """Write to `out`, int32 [keys], the batch in which each key is asked for next; 2**31 - 1: never again.

        `keys` and `sizes` are int32 and int64 buffers as Simulator.run takes them; `first_batch` is the number of their first.
        """
        cdef Py_buffer k, s, o
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(sizes, &s, PyBUF_SIMPLE)
            try:
                PyObject_GetBuffer(out, &o, PyBUF_WRITABLE)
                try:
                    if o.len != k.len or first_batch + s.len // 8 >= NEVER:
                        raise ValueError("one entry per key, and fewer than 2**31 batches")
                    self.backwards(<const int32_t *>k.buf, k.len // 4, <const int64_t *>s.buf, s.len // 8,
                                   <int32_t>first_batch, <int32_t *>o.buf)
                finally:
                    PyBuffer_Release(&o)
            finally:
                PyBuffer_Release(&s)
        finally:
            PyBuffer_Release(&k)

    cdef int backwards(self, const int32_t *keys, int64_t n_keys, const int64_t *sizes, int64_t n, int32_t first,
                       int32_t *out) except -1:
        cdef int64_t i, j, at = n_keys
        check(keys, n_keys, sizes, n, self.n_keys)
        with nogil:
            for i in range(n - 1, -1, -1):
                at -= sizes[i]
                for j in range(at, at + sizes[i]):
                    out[j] = self.seen[keys[j]]
                    self.seen[keys[j]] = first + <int32_t>i
        return 0


cdef int check(const int32_t *keys, int64_t n_keys, const int64_t *sizes, int64_t n, int32_t below) except -1:
    cdef int64_t i, total = 0
    cdef bint known = True
    for i in range(n):
        known &= 0 <= sizes[i] <= below
        total += sizes[i]
    for i in range(n_keys):
        known &= 0 <= keys[i] < below
    if not known or total != n_keys:
        raise ValueError("batches do not add up to the keys, or a key is none of the model's")
    return 0


cdef class Belady:
    """A cache of `class_slots[c]` slots per size class that knows the future.

    Without `bypass`, every miss takes a slot as it does in the store, unless only members of the batch could make room: as long as
    batches fit, the least misses of any policy that a store could have. With it, whatever is used last of the cache's content and
    the batch is let go when the batch ends, be it a member: the least misses of any cache of that size.
    Arguments as those of Simulator.
    """
    cdef int32_t n_keys
    cdef bint bypass
    cdef uint8_t *cls           # [n_keys]
    cdef int64_t *nbytes        # [n_keys]
    cdef int32_t *next          # [n_keys] batch of the next use
    cdef int32_t *at            # [n_keys] place in its class's heap; ABSENT; SERVED
    cdef uint8_t *fresh         # [n_keys] 1: a miss of the batch being served, with bypass
    cdef int32_t *heap[FC_MAX_CLASSES]      # farthest next use on top
    cdef int32_t length[FC_MAX_CLASSES]     # of the heap
    cdef int32_t used[FC_MAX_CLASSES]       # slots: the heap and the served
    cdef int32_t slots[FC_MAX_CLASSES]
    cdef readonly int64_t hits
    cdef readonly int64_t misses
    cdef readonly int64_t evictions
    cdef readonly int64_t pass_throughs
    cdef readonly int64_t bytes_missed

    def __cinit__(self, cls_of, nbytes, class_slots, bint bypass=False):
        cdef bytes classes = memoryview(cls_of).cast("B").tobytes()
        cdef bytes sizes = memoryview(nbytes).cast("B").tobytes()
        cdef int32_t k
        self.n_keys = len(classes)
        self.bypass = bypass
        if len(sizes) != 8 * self.n_keys or len(class_slots) > FC_MAX_CLASSES:
            raise ValueError("nbytes needs one entry per key, and there are at most 16 classes")
        self.cls = <uint8_t *>calloc(self.n_keys + 1, 1)
        self.fresh = <uint8_t *>calloc(self.n_keys + 1, 1)
        self.nbytes = <int64_t *>calloc(self.n_keys + 1, sizeof(int64_t))
        self.next = <int32_t *>calloc(self.n_keys + 1, sizeof(int32_t))
        self.at = <int32_t *>calloc(self.n_keys + 1, sizeof(int32_t))
        if self.cls == NULL or self.fresh == NULL or self.nbytes == NULL or self.next == NULL or self.at == NULL:
            raise MemoryError
        for i in range(len(class_slots)):
            self.slots[i] = class_slots[i]
            self.heap[i] = <int32_t *>calloc(self.n_keys + 1, sizeof(int32_t))
            if self.heap[i] == NULL:
                raise MemoryError
        for k in range(self.n_keys):
            self.cls[k] = classes[k] if classes[k] < len(class_slots) else 255
            self.nbytes[k] = (<const int64_t *><const char *>sizes)[k]
            self.at[k] = ABSENT

    def __dealloc__(self):
        free(self.cls)
        free(self.fresh)
        free(self.nbytes)
        free(self.next)
        free(self.at)
        for i in range(FC_MAX_CLASSES):
            free(self.heap[i])

    def run(self, keys, sizes, next_uses):
        """Serve batches; `next_uses` is what NextUses wrote for these keys. Otherwise as Simulator.run."""
        cdef Py_buffer k, s, u
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(sizes, &s, PyBUF_SIMPLE)
            try:
                PyObject_GetBuffer(next_uses, &u, PyBUF_SIMPLE)
                try:
                    if u.len != k.len:
                        raise ValueError("next_uses needs one entry per key")
                    self.serve_all(<const int32_t *>k.buf, k.len // 4, <const int64_t *>s.buf, s.len // 8,
                                   <const int32_t *>u.buf)
                finally:
                    PyBuffer_Release(&u)
            finally:
                PyBuffer_Release(&s)
        finally:
            PyBuffer_Release(&k)

    cdef int serve_all(self, const int32_t *keys, int64_t n_keys, const int64_t *sizes, int64_t n,
                       const int32_t *next_uses) except -1:
        cdef int64_t i, at = 0
        check(keys, n_keys, sizes, n, self.n_keys)
        with nogil:
            for i in range(n):
                self.serve(keys + at, next_uses + at, <int32_t>sizes[i])
                at += sizes[i]
        return 0

    cdef void serve(self, const int32_t *keys, const int32_t *next_uses, int32_t n) noexcept nogil:
        cdef int32_t i, key, c
        # What is here is out of the search until the batch is over.
        for i in range(n):
            key = keys[i]
            if self.at[key] >= 0:
                self.leave(key)
                self.at[key] = SERVED
        for i in range(n):
            key = keys[i]
            self.next[key] = next_uses[i]
            if self.at[key] == SERVED:
                self.hits += 1
                continue
            self.misses += 1
            self.bytes_missed += self.nbytes[key]
            c = self.cls[key]
            if c == 255 or (self.used[c] >= self.slots[c] and self.length[c] == 0 and not self.bypass):
                self.pass_throughs += 1
                continue
            if self.used[c] < self.slots[c] or self.bypass:
                self.used[c] += 1
            else:
                self.evict(self.heap[c][0])
            self.at[key] = SERVED
            self.fresh[key] = self.bypass
        for i in range(n):
            if self.at[keys[i]] == SERVED:
                self.enter(keys[i])
        for i in range(n):
            c = self.cls[keys[i]]
            while c != 255 and self.used[c] > self.slots[c]:
                self.used[c] -= 1
                self.evict(self.heap[c][0])
        for i in range(n):
            self.fresh[keys[i]] = 0

    cdef void evict(self, int32_t key) noexcept nogil:
        self.leave(key)
        if self.fresh[key]:
            self.pass_throughs += 1     # it never was in the cache when its batch was over
        else:
            self.evictions += 1

    cdef void put(self, int32_t *heap, int32_t i, int32_t key) noexcept nogil:
        heap[i] = key
        self.at[key] = i

    cdef void up(self, int32_t *heap, int32_t i) noexcept nogil:
        cdef int32_t key = heap[i]
        while i > 0 and self.next[heap[(i - 1) // 2]] < self.next[key]:
            self.put(heap, i, heap[(i - 1) // 2])
            i = (i - 1) // 2
        self.put(heap, i, key)

    cdef void down(self, int32_t *heap, int32_t n, int32_t i) noexcept nogil:
        cdef int32_t key = heap[i], child
        while True:
            child = 2 * i + 1
            if child >= n:
                break
            if child + 1 < n and self.next[heap[child + 1]] > self.next[heap[child]]:
                child += 1
            if self.next[heap[child]] <= self.next[key]:
                break
            self.put(heap, i, heap[child])
            i = child
        self.put(heap, i, key)

    cdef void enter(self, int32_t key) noexcept nogil:
        cdef int32_t c = self.cls[key]
        self.put(self.heap[c], self.length[c], key)
        self.length[c] += 1
        self.up(self.heap[c], self.length[c] - 1)

    cdef void leave(self, int32_t key) noexcept nogil:
        cdef int32_t c = self.cls[key], i = self.at[key], last
        self.at[key] = ABSENT
        self.length[c] -= 1
        last = self.heap[c][self.length[c]]
        if last != key:
            self.put(self.heap[c], i, last)
            self.up(self.heap[c], i)
            self.down(self.heap[c], self.length[c], self.at[last])
