from fastcache_ext.policy cimport fc_policy

cdef int sieve_init(fc_policy *p) noexcept nogil
