from libc.stdint cimport int32_t

from fastcache_ext.core cimport Core

cdef class Leases(list):
    pass

# Whether no key stands there twice. n * n steps.
cdef bint distinct(const int32_t *keys, int n) noexcept
cdef double seconds(object timeout, double default) except? -7.0

cdef int read_plain(Core core, object layer, object experts, int32_t *keys, int room) except -1

cdef class Keys:
    cdef int32_t *keys      # [n] distinct dense keys, in order of first appearance
    cdef int32_t *index     # [count] input -> distinct
    cdef int n
    cdef int count

    cdef int read(self, Core core, object layer, object experts) except -1
    cdef int adopt(self, const int32_t *keys, int n) except -1
    cdef int find(self, int32_t key) noexcept
    cdef void put(self, int i, int32_t key, int j) noexcept
    cdef int reserve(self, Py_ssize_t count) except -1
