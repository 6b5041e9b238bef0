"""What callers write, as the calls need it: distinct dense keys, seconds; and the list that acquire_many returns.

May import core.
"""
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from fastcache_ext.core cimport Core
from fastcache_ext.given cimport is_flag, key_parts, shown

cdef enum:
    SCANNED = 64            # keys up to which a scan finds duplicates


cdef class Leases(list):
    """The leases of one acquire_many, in input order. Leaving a `with` block, or release(), releases them all."""

    def release(self):
        """Release every lease; arrays made from them stay valid."""
        for lease in <list>self:
            lease.release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


cdef bint distinct(const int32_t *keys, int n) noexcept:
    cdef int i, j
    for i in range(n):
        for j in range(i):
            if keys[i] == keys[j]:
                return False
    return True


cdef double seconds(object timeout, double default) except? -7.0:
    if timeout is None:
        return default
    try:
        value = -1.0 if is_flag(timeout) else float(timeout)
    except (TypeError, ValueError):
        value = -1.0
    if not value >= 0:
        raise ValueError(f"timeout must be a number of seconds >= 0, or None; got {timeout!r}")
    return value


cdef class Keys:
    """The distinct dense keys of one call, and where each input stands among them."""
    def __dealloc__(self):
        free(self.keys)
        free(self.index)

    cdef int read(self, Core core, object layer, object experts) except -1:
        cdef int i
        cdef int32_t k
        cdef list items
        cdef dict seen = None
        if experts is None:
            if not isinstance(layer, (tuple, list)) and not hasattr(layer, "__iter__"):
                given = shown(layer)
                raise TypeError("say which experts: (layer, experts), store.experts(layer) for all of them, or ExpertKeys; "
                                f"got {given} alone")
            pairs = [layer] if type(layer) is not list and isinstance(layer, tuple) and len(layer) == 2 \
                and not isinstance(layer[0], tuple) else list(layer)
            parts = [key_parts(pair) for pair in pairs]
            items = [core.key(number, expert) for number, expert in parts]
        else:
            if getattr(experts, "ndim", 1) == 0 or isinstance(experts, int):
                experts = [experts]
            elif getattr(experts, "ndim", 1) != 1:
                raise TypeError(f"experts must be one-dimensional, got shape {experts.shape}: "
                                "flatten it, or np.unique(it) for the union of a batch of tokens")
            kind = getattr(getattr(experts, "dtype", None), "kind", "i")
            if isinstance(experts, (str, bytes)) or kind not in "iu":
                raise TypeError(f"experts must be integers; got {shown(experts)}"
                                + ("; np.flatnonzero(mask) for a mask" if kind == "b" else ""))
            if not hasattr(experts, "__iter__") and not hasattr(experts, "__getitem__"):
                raise TypeError(f"experts must be one integer or several; got {shown(experts)}")
            items = [core.key(layer, expert) for expert in (experts.tolist() if hasattr(experts, "tolist") else experts)]
        self.reserve(len(items))
        if self.count > SCANNED:
            seen = {}
        for i in range(self.count):
            k = items[i]
            self.put(i, k, seen.setdefault(k, self.n) if seen is not None else self.find(k))
        return 0

    cdef int adopt(self, const int32_t *keys, int n) except -1:
        """Take what read_plain has read."""
        cdef int i
        self.reserve(n)
        for i in range(n):
            self.put(i, keys[i], self.find(keys[i]))
        return 0

    cdef int find(self, int32_t key) noexcept:
        """Where `key` stands among the distinct ones, or their number."""
        cdef int j = 0
        while j < self.n and self.keys[j] != key:
            j += 1
        return j

    cdef void put(self, int i, int32_t key, int j) noexcept:
        """Input `i` is `key`, which stands at `j`."""
        if j == self.n:
            self.keys[j] = key
            self.n += 1
        self.index[i] = j

    cdef int reserve(self, Py_ssize_t count) except -1:
        self.keys = <int32_t *>malloc((count + 1) * sizeof(int32_t))
        self.index = <int32_t *>malloc((count + 1) * sizeof(int32_t))
        if self.keys == NULL or self.index == NULL:
            raise MemoryError
        self.count = <int>count
        return 0


cdef int read_plain(Core core, object layer, object experts, int32_t *keys, int room) except -1:
    """The hit path's reader: dense keys of a list or tuple of at most `room` experts, as given. 0 for anything else."""
    cdef Py_ssize_t i = 0
    cdef object expert
    if type(experts) is tuple and len(<tuple>experts) <= room:
        while i < len(<tuple>experts):
            keys[i] = core.key(layer, (<tuple>experts)[i])
            i += 1
    elif type(experts) is list and len(<list>experts) <= room:
        while i < min(<Py_ssize_t>len(<list>experts), room):     # anew each time: an __index__ may change the list
            expert = (<list>experts)[i]
            keys[i] = core.key(layer, expert)
            i += 1
    return <int>i
