# The io_uring engine: one native thread owns the ring (ring.pxd), which is the only user of liburing's functions.
from libc.stdint cimport int32_t, int64_t, uint8_t
from fastcache_ext.ioqueue cimport fc_port

cdef extern from *:
    """
    typedef struct fc_uring fc_uring;     /* opaque: uring.pyx knows what it is */
    """
    ctypedef struct fc_uring:
        pass

# Make the ring and start its thread. Returns NULL with *error = a positive errno when the kernel or the limits refuse
# (EPERM, ENOSYS, ENOMEM, ...) or when no liburing was loaded (ENOSYS). `depth`: reads in flight at most.
cdef fc_uring *uring_start(const fc_port *port, int depth, int *error) noexcept nogil
# Wake the thread if it sleeps in the kernel. Callable under the monitor's mutex: one write() to an eventfd, no lock.
cdef void uring_kick(fc_uring *ring) noexcept nogil
# Have the thread try to stop those of its reads whose `cancel` says FC_CANCEL_WANTED. Callable like uring_kick.
cdef void uring_stop_reads(fc_uring *ring) noexcept nogil
# Reads that the kernel was asked to stop so far.
cdef int32_t uring_stops(fc_uring *ring) noexcept nogil
# Offer a piece of memory for fixed-buffer registration: the ring's thread registers it when it next looks, which is
# after its next take(), one of 0 ops included. Until then, and after a refusal, reads into it are plain ones.
# Pieces are offered in order 0, 1, 2, ...; each at most 1 GiB and fully populated. Callable from any thread, one at a
# time. 0 or -errno.
cdef int uring_offer(fc_uring *ring, int index, void *base, int64_t nbytes) noexcept nogil
# Pieces registered so far; *error = positive errno of the first refusal, else 0.
cdef int uring_registered(fc_uring *ring, int *error) noexcept nogil
# Wait for the thread to leave (it leaves after take() said FC_STOP and its last completion came), at most timeout_ns
# (< 0: no limit). 0: gone and freed. ETIMEDOUT: still in a read; the ring lives and may be joined again, or leaked.
cdef int uring_join(fc_uring *ring, int64_t timeout_ns) noexcept nogil
# Setup flags the kernel accepted, for describe().
cdef int32_t uring_flags(const fc_uring *ring) noexcept nogil
