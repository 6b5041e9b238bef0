# One native thread per store for what must not hold up a read or a caller: populating the arena, locking it, offering it
# for registration, and moving misaligned extents after the ring has landed them.
from libc.stdint cimport int32_t, int64_t

from fastcache_ext.monitor cimport fc_core
from fastcache_ext.threads cimport pthread_t
from fastcache_ext.uring cimport fc_uring

ctypedef struct fc_worker:
    fc_core *core
    fc_uring *ring          # or NULL; touched under the core's mutex alone, so that it can be taken away
    int32_t register_       # 1: offer the pieces to the ring
    int32_t mlock           # 1: mlock what is not registered
    int64_t look_ns         # its own, as the next two: when it looks again what the ghosts have heard,
    int64_t rest_until_ns   # before when it serves them nothing,
    int32_t idle_looks      # and in how many looks in a row there was nothing
    int32_t stop            # atomic
    int32_t started
    int32_t settled         # atomic: 1 once the arena is populated, locked and registered as far as it will be
    int32_t populate_errno  # atomic
    int32_t mlock_errno     # atomic
    pthread_t thread

cdef int worker_start(fc_worker *w) noexcept nogil             # 0 or a positive errno
# The ring is about to go: the worker touches it no more.
cdef void worker_leave_ring(fc_worker *w) noexcept nogil
cdef int worker_join(fc_worker *w, int64_t timeout_ns) noexcept nogil
