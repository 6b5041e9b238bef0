# The pread engine: n native threads over the same port. Also serves memory files (memcpy).
from libc.stdint cimport int64_t
from fastcache_ext.ioqueue cimport fc_port

cdef extern from *:
    """
    typedef struct fc_pread fc_pread;         /* opaque: pread.pyx knows what it is */
    """
    ctypedef struct fc_pread:
        pass

# Start n threads. NULL with *error = a positive errno when none could be started.
cdef fc_pread *pread_start(const fc_port *port, int n_threads, int *error) noexcept nogil
# As uring_join. No kick: its threads sleep inside take().
cdef int pread_join(fc_pread *threads, int64_t timeout_ns) noexcept nogil
cdef int pread_threads(const fc_pread *threads) noexcept nogil
