# Extents -> aligned chunk reads, in two classes. Pure data: no lock, no thread, no system call of its own.
# The core (the monitor) calls these under its mutex; an engine sees an fc_port and fc_op, and never the queue.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

cdef enum:
    FC_DEMAND = 0       # somebody waits, or will at once
    FC_GUESS = 1        # a prefetch: served only while no demand is queued

cdef enum:
    FC_STOP = -1        # take(): no op will ever come again
    FC_AGAIN = 0        # settle(): the op was changed to what is still missing; submit it again
    FC_FINISHED = 1     # settle(): the op is over and no longer the engine's

ctypedef struct fc_file:
    int fd_direct           # opened with O_DIRECT, or -1 where that was refused or not wanted
    int fd_buffered         # opened without; -1 only for a memory file
    int32_t direct          # atomic: 1 while direct reads serve this file
    int32_t direct_errno    # atomic: errno of the direct read that ended direct mode at read time, else 0
    int64_t align           # bytes: alignment of offset, length and memory of a direct read (a power of two)
    int64_t size            # bytes at open
    int64_t dev             # fingerprint: device
    int64_t ino             # fingerprint: inode
    int64_t mtime_ns        # fingerprint: modification time
    int64_t looked_ns       # atomic: monotonic; when a look began that found the file still to be that one
    const uint8_t *memory   # a memory file (MemorySource): its first byte; else NULL

ctypedef struct fc_extent:
    int64_t offset          # bytes: where the payload starts in its file
    int64_t nbytes          # bytes of payload; > 0
    int64_t place           # bytes: where its aligned window starts in the slot; a multiple of the window alignment
    int32_t file            # index into the files
    int32_t shift           # bytes the payload is moved down inside its window after arrival, for the dtype's alignment

cdef enum:                  # op.cancel
    FC_CANCEL_NOT = 0
    FC_CANCEL_WANTED = 1    # nobody wants it any more: the engine may stop it, and settles it with -ECANCELED if it could
    FC_CANCEL_ASKED = 2     # the engine has tried

ctypedef struct fc_op:          # one read that an engine is asked for
    fc_load *load           # NULL while in the pool
    fc_file *file
    uint8_t *dest           # where the byte at `offset` goes
    int64_t offset          # bytes: file offset of the next byte wanted (aligned while direct)
    int64_t nbytes          # bytes to ask for (aligned while direct)
    int64_t expected        # bytes that must come: all but the padding past the end of the file
    int64_t lo              # payload of this chunk, as file offsets [lo, hi): what a buffered read asks for
    int64_t hi
    int32_t fd              # the descriptor to read from
    int32_t direct          # 1: fd is the direct one
    int32_t buf_index       # registered buffer that `dest` lies in, or -1
    int32_t stalls          # tries in a row without progress
    int32_t klass           # FC_DEMAND or FC_GUESS, when it was taken
    int32_t ioprio          # the kernel's: class << 13 | level; 0: none
    int32_t cancel          # atomic: FC_CANCEL_*
    int64_t charge          # bytes it counts in guess_bytes
    int64_t begun           # of a guess: what evidence_read_begins() gave
    int64_t submitted       # bytes asked of the device so far, retries included
    int64_t asked           # bytes it counts in the gauge of bytes in flight
    int64_t back_ns         # monotonic: when the engine saw that it is over, if it says so; else 0: when it is settled
    uint64_t id             # unique over the store's life: a completion is matched by it
    fc_op *next             # for whoever holds the op: the pool's free list, an engine's own list

ctypedef struct fc_load:        # one expert on its way into one destination
    int32_t key             # dense key of the expert
    int32_t slot            # destination slot, or -1: a private buffer, or a guess that waits
    int32_t place           # where the evidence has it: its slot, or n_slots and more while it waits; -1: a private buffer
    int32_t waiting         # 1: a guess that has no slot yet (waiting.pxd)
    void *priv              # the private buffer (arena.fc_private), or NULL
    uint8_t *dest           # first byte of the destination
    const fc_extent *extents
    int32_t n_extents
    int32_t klass           # FC_DEMAND or FC_GUESS: the class it is queued in now
    int32_t guess           # 1: a prefetch issued it; kept when a demand promotes it
    int32_t origin          # why it was issued; kept when a demand promotes a guess
    int32_t buf_index       # registered buffer of the destination, or -1
    int32_t queued          # 1 while it stands in a queue
    int32_t landing         # 1 while its bytes are checked and moved, outside the mutex
    int32_t moves           # 1 if an extent has a shift
    int32_t ops             # reads in the hands of the engine
    int32_t torn            # 1: a read of it was stopped and dropped; bytes before the cursor are missing
    int32_t extent          # cursor: next extent to cut
    int64_t cut             # cursor: bytes of that extent's window already cut
    int64_t payload         # bytes of payload in all extents
    int64_t back_ns         # monotonic: when the last of its reads that are over came back
    int32_t error           # 0, or a positive errno, or FC_ESHORT / FC_ECHANGED / FC_ECANCELLED of the core
    int32_t error_file
    int64_t error_offset
    int64_t error_wanted
    int64_t error_got
    int64_t generation
    int32_t phase           # that the store was in when it was issued
    int32_t joins           # demand requests that joined it
    int32_t joined[3]       # of those, by their phase
    int64_t early           # bytes of it that had been asked for when the first of them came
    int32_t waits           # waiters that still stand in `waiters`
    void *waiters           # the core's list
    fc_load *prev           # neighbours in its queue
    fc_load *next
    fc_load *older          # neighbours in the core's list of private loads, or of loads to be moved
    fc_load *newer

ctypedef struct fc_queue:
    fc_load *head[2]        # [class] loads with chunks left to cut, oldest first
    fc_load *tail[2]
    int64_t chunk           # bytes: largest read for a demand
    int64_t guess_chunk     # bytes: largest read for a guess: a demand waits for one of these at most
    int64_t guess_bytes     # bytes of guess reads in the hands of the engine
    int64_t guess_limit     # bytes of guess reads that may be
    int32_t guess_ops       # guess reads in the hands of the engine
    int32_t guess_ops_limit     # that may be
    int32_t demand_ops      # demand reads in the hands of the engine; no guess is given to it meanwhile
    int32_t promoted        # of guess_ops, those that a demand waits for by now
    int32_t ioprio[2]       # atomic: [class] of reads, where the device's scheduler heeds it, else 0
    uint64_t next_id

ctypedef struct fc_port:        # what an engine sees of the monitor; both functions take and leave the mutex themselves
    void *ctx
    # Fill `out` with at most `room` ops. Returns their number, or FC_STOP. `may_block` = 1: sleep until there is one
    # (an engine says so only while none is in its hands). With 0 the engine is about to sleep in the kernel; the port
    # remembers that, and calls the engine's kick when something is queued.
    int (*take)(void *ctx, fc_op **out, int room, int may_block) noexcept nogil
    # Report `res` of the read `op`: bytes read, or -errno. Returns FC_FINISHED or FC_AGAIN. Never call it while holding a lock.
    int (*settle)(void *ctx, fc_op *op, int64_t res) noexcept nogil
    # How many completions an engine with these `n` ops in flight, about to sleep in the kernel, may wait for without keeping
    # anybody waiting: more than one only while one call alone waits for all of them. A kick must end that sleep too.
    int (*patience)(void *ctx, fc_op **ops, int n) noexcept nogil

cdef void queue_init(fc_queue *q, int64_t chunk, int64_t guess_chunk, int64_t guess_limit) noexcept nogil
cdef void queue_push(fc_queue *q, fc_load *load) noexcept nogil
cdef void queue_unlink(fc_queue *q, fc_load *load) noexcept nogil
cdef bint queue_promote(fc_queue *q, fc_load *load) noexcept nogil
# `to` stands where `load` stood, of which it is a copy.
cdef void queue_moved(fc_queue *q, const fc_load *load, fc_load *to) noexcept nogil
# Bytes of the load that have been cut into reads; padding at most more.
cdef int64_t load_cut(const fc_load *load) noexcept nogil
# The engine has given `op` back.
cdef void queue_settled(fc_queue *q, const fc_op *op) noexcept nogil
cdef bint queue_empty(const fc_queue *q) noexcept nogil
# Of which load queue_next() would cut a chunk; NULL: of none.
cdef fc_load *queue_due(const fc_queue *q) noexcept nogil
cdef bint queue_next(fc_queue *q, fc_file *files, fc_op *op) noexcept nogil
cdef int op_settle(fc_op *op, int64_t res, int32_t direct_required) noexcept nogil

cdef enum:                  # failures that are no errno; they stand where a positive errno could
    FC_ESHORT = 1001        # the file ended before the expected byte, or a read made no progress
    FC_ECHANGED = 1002      # a file's fingerprint is not the one taken at open
    FC_ECLOSED = 1003       # the store was closed while the read was queued
    FC_ECANCELLED = 1004    # a guess, cancelled
    FC_ESOURCE = 1005       # a Python source raised
    FC_ECHECKSUM = 1007     # what was read is not what the sidecar knows; 1006 is the arena's
    FC_ENOROOM = 1008       # a guess for which nothing could be evicted when its turn came
