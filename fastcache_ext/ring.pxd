# One io_uring: made with the best flags the kernel grants, entered, reaped, and told of the memory reads go to.
# All of it is for the one thread that made the ring, except ring_offer and the fields marked atomic.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from fastcache_ext.liburing cimport fc_cqe, fc_io_uring, fc_liburing_table, fc_sqe, iovec

cdef enum:
    RING_MAX_ENTRIES = 4096
    RING_MAX_PIECES = 4096      # registered buffers; the kernel's limit is 16384
    RING_MAX_READ = 1 << 30     # bytes: one registered buffer at most; of one read the kernel cuts what nears 2 GiB
    RING_BATCH = 32             # completions reaped at a time
    RING_NAP_US = 1000          # between tries while the kernel has no room

ctypedef struct fc_ring:        # allocate with 64-byte alignment, zeroed
    fc_io_uring io
    const fc_liburing_table *lib
    int32_t flags               # FC_SETUP_* that the kernel accepted
    int entries                 # SQEs
    int broken                  # 0, or the positive errno after which the ring is never entered again
    int refusals                # of submissions, in a row
    uint32_t turn               # SQEs handed out since the ring was made, modulo 2^32
    int sparse                  # 1 once the kernel's table of buffers exists
    int32_t offered             # atomic: pieces offered
    int32_t registered          # atomic: pieces registered; grows up to `offered`, or to the first refusal
    int32_t register_error      # atomic: positive errno of that refusal
    iovec pieces[RING_MAX_PIECES]   # written before `offered` covers them

# Make the ring; 0 or a positive errno. Fewer entries than wanted where memory is short.
cdef int ring_make(fc_ring *r, const fc_liburing_table *lib, int wanted) noexcept nogil
cdef void ring_drop(fc_ring *r) noexcept nogil
# A zeroed-and-filled SQE that waits for ring_push, or NULL when the queue is full.
cdef fc_sqe *ring_sqe(fc_ring *r, int opcode, int fd, void *dest, int64_t nbytes, uint64_t user_data) noexcept nogil
# Submit what waits, then sleep until `wait` completions are there; returns early when the kernel says so.
cdef void ring_push(fc_ring *r, unsigned wait) noexcept nogil
# Take up to RING_BATCH completions out of the ring; returns their number.
cdef int ring_reap(fc_ring *r, fc_cqe *out) noexcept nogil
# Whether the kernel has taken the SQE that was handed out as number `turn` (the first is 0).
cdef bint ring_took(fc_ring *r, uint32_t turn) noexcept nogil
# 0 or -errno. Any thread, one at a time.
cdef int ring_offer(fc_ring *r, int index, void *base, int64_t nbytes) noexcept nogil
cdef bint ring_offer_waits(fc_ring *r) noexcept nogil
# Register the next offered piece. One at a time: a GiB takes 3 to 55 ms.
cdef void ring_register(fc_ring *r) noexcept nogil
