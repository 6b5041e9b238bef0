"""Checksums of experts over their payload in layout order, wherever the payload lies in a slot.

Plain C; no lock, no thread. Knows no slot table and no file. May import crc and libc.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from fastcache_ext.crc cimport crc32c_more


cdef void *copied(const void *source, int64_t nbytes) noexcept nogil:
    cdef void *p = malloc(<size_t>nbytes + 1)
    if p != NULL:
        memcpy(p, source, <size_t>nbytes)
    return p


cdef fc_sums *sums_new(int64_t n_keys, int32_t width, int64_t n_records, const int64_t *place, const int64_t *nbytes,
                       const uint16_t *record_of, const uint32_t *sums) noexcept nogil:
    cdef fc_sums *s = <fc_sums *>calloc(1, sizeof(fc_sums))
    if s == NULL:
        return NULL
    s.width = width
    s.keep = sums == NULL
    s.place = <int64_t *>copied(place, n_keys * width * <int64_t>sizeof(int64_t))
    s.nbytes = <int64_t *>copied(nbytes, n_records * width * <int64_t>sizeof(int64_t))
    s.record_of = <uint16_t *>copied(record_of, n_keys * <int64_t>sizeof(uint16_t))
    if sums == NULL:
        s.sums = <uint32_t *>calloc(<size_t>n_keys + 1, sizeof(uint32_t))
    else:
        s.sums = <uint32_t *>copied(sums, n_keys * <int64_t>sizeof(uint32_t))
    if s.place == NULL or s.nbytes == NULL or s.record_of == NULL or s.sums == NULL:
        sums_free(s)
        return NULL
    return s


cdef void sums_free(fc_sums *s) noexcept nogil:
    if s != NULL:
        free(s.place)
        free(s.nbytes)
        free(s.record_of)
        free(s.sums)
        free(s)


cdef bint sums_agree(fc_sums *s, int32_t key, const uint8_t *data, uint32_t *wanted, uint32_t *got) noexcept nogil:
    cdef const int64_t *place = s.place + <int64_t>key * s.width
    cdef const int64_t *nbytes = s.nbytes + <int64_t>s.record_of[key] * s.width
    cdef uint32_t crc = 0
    cdef int32_t t
    for t in range(s.width):
        if nbytes[t] > 0:
            crc = crc32c_more(crc, data + place[t], nbytes[t])
    got[0] = crc
    if s.keep:
        s.sums[key] = crc
    wanted[0] = s.sums[key]
    return crc == wanted[0]
