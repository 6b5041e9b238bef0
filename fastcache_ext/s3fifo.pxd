from fastcache_ext.policy cimport fc_policy

cdef int s3fifo_init(fc_policy *p) noexcept nogil
