"""The policy interface: picks the implementation, and holds what they share.

May import libc, atomics and the policies.
"""
from libc.errno cimport EINVAL

from fastcache_ext.lfu cimport lfu_init
from fastcache_ext.lru cimport lru_init
from fastcache_ext.next_use cimport next_use_init
from fastcache_ext.s3fifo cimport s3fifo_init
from fastcache_ext.sieve cimport sieve_init

NAMES = {"lru": FC_LRU, "next_use": FC_NEXT_USE, "lfu": FC_LFU, "s3fifo": FC_S3FIFO, "sieve": FC_SIEVE}


cdef int policy_init(fc_policy *p, int kind, const fc_view *view) noexcept nogil:
    p.kind = kind
    p.v = view[0]
    p.state = NULL
    p.witness = NULL
    if kind == FC_LRU:
        return lru_init(p)
    if kind == FC_NEXT_USE:
        return next_use_init(p)
    if kind == FC_LFU:
        return lfu_init(p)
    if kind == FC_S3FIFO:
        return s3fifo_init(p)
    if kind == FC_SIEVE:
        return sieve_init(p)
    return -EINVAL
