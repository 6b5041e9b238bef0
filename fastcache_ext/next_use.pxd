from fastcache_ext.policy cimport fc_policy

cdef int next_use_init(fc_policy *p) noexcept nogil
