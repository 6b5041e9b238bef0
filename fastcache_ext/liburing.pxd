# The C functions of a liburing found at run time, and the few kernel structures they take, declared here: the build
# needs no liburing and no recent kernel header, and the layouts are kernel ABI.
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #ifndef FC_LIBURING_H
    #define FC_LIBURING_H
    #include <stdint.h>
    #include <sys/uio.h>

    enum { FC_OP_ASYNC_CANCEL = 14, FC_OP_READ_FIXED = 4, FC_OP_POLL_ADD = 6, FC_OP_READ = 22 };    /* IORING_OP_* */
    enum { FC_SETUP_COOP_TASKRUN = 1 << 8,                         /* IORING_SETUP_*: Linux 5.19 */
           FC_SETUP_SINGLE_ISSUER = 1 << 12,                       /* 6.0 */
           FC_SETUP_DEFER_TASKRUN = 1 << 13 };                     /* 6.1; needs SINGLE_ISSUER */

    typedef struct {
        uint8_t opcode, flags;
        uint16_t ioprio;
        int32_t fd;
        uint64_t off, addr;
        uint32_t len, rw_flags;
        uint64_t user_data;
        uint16_t buf_index, personality;
        int32_t file_index;
        uint64_t addr3, pad;
    } fc_sqe;
    typedef struct { uint64_t user_data; int32_t res; uint32_t flags; } fc_cqe;
    typedef struct {
        uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
        uint32_t sq_off[10], cq_off[10];
    } fc_ring_params;
    _Static_assert(sizeof(fc_sqe) == 64 && sizeof(fc_cqe) == 16 && sizeof(fc_ring_params) == 120, "io_uring ABI");

    /* struct io_uring, of which liburing 2.x uses 216 bytes. Two pointers in it are read here; the soname froze them */
    typedef struct { _Alignas(64) unsigned char opaque[1024]; } fc_io_uring;
    enum { FC_RING_SQ_KHEAD = 0, FC_RING_CQ_KHEAD = 104 };

    typedef struct {
        int (*queue_init_params)(unsigned, fc_io_uring *, fc_ring_params *);
        void (*queue_exit)(fc_io_uring *);
        fc_sqe *(*get_sqe)(fc_io_uring *);
        int (*submit_and_wait)(fc_io_uring *, unsigned);
        unsigned (*peek_batch_cqe)(fc_io_uring *, fc_cqe **, unsigned);
        int (*register_buffers_sparse)(fc_io_uring *, unsigned);            /* this and the next: NULL where absent */
        int (*register_buffers_update_tag)(fc_io_uring *, unsigned, const struct iovec *, const uint64_t *, unsigned);
        void (*cq_advance)(fc_io_uring *, unsigned);                        /* inline in most builds: then ours */
    } fc_liburing_table;

    static inline unsigned *fc_ring_word(fc_io_uring *ring, int at) {
        unsigned *word;
        __builtin_memcpy(&word, ring->opaque + at, sizeof word);
        return word; }

    /* SQEs that the kernel has taken since the ring was made, modulo 2^32 */
    static inline uint32_t fc_ring_taken(fc_io_uring *ring) {
        return __atomic_load_n(fc_ring_word(ring, FC_RING_SQ_KHEAD), __ATOMIC_ACQUIRE); }

    static inline void fc_cq_advance(fc_io_uring *ring, unsigned n) {
        unsigned *khead = fc_ring_word(ring, FC_RING_CQ_KHEAD);
        __atomic_store_n(khead, *khead + n, __ATOMIC_RELEASE); }
    #endif
    """
    enum:
        FC_OP_ASYNC_CANCEL
        FC_OP_READ_FIXED
        FC_OP_POLL_ADD
        FC_OP_READ
        FC_SETUP_COOP_TASKRUN
        FC_SETUP_SINGLE_ISSUER
        FC_SETUP_DEFER_TASKRUN

    struct iovec:
        void *iov_base
        size_t iov_len

    ctypedef struct fc_sqe:         # one request
        uint8_t opcode
        uint16_t ioprio
        int32_t fd
        uint64_t off                # bytes
        uint64_t addr
        uint32_t len                # bytes
        uint32_t rw_flags           # of a poll: its events
        uint64_t user_data
        uint16_t buf_index

    ctypedef struct fc_cqe:         # one completion
        uint64_t user_data
        int32_t res                 # bytes, or -errno

    ctypedef struct fc_ring_params:
        uint32_t sq_entries         # what the kernel gave: the request rounded up to a power of two
        uint32_t flags              # FC_SETUP_*

    ctypedef struct fc_io_uring:      # struct io_uring, over-sized and opaque
        pass

    ctypedef struct fc_liburing_table:      # every function returns -errno where it can fail; none sets errno
        int (*queue_init_params)(unsigned, fc_io_uring *, fc_ring_params *) noexcept nogil
        void (*queue_exit)(fc_io_uring *) noexcept nogil
        fc_sqe *(*get_sqe)(fc_io_uring *) noexcept nogil
        int (*submit_and_wait)(fc_io_uring *, unsigned) noexcept nogil
        unsigned (*peek_batch_cqe)(fc_io_uring *, fc_cqe **, unsigned) noexcept nogil
        int (*register_buffers_sparse)(fc_io_uring *, unsigned) noexcept nogil
        int (*register_buffers_update_tag)(fc_io_uring *, unsigned, const iovec *, const uint64_t *,
                                           unsigned) noexcept nogil
        void (*cq_advance)(fc_io_uring *, unsigned) noexcept nogil

    uint32_t fc_ring_taken(fc_io_uring *ring) noexcept nogil
    void fc_cq_advance(fc_io_uring *ring, unsigned n) noexcept nogil

# The functions, or NULL when load() was not called or found none. They never change once they are there.
cdef fc_liburing_table *liburing_table() noexcept nogil
